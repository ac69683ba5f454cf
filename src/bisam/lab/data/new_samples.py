"""New samples for a trained model: images, a table or arrays, with or without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from bisam.lab.data import columns, table_notes, tabular
from bisam.lab.data.arrays import inputs_of, label_values, load_npz
from bisam.lab.data.classes import plain
from bisam.lab.data.images import DataError
from bisam.lab.data.pictures import EncodedImage, broken, described, is_image, note_of_unread
from bisam.lab.data.preparation import WORDS, Preparation
from bisam.lab.data.table_columns import TableInputs, as_table, has_columns
from bisam.lab.data.visible_files import visible_files

NO_CLASS = -1
"""In the place of a label that is missing, or is no class of the model."""

PREDICTED = ("test", "validation", "train")
"""Parts of a data set, of which the first that is there is predicted."""


@dataclass(frozen=True, eq=False)
class NewSamples:
    """Inputs as `DataSplit` has them, and the name of each: that of its file, or the number of its row, from 0."""

    names: Sequence[str]
    inputs: Any
    labels: Tensor | None
    """Numbers of classes, int64 (N), with `NO_CLASS` among them; None if no sample has a label."""
    unknown: Sequence[str] = ()
    """Different labels that are no class of the model."""
    unread: Mapping[int, str] = field(default_factory=dict)
    """Names of images that do not decode, by their places among all samples."""
    notes: Sequence[str] = ()
    """Lines about what was left out or filled in."""

    def __len__(self) -> int:
        return len(self.names)


def open_new(place: str, like: Preparation) -> NewSamples:
    """The samples of a file or a folder, checked: they must be as those that the model was trained on."""
    path = Path(place).expanduser()
    if not path.exists():
        raise DataError(f"{place} does not exist: give {_wanted(like)}")
    if path.is_file() and path.suffix.lower() == ".npz":
        return _from_arrays(path, like)
    if path.is_file() and tabular.is_table(path):
        return _from_table(path, like)
    if like.kind == "image" and (path.is_dir() or is_image(path)):
        return _from_images(path, like)
    what = "a folder" if path.is_dir() else "of a kind that cannot be read"
    raise DataError(f"{place} is {what}, and the model was trained on {WORDS[like.kind]}: give {_wanted(like)}")


def inputs_like(x: Any, like: Preparation) -> Any:
    """Inputs in memory, checked: arrays, tensors or texts, or a data frame with the columns of the training.

    Rows of a table that has nothing but numbers may also be an array.
    """
    where = "the data"
    if has_columns(x):
        if like.columns is None:
            raise DataError(
                f"{where} is a data frame, and the model was not trained on columns: give an array or a list"
            )
        read = _read_again(as_table(x), like, where, Path())
        if like.kind == "image" and (faults := broken(read)):
            raise DataError(f"{where}: {described(faults, read)}. Repair or remove them")
        return read
    kind, inputs = inputs_of(x, where)
    table = like.columns and like.columns.inputs
    if kind == "rows" and isinstance(table, TableInputs) and not table.are_numbers:
        raise DataError(
            f"{where} is an array, and the model was trained on columns with categories or missing numbers: give a "
            "data frame"
        )
    like.check(kind, inputs, where)
    return inputs


def _wanted(like: Preparation) -> str:
    if like.kind == "image":
        return "an image, a folder of images or an .npz" + " or a table as in the training" * bool(like.columns)
    return "a CSV, Parquet or JSONL file" if like.columns else "an .npz"


def _from_arrays(path: Path, like: Preparation) -> NewSamples:
    arrays = load_npz(path)
    ends = ["", *(f"_{part}" for part in PREDICTED)]
    end = next((end for end in ends if f"x{end}" in arrays), None)
    if end is None:
        raise DataError(f"{path} has {', '.join(arrays) or 'nothing'}: it needs x")
    if like.columns and like.kind != "image":
        raise DataError(f"{path} has arrays without names, and the model was trained on columns: give {_wanted(like)}")
    kind, inputs = inputs_of(arrays[f"x{end}"], str(path))
    like.check(kind, inputs, str(path))
    values = label_values(arrays[f"y{end}"], str(path)) if f"y{end}" in arrays else []
    if values and len(values) != len(inputs):
        raise DataError(f"{path}: {len(inputs)} inputs have {len(values)} labels: give one of each, or none")
    return _samples([str(row) for row in range(len(inputs))], inputs, values, like, path)


def _from_table(path: Path, like: Preparation) -> NewSamples:
    if like.columns is None:
        raise DataError(f"{path} is a table, and the model was not trained on columns: give {_wanted(like)}")
    tables = tabular.read_tables(path)
    table, label = tables.parts["train"], like.columns.label
    inputs = _read_again(table, like, str(path), tables.folder)
    values = []
    if label is not None and label in table.column_names:
        values, names = columns.labels(table, label, str(path)), tables.class_names.get(label, [])
        values = [names[value] if isinstance(value, int) and 0 <= value < len(names) else value for value in values]
    learnt = like.columns.inputs
    notes = table_notes.unlike_training(learnt, table) if isinstance(learnt, TableInputs) else []
    names = [str(row) for row in range(table.num_rows)]
    return _samples(names, inputs, values, like, path, [*tables.notes, *notes])


def _read_again(table: pa.Table, like: Preparation, where: str, folder: Path) -> Any:
    assert like.columns is not None
    inputs = columns.read_again(table, like.kind, like.columns, where, folder)
    like.check(like.kind, inputs, where)
    return inputs


def _from_images(path: Path, like: Preparation) -> NewSamples:
    """Labels are folders on the way to an image that have the name of a class."""
    top, files = (path.parent, [Path(path.name)]) if path.is_file() else (path, visible_files(path))
    found = [one for one in files if is_image(one)]
    images = [EncodedImage(str(one), path=top / one) for one in found]
    values = [next((part for part in one.parts[:-1] if part in like.classes), None) for one in found]
    return _samples([str(one) for one in found], images, values, like, path, note_of_unread(files))


def _samples(
    names: list[str], inputs: Any, values: Sequence[Any], like: Preparation, path: Path, notes: Sequence[str] = ()
) -> NewSamples:
    if not names:
        raise DataError(f"{path} has no samples: give {_wanted(like)}")
    unread: dict[int, str] = {}
    if like.kind == "image" and not isinstance(inputs, Tensor) and (faults := broken(inputs)):
        if len(faults) == len(inputs):
            raise DataError(f"{path}: {described(faults, inputs)}. Repair or replace them")
        notes = [*notes, f"{described(faults, inputs)}. No prediction, and an empty row in the table"]
        kept = [place for place in range(len(names)) if place not in faults]
        unread = {place: names[place] for place in faults}
        names, inputs = [names[place] for place in kept], [inputs[place] for place in kept]
        values = [values[place] for place in kept] if values else values
    numbers = {name: number for number, name in enumerate(like.classes)}
    texts = [None if value is None or value != value else str(plain(value)) for value in values]
    labels = torch.tensor([NO_CLASS if text is None else numbers.get(text, NO_CLASS) for text in texts])
    unknown = tuple(dict.fromkeys(text for text in texts if text is not None and text not in numbers))
    known = labels if any(text is not None for text in texts) else None
    return NewSamples(names, inputs, known, unknown, unread, notes)
