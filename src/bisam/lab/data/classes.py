"""From the values of a label column to the numbers of classes, with the checks of a classification."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bisam.lab.data.images import DataError

MOST_FRACTIONS = 20
"""Different values of a label with fractions: more are a quantity, not classes. More whole numbers may be one."""

MOST_NAMED = 10
"""Classes that a line names; of more, their number."""

REGRESSION = (
    "That is regression, and sharpness-aware training with the 0-1 loss is for classes: give a column of classes by "
    "--label (from Python, classes as y)"
)

SECRET = -1
"""The label of test samples whose classes are not published, as in GLUE."""


def number_classes(
    labels: Mapping[str, Sequence[Any]], where: str, names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The labels of each part as numbers from 0, and the names of the classes.

    Classes are those of the training part, in their order: by number or by name. `names` are known ones, where labels
    are numbers already.

    >>> found, names = number_classes({"train": ["cat", "dog", "dog", "cat"], "test": ["dog"]}, "pets.csv")
    >>> found["train"].tolist(), found["test"].tolist(), names
    ([0, 1, 1, 0], [1], ['cat', 'dog'])
    """
    for part, values in labels.items():
        _check_present(values, f"{where}, {part}")
        _check_single(values, f"{where}, {part}")
    values = labels["train"]
    if names is None and any(isinstance(value, float) and not value.is_integer() for value in values):
        _check_no_quantity(values, where)
    counts = Counter(values)
    ordered: list[Any] = list(range(len(names))) if names is not None else _ordered(counts)
    _check_counts(counts, ordered, where)
    numbers = {value: number for number, value in enumerate(ordered)}
    for part, found in labels.items():
        unknown = [value for value in found if value not in numbers]
        if part == "test" and len(unknown) == len(found) and set(unknown) == {SECRET}:
            raise DataError(
                f"{where}: all labels of the test part are {SECRET}, so they are secret: test another part, as in "
                "--test validation"
            )
        if unknown:
            raise DataError(
                f"{where}: the label {unknown[0]!r} is in the {part} part and not in the training part: remove these "
                f"rows ({len(unknown)}), or add some to the training part"
            )
    tensors = {part: torch.tensor([numbers[value] for value in found]) for part, found in labels.items()}
    return tensors, list(names) if names is not None else [str(plain(value)) for value in ordered]


def hint_of_quantity(classes: Sequence[str]) -> str:
    """What to add to an error about rare classes, if they look like a quantity.

    >>> hint_of_quantity([str(age) for age in range(18, 60)])
    '. The labels are 42 whole numbers: if they are a quantity, that is regression, which bisam does not do'
    >>> hint_of_quantity(["cat", "dog"])
    ''
    """
    are_numbers = all(re.fullmatch(r"-?\d+", name) for name in classes)
    if len(classes) <= MOST_FRACTIONS or not are_numbers:
        return ""
    return (
        f". The labels are {len(classes)} whole numbers: if they are a quantity, that is regression, which bisam does "
        "not do"
    )


def note_of_spellings(classes: Sequence[str]) -> list[str]:
    """A line if some classes differ only in case or spaces, and may be one class.

    >>> note_of_spellings(["No", "no", "no ", "yes"])
    ["the classes 'No', 'no', 'no ' differ only in case or spaces: if they are one class, write them alike"]
    """
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(" ".join(name.split()).casefold(), []).append(repr(name))
    several = [", ".join(names) for names in alike.values() if len(names) > 1]
    if not several:
        return []
    listed = "; ".join(several[:MOST_NAMED]) + "; …" * (len(several) > MOST_NAMED)
    return [f"the classes {listed} differ only in case or spaces: if they are one class, write them alike"]


def counted(classes: Sequence[str], counts: Sequence[int]) -> str:
    """
    >>> counted(["cat", "dog"], [40, 30]), counted([f"c{number}" for number in range(12)], [5] * 12)[-15:]
    ('cat 40, dog 30', 'c9 5 and 2 more')
    """
    named = [f"{name:.40} {count}" for name, count in zip(classes, counts, strict=True)]
    rest = len(named) - MOST_NAMED
    return ", ".join(named[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def listed_rows(rows: Sequence[int]) -> str:
    """Where a value is missing, for an error.

    >>> listed_rows([3]), listed_rows([3, 5])
    ('row 3 (counted from 0)', '2 rows, the first is row 3 (counted from 0)')
    """
    first = f"row {rows[0]} (counted from 0)"
    return first if len(rows) == 1 else f"{len(rows)} rows, the first is {first}"


def _check_present(values: Sequence[Any], where: str) -> None:
    missing = [row for row, value in enumerate(values) if value is None or (_is_float(value) and math.isnan(value))]
    if missing:
        raise DataError(
            f"{where}: the label is missing in {listed_rows(missing)}: fill it in, or remove the row. In a CSV file "
            "the words NA, None and null are read as missing: write another word for such a class"
        )


def _check_single(values: Sequence[Any], where: str) -> None:
    several = next((value for value in values if isinstance(value, (list, dict))), None)
    if several is not None:
        raise DataError(f"{where}: a label is {several!s:.40}, and each sample has one class: give a text or a number")


def _check_no_quantity(values: Sequence[Any], where: str) -> None:
    different = len(set(values))
    if different > MOST_FRACTIONS:
        raise DataError(
            f"{where}: the labels are numbers with fractions and {different} different values. {REGRESSION}"
        )


def _check_counts(counts: Mapping[Any, int], ordered: Sequence[Any], where: str) -> None:
    present = [value for value in ordered if counts.get(value)]
    if len(present) < 2:
        if not present:
            raise DataError(f"{where}: the training part has no samples: add some")
        only = f": all labels are {plain(present[0])!r}"
        raise DataError(f"{where}: the training part has 1 class{only}. Two classes or more are needed")
    if len(present) < len(ordered):
        missing = next(value for value in ordered if not counts.get(value))
        raise DataError(f"{where}: class {missing!r} has no training sample: add some, or remove the class")
    single = [value for value in present if counts[value] == 1]
    if len(single) > len(present) / 2 and all(isinstance(value, (int, float)) for value in present):
        raise DataError(f"{where}: the labels are numbers, most of which occur once. {REGRESSION}")
    if single:
        more = f" and {len(single) - 1} more have" if len(single) > 1 else " has"
        hint = hint_of_quantity([str(plain(value)) for value in present])
        raise DataError(
            f"{where}: class {plain(single[0])!r}{more} one sample, which cannot be both trained on and tested: add "
            f"samples, or remove the class{hint}"
        )


def _ordered(values: Iterable[Any]) -> list[Any]:
    """By value where all are numbers, by name otherwise."""
    found = list(values)
    if all(isinstance(value, (int, float)) for value in found):
        return sorted(found)
    return sorted(found, key=str)


def plain(value: Any) -> Any:
    """A whole number without its fraction of 0."""
    return int(value) if _is_float(value) and value.is_integer() else value


def _is_float(value: Any) -> bool:
    return isinstance(value, float)
