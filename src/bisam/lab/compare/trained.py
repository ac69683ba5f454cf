"""A finished run, loaded from its folder: its model with its weights, and the data that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from bisam.lab.config import Config, recorded
from bisam.lab.data.pools import Pool
from bisam.lab.data.randomness import generator
from bisam.lab.files import read_file
from bisam.lab.models import build
from bisam.lab.records import WEIGHTS, Record
from bisam.lab.records.checkpoint import unpack
from bisam.lab.records.layout import LARGEST_STATE
from bisam.lab.spec import is_function

Load = Callable[[str, bool], Pool]
"""Returns the data set of that name; with True, a part of it is accepted."""


class TrainedError(ValueError):
    """A run cannot be loaded."""


@dataclass
class Trained:
    """A run's model with its weights, and its data."""

    record: Record
    config: Config
    model: nn.Module
    pool: Pool
    is_verified: bool
    """Whether its receipt has the checksum of these data; without a receipt it cannot be verified."""

    @property
    def rows(self) -> Tensor:
        """Rows of its training samples in the data set."""
        return self.pool.rows(self.config)


def trained(record: Record, load: Load, *, run_code: bool = False) -> Trained:
    """Load a run from its folder; raises TrainedError if it cannot be.

    A model of a Python file is made only if `run_code`: the record that names it may come from anywhere.
    """
    config, weights = config_of(record), _weights(record)
    try:
        data = load(config.data, config.partial_data)
    except (ValueError, OSError) as error:
        raise TrainedError(f"its data cannot be loaded: {error}") from error
    is_verified = _is_its_data(record, data)
    return Trained(record, config, _model(config, data, weights, run_code=run_code), data, is_verified)


def shared_rows(runs: Sequence[Trained], samples: int) -> Tensor:
    """At most `samples` training samples that all of these runs share, of one data set: always the same ones."""
    rows = runs[0].rows
    for other in runs[1:]:
        rows = rows[torch.isin(rows, other.rows)]
    if not runs[0].pool.scattered:
        return rows[:samples]
    order = torch.randperm(runs[0].pool.count, generator=generator("inspection", 0))
    return order[torch.isin(order, rows)][:samples]


def config_of(record: Record) -> Config:
    """The configuration of a run, also of an older version: a field that it lacks has its default."""
    try:
        return recorded(record.config)
    except ValueError as error:
        raise TrainedError(str(error)) from error


def _weights(record: Record) -> dict[str, Tensor]:
    try:
        weights, _ = unpack(read_file(record.folder / WEIGHTS, LARGEST_STATE))
    except FileNotFoundError:
        raise TrainedError(_why_no_weights(record)) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainedError(f"its {WEIGHTS} cannot be used: {error}") from error
    if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
        raise TrainedError(f"its {WEIGHTS} has values that are not finite")
    return weights


def _why_no_weights(record: Record) -> str:
    if record.result is None:
        return f"it has no {WEIGHTS}, which is written when a run is finished"
    if record.result.get("status") == "diverged":
        return f"it diverged and left no {WEIGHTS}"
    return f"it has no {WEIGHTS}: put that file back into its folder, or train it again"


def _is_its_data(record: Record, data: Pool) -> bool:
    expected = (record.receipt or {}).get("data_checksum")
    if not isinstance(expected, str):
        return False
    if expected != data.checksum:
        raise TrainedError(
            f"these are not the data that it was trained on: their sha256 is {data.checksum[:12]}… and its "
            f"receipt has {expected[:12]}…. Give the folder of its data by --data"
        )
    return True


def _model(config: Config, data: Pool, weights: dict[str, Tensor], *, run_code: bool) -> nn.Module:
    if is_function(config.model) and not run_code:
        raise TrainedError(
            f"its model is {config.model}, code that is not run because a record names it: allow it by --run-code"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            model = build(config.model, data.classes, data.features, pretrained=False)
    except ValueError as error:
        raise TrainedError(f"its model cannot be made: {error}") from error
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise TrainedError(f"its weights are not those of {config.model}: {_first_fault(error)}") from error
    return model


def _first_fault(error: RuntimeError) -> str:
    """The first line of torch's list of mismatches, which may be long."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines()]
    first = (lines[1:] or lines)[0]
    return first if len(first) <= 200 else f"{first[:200]}…"
