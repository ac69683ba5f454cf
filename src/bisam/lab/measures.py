"""Measures of a classifier, each from its confusion counts, in per cent: one `Measure` each, in `MEASURES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measure:
    """What is computed from confusion counts: (K, K + 1), true classes by predicted ones; the last column is none."""

    name: str
    """Its name in a record, after "validation_" or "test_"."""
    title: str
    compute: Callable[[Tensor], float]
    lowest: float = 0.0


def confusion(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Counts (K, K + 1) of true and predicted classes. Of equal logits the first is predicted; NaN predicts none.

    >>> confusion(torch.tensor([[1.0, 2.0], [3.0, 0.0], [torch.nan, 0.0]]), torch.tensor([1, 1, 0]), 2).tolist()
    [[0, 0, 1], [1, 1, 0]]
    """
    predicted = torch.where(logits.isnan().any(1), classes, logits.argmax(1))
    cells = labels * (classes + 1) + predicted
    return torch.bincount(cells, minlength=classes * (classes + 1)).view(classes, classes + 1)


def _accuracy(counts: Tensor) -> float:
    return 100 * _ratio(_hits(counts).sum(), counts.sum())


def _balanced(counts: Tensor) -> float:
    """The mean of the recalls of the classes that have samples."""
    present = counts.sum(1) > 0
    return 100 * float((_hits(counts)[present] / counts.sum(1)[present]).mean())


def _macro_f1(counts: Tensor) -> float:
    """The mean F1 of the classes that have samples or predictions; the F1 of a class without a hit is 0."""
    total = counts.sum(1) + counts[:, :-1].sum(0)
    present = total > 0
    return 100 * float((2 * _hits(counts)[present] / total[present]).mean())


def _f1(counts: Tensor) -> float:
    """F1 of class 1 of two, as GLUE has it."""
    if len(counts) != 2:
        raise ValueError(f"F1 is for two classes, got {len(counts)}: use macro_f1")
    return 100 * _ratio(2 * counts[1, 1], counts[1].sum() + counts[:, 1].sum())


def _matthews(counts: Tensor) -> float:
    """The Matthews correlation, also of more than two classes (Gorodkin 2004); 0 where it is undefined."""
    total, true, predicted = counts.sum(), counts.sum(1), counts.sum(0)
    covariance = _hits(counts).sum() * total - (true * predicted[:-1]).sum()
    spread = (total**2 - (true**2).sum()) * (total**2 - (predicted**2).sum())
    return 100 * _ratio(covariance, spread.sqrt())


def _hits(counts: Tensor) -> Tensor:
    return counts[:, :-1].diagonal()


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else 0.0


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("accuracy", "accuracy", _accuracy),
        Measure("balanced_accuracy", "balanced accuracy", _balanced),
        Measure("macro_f1", "macro F1", _macro_f1),
        Measure("f1", "F1", _f1),
        Measure("mcc", "Matthews correlation", _matthews, lowest=-100.0),
    )
}


def find_measure(name: str) -> Measure:
    """The measure of that name; ValueError with the names that there are if there is none."""
    if name not in MEASURES:
        raise ValueError(f"unknown measure {name!r}: choose from {', '.join(MEASURES)}")
    return MEASURES[name]


def computed(names: tuple[str, ...], counts: Tensor) -> dict[str, float]:
    """The measures of these names, in per cent.

    >>> computed(("accuracy", "mcc"), torch.tensor([[5, 1, 0], [1, 5, 0]]))
    {'accuracy': 83.33333333333334, 'mcc': 66.66666666666666}
    """
    exact = counts.double().cpu()
    return {name: find_measure(name).compute(exact) for name in names}


def title_of(name: str) -> str:
    """The title of a measure by its name in a result or a line of metrics, such as "test_macro_f1".

    >>> title_of("test_macro_f1"), title_of("validation_accuracy"), title_of("test_top5_accuracy")
    ('macro F1', 'accuracy', 'top5 accuracy')
    """
    name = name.removeprefix("validation_").removeprefix("test_")
    return MEASURES[name].title if name in MEASURES else name.replace("_", " ")


def lowest_of(name: str) -> float:
    """The lowest value of a measure by its name in a result, in per cent; the highest is 100."""
    name = name.removeprefix("validation_").removeprefix("test_")
    return MEASURES[name].lowest if name in MEASURES else 0.0
