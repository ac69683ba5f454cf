"""`bisam.lab.load`: a trained model from its folder, and its predictions for new samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bisam.lab import records, spec
from bisam.lab.data import tokens
from bisam.lab.data.new_samples import inputs_like
from bisam.lab.data.preparation import EVALUATION_BATCH
from bisam.lab.models.from_file import called
from bisam.lab.predicting import beside_weights
from bisam.lab.predicting.beside_weights import BesideWeights
from bisam.lab.predicting.weights import (
    NoModelError,
    TrainedError,
    model_by_name,
    model_with,
    read_weights,
    why_no_weights,
)
from bisam.lab.records import PREDICT, WEIGHTS
from bisam.objectives import logits_of

MOST_SHOWN = 10
"""Classes that the repr of a predictor names."""


class Predictor:
    """A trained model that takes inputs as they are before a training: images, rows of numbers, texts."""

    def __init__(self, model: nn.Module, beside: BesideWeights, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.classes = list(beside.preparation.classes)
        """Names of the classes, in the order of the model's outputs."""
        self.beside, self.device = beside, device

    def __repr__(self) -> str:
        """What was trained, and how, as far as the folder has it."""
        trained = [f"model={self.beside.model!r}"]
        if self.beside.method:
            trained.append(f"method={self.beside.method!r}")
        if self.beside.rho is not None:
            trained.append(f"rho={self.beside.rho:g}")
        names = ", ".join(map(repr, self.classes[:MOST_SHOWN])) + ", …" * (len(self.classes) > MOST_SHOWN)
        return f"Predictor({', '.join(trained)}, {len(self.classes)} classes: {names})"

    def predict(self, inputs: Any) -> list[str]:
        """The most probable class of each input."""
        return [self.classes[number] for number in self._logits_of(inputs).argmax(1).tolist()]

    def probabilities(self, inputs: Any) -> Tensor:
        """(N, K), for N inputs as `bisam.lab.fit` takes them, or a data frame with the columns of the training."""
        return self._logits_of(inputs).softmax(1)

    def _logits_of(self, inputs: Any) -> Tensor:
        return self.logits(inputs_like(inputs, self.beside.preparation))

    @torch.no_grad()
    def logits(self, values: Any, batch: int | None = None) -> Tensor:
        """(N, K), float32 on the CPU, for inputs that are checked and as a `DataSplit` has them."""
        prepared = self.beside.preparation
        size, found = batch or EVALUATION_BATCH[prepared.kind], []
        for start in range(0, len(values), size):
            inputs = prepared.apply(values[start : start + size], self._tokenizer, self.device)
            output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
            found.append(logits_of(output).float().cpu())
        return torch.cat(found) if found else torch.empty(0, len(self.classes))

    @cached_property
    def _tokenizer(self) -> Any:
        return tokens.tokenizer(self.beside.model) if self.beside.preparation.kind == "text" else None


def load(
    folder: str | Path,
    model: str | Callable[..., nn.Module] | None = None,
    *,
    device: str | torch.device = "cpu",
    run_code: bool = False,
) -> Predictor:
    """The trained model of a folder: that of a fit, or of one run on one's own data.

    Args:
        model: the function that makes the network, if it was given to `bisam.lab.fit`, or its name as after `--model`,
            if it has moved. By default the one that the folder names.
        device: where to predict.
        run_code: whether to run a Python file that the folder names as the model: it may come from anywhere.

    >>> import bisam.lab, tempfile
    >>> x, y = torch.randn(120, 4), torch.arange(120) % 2
    >>> x[:, 0] += 10 * y - 5
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     found = bisam.lab.fit(
    ...         lambda: nn.Linear(4, 2), (x, y), methods="sam", rho=0.05, seeds=1, epochs=4, quiet=True, runs=runs
    ...     )
    ...     trained = bisam.lab.load(found.folder, lambda: nn.Linear(4, 2))
    >>> trained.classes, trained.predict(x[:4]), trained.probabilities(x).shape
    (['0', '1'], ['0', '1', '0', '1'], torch.Size([120, 2]))
    >>> trained
    Predictor(model='lambda', method='sam', rho=0.05, 2 classes: '0', '1')
    """
    place = Path(folder).expanduser()
    try:
        weights, beside = _weights(place), _beside(place)
        made = _model(model, beside, weights, run_code=run_code)
    except TrainedError as error:
        raise TrainedError(f"{place}: {error}") from error
    return Predictor(made, replace(beside, model=model) if isinstance(model, str) else beside, torch.device(device))


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        if folder.is_dir():
            return read_weights(folder)
    except FileNotFoundError:
        if (record := records.read(folder)).config:
            raise TrainedError(why_no_weights(record)) from None
    raise TrainedError(f"it has no {WEIGHTS}: give the folder of a bisam fit that is finished, or of one of its runs")


def _beside(folder: Path) -> BesideWeights:
    try:
        return beside_weights.read(folder)
    except FileNotFoundError:
        raise TrainedError(
            f"it has no {PREDICT}, with the classes and how inputs are prepared. Runs on data sets of the lab have "
            "none; in the folder of a fit of an older version, the same bisam fit writes it and trains nothing again"
        ) from None


def _model(
    given: str | Callable[..., nn.Module] | None, beside: BesideWeights, weights: dict[str, Tensor], *, run_code: bool
) -> nn.Module:
    classes, features = len(beside.preparation.classes), beside.preparation.features
    if callable(given):
        return model_with(weights, beside.model, lambda: called(given, classes, beside.model))
    if given is not None:  # by the user, not by a record
        return model_by_name(given, classes, features, weights, run_code=True)
    try:
        made = model_by_name(beside.model, classes, features, weights, run_code=run_code)
        if beside.code and spec.code_of(beside.model) != beside.code:
            raise TrainedError(
                f"the code of {beside.model} has changed since the training, and may compute something else from its "
                f"weights. If it is the same network, give --model {beside.model}; from Python load(folder, model)"
            )
        return made
    except NoModelError as error:
        raise TrainedError(
            f"{error}. If it is elsewhere, name it by --model; from Python load(folder, model) also takes the function "
            "that makes it"
        ) from error
