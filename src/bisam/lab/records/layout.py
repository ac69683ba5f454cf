"""The names of the files in a run folder."""

from __future__ import annotations

FORMAT = 1
CONFIG = "config.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
RECEIPT = "receipt.json"
WEIGHTS = "best.safetensors"
NOT_COUNTED = "not-counted.txt"
LOCK = "lock"
CHECKPOINTS = "checkpoints"


class RecordError(RuntimeError):
    """A run folder cannot be written, or the run in it cannot be resumed."""
