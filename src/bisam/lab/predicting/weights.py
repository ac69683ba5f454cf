"""The weights of a finished run, from its folder, and its model with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from bisam.lab.files import read_file
from bisam.lab.models import build
from bisam.lab.records import WEIGHTS, Record
from bisam.lab.records.checkpoint import unpack
from bisam.lab.records.layout import LARGEST_STATE
from bisam.lab.spec import is_function


class TrainedError(ValueError):
    """A trained model cannot be loaded."""


class NoModelError(TrainedError):
    """The model that the weights belong to cannot be made."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder, on the CPU. FileNotFoundError if there are none."""
    try:
        weights, _ = unpack(read_file(folder / WEIGHTS, LARGEST_STATE))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainedError(f"its {WEIGHTS} cannot be used: {error}") from error
    if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
        raise TrainedError(f"its {WEIGHTS} has values that are not finite")
    return weights


def why_no_weights(record: Record) -> str:
    """Why there are none in the folder of a run."""
    if record.result is None:
        return f"it has no {WEIGHTS}, which is written when a run is finished"
    if record.result.get("status") == "diverged":
        return f"it diverged and left no {WEIGHTS}"
    return f"it has no {WEIGHTS}: put that file back into its folder, or train it again"


def model_by_name(
    name: str, classes: int, features: int | None, weights: dict[str, Tensor], *, run_code: bool
) -> nn.Module:
    """The model of that name, with these weights.

    That of a Python file is made only if `run_code`: the record that names it may come from anywhere.
    """
    if is_function(name) and not run_code:
        raise TrainedError(
            f"its model is {name}, code that is not run because a record names it: allow it by --run-code"
        )
    return model_with(weights, name, lambda: build(name, classes, features, pretrained=False))


def model_with(weights: dict[str, Tensor], name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """The model that a function makes, with these weights; `name` is its name in errors."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = make()
    except ValueError as error:
        raise NoModelError(f"its model cannot be made: {error}") from error
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise TrainedError(f"its weights are not those of {name}: {_first_fault(error)}") from error
    return model


def _first_fault(error: RuntimeError) -> str:
    """The first line of torch's list of mismatches, which may be long."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines()]
    first = (lines[1:] or lines)[0]
    return first if len(first) <= 200 else f"{first[:200]}…"
