"""Data of one's own by name: a folder of class folders, a table, an .npz, a function, or a name of the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from bisam.lab import spec
from bisam.lab.data import columns, table_notes, tabular
from bisam.lab.data.arrays import (
    inputs_of,
    label_values,
    load_npz,
    refuse_labels_among_inputs,
    refuse_other_index,
)
from bisam.lab.data.classes import note_of_spellings, number_classes
from bisam.lab.data.held_out import WORDS as PART_WORDS
from bisam.lab.data.held_out import roles, split_of
from bisam.lab.data.images import DataError
from bisam.lab.data.own_dataset import DataSplit, Kind, OwnDataset
from bisam.lab.data.pictures import EncodedImage, check_broken, is_image, note_of_unread
from bisam.lab.data.table_columns import has_columns, learn
from bisam.lab.data.table_reading import TableReading
from bisam.lab.data.visible_files import visible_files, visible_folders

P = TypeVar("P")

READ_AGAIN = 20
"""About how many items of a data set are read twice, to see whether they stay the same."""

OPTIONS = ("label", "text", "image", "columns", "config", "test")
"""What can follow the place in the name of data: see `bisam.lab.spec.parse_data`."""


def open_dataset(name: str) -> OwnDataset:
    """The data that a name such as "reviews.csv?text=review&label=stars" means, checked."""
    place, options = spec.parse_data(name)
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"data has the options {', '.join(OPTIONS)}, got {option!r} in {name!r}")
    path = Path(place).expanduser()
    if "config" in options and (spec.is_function(place) or path.exists()):
        raise DataError(f"{place} is no data set of the hub, of which --config chooses a configuration: remove it")
    is_arrays = path.suffix.lower() == ".npz" and path.is_file()
    if not spec.is_function(place) and not is_arrays and tabular.is_table(path):
        return _from_tables(name, tabular.read_tables(path), options, place)
    if spec.is_function(place) or is_arrays or path.is_dir():
        _refuse_columns(options, place)
    if spec.is_function(place):
        return _from_function(name, place, options.get("test"))
    if is_arrays:
        return from_arrays(name, load_npz(path), place, options.get("test"))
    if path.is_dir():
        return _from_folder(name, path, options.get("test"))
    if path.suffix == ".py":
        raise DataError(f"{place} is a Python file: name the function in it that returns the data, as in {place}:data")
    if path.suffix or place.startswith((".", "/", "~")):
        problem = "is of a kind that cannot be read" if path.exists() else "does not exist"
        raise DataError(
            f"{place} {problem}: give a folder of class folders, a CSV, Parquet or JSONL file, an .npz, a name of the "
            "hub, or file.py:function"
        )
    return _from_tables(name, tabular.read_hub(place, options.get("config")), options, place)


def _refuse_columns(options: Mapping[str, str], where: str) -> None:
    of_columns = [option for option in ("label", "text", "image", "columns") if options.get(option)]
    if of_columns:
        raise DataError(f"{where} has no columns, which --{of_columns[0]} names: remove it, or give a table")


def from_arrays(name: str, arrays: Mapping[str, Any], where: str, test: str | None = None) -> OwnDataset:
    """Arrays x and y, or x_train and y_train with those of validation and test. uint8 with 3 or 4 axes are images."""
    raw: dict[str, tuple[Any, Any]] = {}
    for part in ("train", "validation", "test"):
        keys = [(f"x_{part}", f"y_{part}"), *([("x", "y")] if part == "train" else [])]
        found = next(((x, y) for x, y in keys if x in arrays and y in arrays), None)
        if found is not None:
            raw[part] = arrays[found[0]], arrays[found[1]]
    if "train" not in raw:
        raise DataError(f"{where} has {', '.join(arrays) or 'nothing'}: it needs x and y, or x_train and y_train")
    return from_parts(name, _with_test(raw, test, where), where)


def _with_test(parts: Mapping[str, P], test: str | None, where: str) -> dict[str, P]:
    """The parts, with the one of that name as the test part."""
    if not test:
        return dict(parts)
    if test not in parts or test == "train":
        what = (
            "trains on its part 'train', which cannot be tested"
            if test == "train"
            else f"has no part {test!r} to test, only {', '.join(parts)}"
        )
        others = [part for part in parts if part != "train"]
        remedy = f"give --test {' or '.join(others)}" if others else "remove --test, to hold out a fifth of it"
        raise DataError(f"{where} {what}: {remedy}")
    kept = {name: part for name, part in parts.items() if name in ("train", "validation") and name != test}
    return {**kept, "test": parts[test]}


def from_parts(name: str, raw: Mapping[str, tuple[Any, Any]], where: str) -> OwnDataset:
    """Inputs and labels of each part, as arrays, tensors, data frames or lists of texts."""
    kinds, inputs, labels = set(), {}, {}
    for part, (x, y) in raw.items():
        refuse_other_index(x, y, f"{where}, {part}")
        refuse_labels_among_inputs(x, y, f"{where}, {part}")
        kind, inputs[part] = inputs_of(x, f"{where}, {part}")
        kinds.add(kind)
        labels[part] = label_values(y, f"{where}, {part}")
        if len(labels[part]) != len(inputs[part]):
            raise DataError(
                f"{where}, {part}: got {len(inputs[part])} inputs and {len(labels[part])} labels: give one label for "
                "each input"
            )
    if len(kinds) > 1:
        raise DataError(f"{where}: its parts are of different kinds, {', '.join(sorted(kinds))}: give one kind")
    if len({isinstance(x, pa.Table) for x in inputs.values()}) > 1:
        raise DataError(f"{where}: some parts are data frames and some are arrays: give all of them as data frames")
    (only,) = kinds
    dataset = _dataset(name, only, inputs, labels, where, _notes_of_shapes(only, inputs, where))
    return _with_inputs(dataset, inputs["train"], where) if isinstance(inputs["train"], pa.Table) else dataset


def _notes_of_shapes(kind: Kind, inputs: Mapping[str, Any], where: str) -> list[str]:
    """A line for numbers that are more than rows. DataError where the samples of two parts have different shapes."""
    shapes = {part: tuple(x.shape[1:]) for part, x in inputs.items() if kind == "rows" and isinstance(x, Tensor)}
    if len({*shapes.values()}) > 1:
        found = ", ".join(f"{'×'.join(map(str, shape))} in {part}" for part, shape in shapes.items())
        raise DataError(f"{where}: samples of different shapes, {found}: give the same inputs in each part")
    shape = next(iter(shapes.values()), ())
    if len(shape) < 2:
        return []
    what = "×".join(map(str, shape))
    return [f"inputs: {what} numbers, in this shape for a network of your own; images are of type uint8"]


def _from_function(name: str, place: str, test: str | None = None) -> OwnDataset:
    """From a function that returns (x, y) for each part in a dict, or (train, test), or (train, validation, test)."""
    make = spec.function(place)
    with spec.calling(place):
        made = make()
    if isinstance(made, Mapping):
        raw = dict(made)
    elif isinstance(made, (tuple, list)) and len(made) in (2, 3):
        raw = dict(zip(("train", "test") if len(made) == 2 else ("train", "validation", "test"), made, strict=True))
    else:
        raise DataError(f"{place} must return (train, test) or a dict of parts, each (x, y), got {type(made).__name__}")
    if "train" not in raw or not set(raw) <= {"train", "validation", "test"}:
        raise DataError(f"{place} must return the parts train, validation and test, got {', '.join(map(str, raw))}")
    raw = _with_test(raw, test, place)
    return from_parts(name, {part: pair(data, f"{place}, {part}") for part, data in raw.items()}, place)


def pair(data: Any, where: str) -> tuple[Any, Any]:
    """Inputs and labels of (x, y), or of a data set of torch, whose items are (x, y)."""
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return data[0], data[1]
    if has_columns(data):
        raise DataError(f"{where}: a data frame without labels: give (frame.drop(columns=label), frame[label])")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = [data[place] for place in range(len(data))]
        if _are_random(data, items):
            raise DataError(
                f"{where}: the data set returns another sample each time, and its items are read once, so that random "
                "transforms would not change from epoch to epoch: remove them. Images of type uint8 are cropped and "
                "flipped in the training"
            )
        if items and all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
            xs, ys = zip(*items, strict=True)
            tensors = isinstance(xs[0], (Tensor, np.ndarray))
            return torch.stack([torch.as_tensor(x) for x in xs]) if tensors else list(xs), [_number(y) for y in ys]
    raise DataError(f"{where}: give (x, y), or a data set whose items are (x, y), got {type(data).__name__}")


def _are_random(data: Any, items: Sequence[Any]) -> bool:
    """Whether some items are others when they are read again: a flip, say, happens to half of them."""
    for place in range(0, len(items), max(1, len(items) // READ_AGAIN)):
        first, again = items[place], data[place]
        if not (isinstance(first, (tuple, list)) and isinstance(first[0], (Tensor, np.ndarray))):
            return False
        there, now = torch.as_tensor(first[0]), torch.as_tensor(again[0])
        if there.shape != now.shape or not bool(((there == now) | ((there != there) & (now != now))).all()):
            return True
    return False


def _number(label: Any) -> Any:
    return label.item() if isinstance(label, (Tensor, np.generic)) else label


def _from_tables(name: str, tables: tabular.Tables, options: Mapping[str, str], where: str) -> OwnDataset:
    kind, inputs, label = columns.choose(tables, options, where)
    notes = [f"label: column {label!r}{'' if kind == 'rows' else f'; inputs: {kind}, {_listed(inputs)}'}"]
    notes += tables.notes
    parts = _with_test(tables.parts, options.get("test"), where)
    found = {
        part: columns.values(table, kind, inputs, f"{where}, {part}", tables.folder) for part, table in parts.items()
    }
    labels = {part: columns.labels(table, label, f"{where}, {part}") for part, table in parts.items()}
    dataset = _dataset(name, kind, found, labels, where, notes, tables.class_names.get(label))
    if kind != "rows":
        return replace(dataset, columns=TableReading(tuple(inputs), label))
    return _with_inputs(dataset, found["train"], where, label, named=options.get("columns", ""))


def _with_inputs(
    dataset: OwnDataset, whole: pa.Table, where: str, label: str | None = None, *, named: str = ""
) -> OwnDataset:
    """A data set whose parts are columns of a table, with the inputs that these become: learnt from the training part.

    `whole` is the table that the training part was taken from: rows that are held out for the test leave gaps. `label`
    is its column of labels, which a data frame has not; `named` are the columns of `--columns`, if any.
    """
    numbering = {} if named else table_notes.row_numbers(whole, by_option=label is not None)
    inputs, left_out = learn(dataset.train.inputs.drop_columns([*numbering]))
    if left_out and named:
        name, reason = next(iter(left_out.items()))
        raise DataError(f"{where}: column {name!r} cannot be an input ({reason}): remove it from --columns")
    left_out |= numbering
    if not inputs.columns:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in [*left_out.items()][: columns.MOST_LISTED])
        raise DataError(
            f"{where}: no column can be an input: {reasons}. Add columns of numbers or categories, or name a column of "
            "texts by --text, one of images by --image (from Python, give arrays of numbers or of images)"
        )
    notes = [
        *dataset.notes,
        *table_notes.summary(inputs, left_out, dataset.train.inputs),
        *table_notes.note_of_identifiers(table_notes.identifiers(whole), inputs, by_option=label is not None),
    ]

    def read(part: DataSplit, name: str) -> DataSplit:
        return DataSplit(inputs.read(part.inputs, f"{where}, {name}"), part.labels)

    validation = None if dataset.validation is None else read(dataset.validation, "validation")
    train, test = read(dataset.train, "train"), read(dataset.test, "test")
    return replace(
        dataset, train=train, validation=validation, test=test, notes=notes, columns=TableReading(inputs, label)
    )


def _from_folder(name: str, folder: Path, test: str | None = None) -> OwnDataset:
    """A folder of class folders, or of train, validation and test folders of these."""
    parts = _with_test(_folders_of_parts(folder) or {"train": folder}, test, str(folder))
    files = {  # a folder of a class may be a link
        part: [of_class / path for of_class in visible_folders(place) for path in visible_files(of_class)]
        for part, place in parts.items()
    }
    inputs, labels = {}, {}
    for part, place in parts.items():
        paths = [path for path in files[part] if is_image(path)]
        inputs[part] = [EncodedImage(str(path.relative_to(folder)), path=path) for path in paths]
        labels[part] = [path.relative_to(place).parts[0] for path in paths]
    every = [path for found in files.values() for path in found]
    if not labels["train"]:
        _refuse_without_images(folder, every)
    if parts["train"] == folder:
        _refuse_outer_folder(folder, [image.name for image in inputs["train"]])
    return _dataset(name, "image", inputs, labels, str(folder), note_of_unread(every))


def _refuse_without_images(folder: Path, files: Sequence[Path]) -> None:
    if (reason := tabular.why_no_tables(folder)) is not None:
        raise DataError(reason)
    outside = next((path for path in visible_files(folder) if len(path.parts) == 1 and is_image(path)), None)
    reason = f"no classes: the image {outside} is in no folder of a class" if outside else "no images"
    unread = "".join(f" ({note})" for note in note_of_unread(files))
    raise DataError(
        f"{folder} has {reason}{unread}: give a folder with a folder of images for each class, such as "
        f"{folder}/cat/1.jpg, or with such folders in train and test"
    )


def _refuse_outer_folder(folder: Path, images: Sequence[str]) -> None:
    """DataError if the folders of classes are one level below: their folder would be the only class."""
    (first, *others) = {Path(image).parts[0] for image in images}
    if not others and all(len(Path(image).parts) > 2 for image in images):
        inner = folder / first
        raise DataError(f"{folder} has one folder, {first}, whose images are in folders of its own: give {inner}")


def _folders_of_parts(folder: Path) -> dict[str, Path]:
    """The folders that are named for a part and have folders of classes; empty if none is for training.

    A class may be called train, too: its folder has images. Beside train, train_masks is no part.
    """
    named: dict[str, list[Path]] = {}
    for path in visible_folders(folder):
        part = split_of(path.name)
        if part is not None and visible_folders(path):
            named.setdefault(part, []).append(path)
    found: dict[str, Path] = {}
    for part, paths in named.items():
        exactly = [path for path in paths if path.name.lower() in PART_WORDS[part]] or paths
        if len(exactly) > 1:
            names = " and ".join(path.name for path in exactly[:2])
            raise DataError(f"{folder} has two folders of its {part} part, {names}: join them, or move one elsewhere")
        (found[part],) = exactly
    return found if "train" in found else {}


def _dataset(
    name: str, kind: Kind, inputs: Mapping[str, Any], labels: Mapping[str, Sequence[Any]], where: str,
    notes: list[str], names: Sequence[str] | None = None,
) -> OwnDataset:  # fmt: skip
    """Number the classes, leave out images that do not decode, and decide what is tested."""
    inputs, labels = dict(inputs), {part: list(values) for part, values in labels.items()}
    if kind == "image":
        for part, images in inputs.items():
            if not isinstance(images, Tensor):
                kept = check_broken(images, f"{where}, {part}", notes)
                inputs[part] = [images[place] for place in kept]
                labels[part] = [labels[part][place] for place in kept]
    numbered, classes = number_classes(labels, where, names)
    notes += note_of_spellings(classes)
    parts = {part: DataSplit(inputs[part], numbered[part]) for part in inputs}
    train, validation, test = roles(parts, where, notes)
    return OwnDataset(name, kind, train, test, classes, validation, notes)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 5 else f"{len(names)} columns"
