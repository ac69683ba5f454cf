"""Models of runs under way: weights from the last checkpoint of a run folder."""

from pathlib import Path

from torch import nn

from bisam.lab import records
from bisam.lab.config import Config
from bisam.lab.models import build
from bisam.lab.records import checkpoint


def last_model(folder: Path, config: Config) -> tuple[nn.Module, int]:
    """With the weights of the checkpoint, and how many epochs they were trained."""
    state = _state(folder)
    return _with_weights(config, state["training"]["model"]), state["epoch"]


def best_model(folder: Path, config: Config) -> tuple[nn.Module, int]:
    """With the best weights so far, and their epoch."""
    best = _state(folder)["training"]["best"]
    return _with_weights(config, best["weights"]), best["epoch"]


def _state(folder: Path) -> dict:
    loaded = checkpoint.load(folder / records.CHECKPOINTS)
    assert loaded is not None, f"{folder} has no checkpoint"
    return loaded.state


def _with_weights(config: Config, weights: dict) -> nn.Module:
    model = build(config.model, 10)
    model.load_state_dict(weights)
    return model
