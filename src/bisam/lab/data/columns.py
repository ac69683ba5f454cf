"""Which columns of a table are the inputs and which one is the label, and their values as samples."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bisam.lab.data.classes import listed_rows
from bisam.lab.data.column_names import read_names
from bisam.lab.data.images import DataError
from bisam.lab.data.own_dataset import Kind
from bisam.lab.data.pictures import EncodedImage
from bisam.lab.data.table_columns import TableInputs, check_finite, column_of
from bisam.lab.data.table_reading import TableReading
from bisam.lab.data.tabular import Tables

LABELS = ("label", "labels", "class", "target", "y")
TEXTS = ("text", "sentence", "sentence1", "sentence2")
IMAGES = ("image", "img")
"""Names of columns that are taken where none is given."""

MOST_LISTED = 30
"""Columns that an error lists: the first and the last, since labels are often the last one."""


def choose(tables: Tables, options: Mapping[str, str], where: str) -> tuple[Kind, list[str], str]:
    """The kind of data, the columns of the inputs, and the column of the label."""
    columns = tables.columns
    label = options.get("label") or next((name for name in LABELS if name in columns), "")
    if not columns:
        raise DataError(f"{where} has no columns: give a column of labels, and one or more of inputs")
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        raise DataError(
            f"{where} has one column, {columns[0]!r:.60}: separate its columns by commas or semicolons (.tsv: by tabs)"
        )
    if not label:
        raise DataError(f"{where} has the columns {_listed(columns)}: name that of the classes by --label")
    several = {option: read_names(options.get(option, ""), columns) for option in ("text", "columns")}
    given = {**several, **{option: [options[option]] for option in ("label", "image") if options.get(option)}}
    for option, names in given.items():
        for name in names:
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=1)
                meant = f"did you mean {near[0]!r}?" if near else f"it has {_listed(columns)}."
                raise DataError(f"{where} has no column {name!r}: {meant} Correct --{option}")
            if option != "label" and name == label:
                other = f"--{option}" if "label" in options else "--label"
                raise DataError(
                    f"{where}: column {name!r} is the label and cannot be an input: name another by {other}"
                )
    kinds = [f"--{option}" for option in ("columns", "text", "image") if options.get(option)]
    if len(kinds) > 1:
        raise DataError(f"{where} is read as rows, texts or images: give {' or '.join(kinds)}")
    if options.get("columns"):
        return "rows", several["columns"], label
    if options.get("image"):
        return "image", [options["image"]], label
    if options.get("text"):
        return "text", several["text"], label
    images = [name for name in IMAGES if name in columns and name != label]
    if images:
        return "image", images[:1], label
    texts = [name for name in TEXTS if name in columns and name != label]
    if texts:
        return "text", texts, label
    return "rows", [name for name in columns if name != label], label


def _listed(columns: Sequence[str]) -> str:
    """
    >>> _listed(["x", "y"]), _listed([f"c{number}" for number in range(100)])[-18:]
    ('x, y', 'c96, c97, c98, c99')
    """
    half = MOST_LISTED // 2
    shown = columns if len(columns) <= MOST_LISTED else [*columns[:half], "…", *columns[-half:]]
    return ", ".join(shown)


def values(
    table: pa.Table, kind: Kind, names: Sequence[str], where: str, folder: Path, remedy: str | None = None
) -> Any:
    """The inputs of a part, as `DataSplit` has them; of rows, a table that `bisam.lab.data.table_columns` reads.

    `remedy` is for a column that has no texts or images. Default: to name another one by an option.
    """
    if kind == "rows":
        return _rows(table, names, where)
    if kind == "text":
        return _texts(table, names, where, remedy or "name another by --text")
    return _images(table, names[0], where, folder, remedy or "name another by --image")


def read_again(table: pa.Table, kind: Kind, how: TableReading, where: str, folder: Path) -> Any:
    """The inputs of another table, as those of a `OwnDataset` were read: `how` is its `columns`."""
    missing = [name for name in how.names if name not in table.column_names]
    if missing:
        names = f"column{'s' * (len(missing) > 1)} {_listed([repr(name) for name in missing])}"
        raise DataError(
            f"{where} has no {names}, which the model was trained with: it has {_listed(table.column_names)}. Add or "
            "rename columns"
        )
    read = values(table, kind, how.names, where, folder, remedy="give what it had in the training")
    return how.inputs.read(read, where) if isinstance(how.inputs, TableInputs) else read


def labels(table: pa.Table, name: str, where: str) -> list[Any]:
    return list(column_of(table, name, where).to_pylist())


def _rows(table: pa.Table, names: Sequence[str], where: str) -> pa.Table:
    """These columns as they are: what they become as inputs is learnt from the training part."""
    if not names:
        raise DataError(f"{where} has no column beside the label: add columns of inputs")
    found = pa.table({name: column_of(table, name, where) for name in names})
    check_finite(found, where)
    return found


def _texts(table: pa.Table, names: Sequence[str], where: str, remedy: str) -> list[tuple[str, ...]]:
    if len(names) > 2:
        raise DataError(f"{where}: a tokenizer takes one text or a pair, got the columns {', '.join(names)}: name two")
    columns = []
    for name in names:
        column = column_of(table, name, where)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise DataError(f"{where}: column {name!r} has {column.type}, not texts: {remedy}")
        found = column.to_pylist()
        missing = [row for row, text in enumerate(found) if text is None]
        if missing:
            raise DataError(
                f"{where}: column {name!r} lacks a text in {listed_rows(missing)}: fill it in, or remove the row"
            )
        columns.append(found)
    return list(zip(*columns, strict=True))


def _images(table: pa.Table, name: str, where: str, folder: Path, remedy: str) -> list[EncodedImage]:
    found = []
    for row, value in enumerate(column_of(table, name, where).to_pylist()):
        label = f"row {row}"
        if isinstance(value, Mapping):  # the hub's way
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            found.append(EncodedImage(label, content=value))
        elif isinstance(value, str):
            found.append(EncodedImage(value, path=folder / value))
        else:
            kind = table.column(name).type
            raise DataError(f"{where}, {label}: column {name!r} has {kind}, not images or paths: {remedy}")
    return found
