"""Data sets of the fine-tuning tables, by name: their places on the hub and their columns."""

from __future__ import annotations

from pathlib import Path

from bisam.lab import spec
from bisam.lab.data.tabular import is_table

PAIRS = {"mrpc": "sentence1,sentence2", "rte": "sentence1,sentence2", "wnli": "sentence1,sentence2"}
GLUE = {
    "cola": "sentence", "sst2": "sentence", **PAIRS, "qqp": "question1,question2", "mnli": "premise,hypothesis",
    "qnli": "question,sentence",
}  # fmt: skip
"""Columns of the texts of each task. STS-B is missing: it is a regression."""

NAMED: dict[str, tuple[str, dict[str, str]]] = {
    **{
        f"glue/{task}": (
            "nyu-mll/glue",
            {"config": task, "text": text, "label": "label", "test": "validation"},
        )
        for task, text in GLUE.items()
    },
    "flowers": ("dpdl-benchmark/oxford_flowers102", {"image": "image", "label": "label"}),
    "pets": ("timm/oxford-iiit-pet", {"image": "image", "label": "label"}),
}
"""The place on the hub and the options of each name: see `bisam.lab.spec.parse_data`."""


def place_of(name: str, folder: Path | None = None) -> str:
    """The name of the data: that of a table's data set has its place on the hub, or in a folder of such data sets.

    >>> place_of("glue/rte")
    'nyu-mll/glue?config=rte&text=sentence1,sentence2&label=label&test=validation'
    """
    if name not in NAMED:
        if folder is not None:
            raise ValueError(f"{name} names its place itself: remove --data, got {folder}")
        return name
    hub, options = NAMED[name]
    if folder is None:
        return spec.data_name(hub, options)
    options = {key: value for key, value in options.items() if key != "config"}
    inside = folder.expanduser() / name.rpartition("/")[2]
    return spec.data_name(str(folder if is_table(folder.expanduser()) else inside), options)
