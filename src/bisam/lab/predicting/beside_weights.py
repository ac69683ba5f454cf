"""What prediction needs beside the weights of a model, in a file of JSON.

Of the data it has the names of classes and columns, the categories of a table, and statistics; no samples.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from bisam.lab import measures
from bisam.lab.config import Config
from bisam.lab.data.preparation import Preparation
from bisam.lab.data.sources import Source
from bisam.lab.files import read_file
from bisam.lab.methods import uses
from bisam.lab.predicting.weights import TrainedError
from bisam.lab.records.layout import LARGEST_PREPARATION, PREDICT

FORMAT = 1


@dataclass(frozen=True)
class BesideWeights:
    """The name of the model, the measures of its run, and how inputs are prepared for it."""

    model: str
    measures: tuple[str, ...]
    preparation: Preparation
    code: str = ""
    """That of the file of a network of one's own, by `spec.code_of`."""
    method: str = ""
    """How it was trained; empty where an older version did not write it."""
    rho: float | None = None
    """None for methods without one."""


def for_run(config: Config, source: Source, code: str = "") -> bytes | None:
    """The contents of the file for a run; None for data sets of the lab.

    `code` is that of its network when the run began, where it is known.
    """
    prepared = source.preparation(config)
    if prepared is None:
        return None
    values = {
        "format": FORMAT, "model": config.model, "measures": list(config.measured), "inputs": prepared.as_dict(),
        "code": code, "method": config.method, "rho": config.rho if uses(config.method, "rho") else None,
    }  # fmt: skip
    return json.dumps(values, allow_nan=False, indent=1).encode() + b"\n"  # in ASCII: a folder's name may be no text


def read(folder: Path) -> BesideWeights:
    """Of a folder with weights. FileNotFoundError if the file is not there, TrainedError if it is not one of ours."""
    try:
        values: Any = json.loads(read_file(folder / PREDICT, LARGEST_PREPARATION))
        if values["format"] != FORMAT:
            raise ValueError("it is of another version")
        model, names = values["model"], tuple(values["measures"])
        code, method, rho = values.get("code", ""), values.get("method", ""), values.get("rho")  # of newer versions
        if not all(isinstance(text, str) for text in (model, code, method)):
            raise ValueError("its model has no name")
        if not isinstance(rho, (float, NoneType)):
            raise ValueError("its rho is no number")
        for name in names:
            measures.find_measure(name)
        return BesideWeights(model, names, Preparation.from_dict(values["inputs"]), code, method, rho)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainedError(
            f"its {PREDICT} cannot be used ({error}): put the file of its training back; in the folder of a fit, the "
            "same bisam fit writes it again"
        ) from error
