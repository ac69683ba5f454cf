"""Where data are, by name: those of the fine-tuning tables have a place on the hub, others name their own."""

from __future__ import annotations

from pathlib import Path

from bisam.lab import spec
from bisam.lab.data.images import DataError
from bisam.lab.data.own_dataset import OwnDataset
from bisam.lab.data.tabular import is_table

IN_MEMORY = "data"
"""The name of data that `bisam.lab.fit` has been given in memory."""

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

SAMPLES: dict[str, dict[str, int]] = {
    "flowers": {"train": 1020, "validation": 1020, "test": 6149},
    "pets": {"train": 3680, "test": 3669},
    "glue/cola": {"train": 8551, "test": 1043},
    "glue/sst2": {"train": 67_349, "test": 872},
    "glue/mrpc": {"train": 3668, "test": 408},
    "glue/rte": {"train": 2490, "test": 277},
    "glue/wnli": {"train": 635, "test": 71},
    "glue/qqp": {"train": 363_846, "test": 40_430},
    "glue/mnli": {"train": 392_702, "test": 9815},
    "glue/qnli": {"train": 104_743, "test": 5463},
}
"""Samples of the official parts: the published numbers are theirs. Of GLUE the validation part is tested."""


def locate(name: str, folder: Path | None = None) -> str:
    """The name of the data: that of a table's data set has its place on the hub, or in a folder of such data sets.

    >>> locate("glue/rte")
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
    if is_table(folder.expanduser()):
        return spec.data_name(str(folder), options)
    if not inside.exists():
        raise DataError(f"{folder} has neither tables of {name} nor a folder {inside.name} with them: correct --data")
    return spec.data_name(str(inside), options)


def deviation(name: str, dataset: OwnDataset) -> str | None:
    """A line where the parts of a table's data set are not the official ones; else None."""
    expected = SAMPLES.get(name)
    found = {"train": len(dataset.train), "test": len(dataset.test)}
    if dataset.validation is not None:
        found["validation"] = len(dataset.validation)
    if expected is None or found == expected:
        return None
    here, there = (", ".join(f"{part} {count:,}" for part, count in sorted(one.items())) for one in (found, expected))
    return f"{name} has {here} samples here, and officially {there}: the published numbers are of the official parts"


def place_again(name: str, folder: Path | None = None, *, run_code: bool = False) -> str:
    """The name by which the data of a finished run are read again, from their place or from `folder`.

    DataError where they were in memory, or are a Python file's: that is run with `run_code`, or if `folder` names it.

    >>> place_again("reviews.csv?label=stars", Path("elsewhere/reviews.csv"))
    'elsewhere/reviews.csv?label=stars'
    """
    place, options = spec.parse_data(name)
    if name in NAMED:
        return locate(name, folder)
    if folder is not None:
        return spec.data_name(str(folder), options)
    if spec.is_function(place):
        if not run_code:
            raise DataError(f"{place} is code, which is not run because a record names it: allow it by --run-code")
        return name
    if not Path(place).expanduser().exists():
        if place == IN_MEMORY:
            raise DataError("they were in the memory of a program, and only their checksum is kept")
        if Path(place).suffix or place.startswith((".", "/", "~")):
            raise DataError(f"{place} is not here: start from the folder that it was trained in, or give it by --data")
    return name
