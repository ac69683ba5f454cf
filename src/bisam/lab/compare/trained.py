"""A finished run, loaded from its folder: its model with its weights, and the data that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bisam.lab.config import Config, recorded
from bisam.lab.data.pools import Pool
from bisam.lab.data.randomness import generator
from bisam.lab.predicting.weights import TrainedError, model_by_name, read_weights, why_no_weights
from bisam.lab.records import Record

Load = Callable[[str, bool], Pool]
"""Returns the data set of that name; with True, a part of it is accepted."""


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
    model = model_by_name(config.model, data.classes, data.features, weights, run_code=run_code)
    return Trained(record, config, model, data, is_verified)


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
        return read_weights(record.folder)
    except FileNotFoundError:
        raise TrainedError(why_no_weights(record)) from None


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
