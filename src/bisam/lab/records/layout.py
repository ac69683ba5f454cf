"""The names of the files in a run folder."""

from __future__ import annotations

FORMAT = 1
CONFIG = "config.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
RECEIPT = "receipt.json"
WEIGHTS = "best.safetensors"
PREDICT = "predict.json"
PLAN = "plan.json"
"""Of a fit, beside the folders of its runs."""
NOT_COUNTED = "not-counted.txt"
LOCK = "lock"
CHECKPOINTS = "checkpoints"

LARGEST_OBJECT = 4 * 2**20
"""Bytes of a JSON file that is read; larger ones are not ours."""

LARGEST_METRICS = 256 * 2**20
"""Bytes of metrics that are read: a line of 100,000 epochs takes 50 MB."""

LARGEST_PREPARATION = 256 * 2**20
"""Bytes of `predict.json`, which has the columns and categories of a table."""

LARGEST_STATE = 8 * 2**30
"""Bytes of weights or of a checkpoint that are written and read."""


class RecordError(RuntimeError):
    """A run folder cannot be written, or the run in it cannot be resumed."""
