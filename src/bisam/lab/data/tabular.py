"""Tables with named columns: Parquet files through pyarrow; CSV, JSON lines and the hub through `datasets`."""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bisam.lab.data.catalogue import DATA_SETS
from bisam.lab.data.held_out import split_of, splits_of
from bisam.lab.data.hub import silent_retries
from bisam.lab.data.images import DataError
from bisam.lab.data.parquet import check_plain
from bisam.lab.data.table_columns import INDEX
from bisam.lab.data.visible_files import is_hidden

BUILDERS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
"""Builders of the package `datasets`, by the ending of a file."""

LONGEST_HEADER = 2**20

DECIMAL_COMMA = re.compile(rb'(^|;)\s*"?[-+]?\d+,\d+"?\s*(;|\r?$)', re.MULTILINE)
"""A field of a table with semicolons that is a number with a comma."""

DECIMAL_POINT = re.compile(rb'(^|;)\s*"?[-+]?\d+\.\d+"?\s*(;|\r?$)', re.MULTILINE)
"""The same with a point: then a comma may separate thousands."""

REMEDY_OF_FIELDS = "put a field that has a comma in quotes, write decimals with points, and name every column"


@dataclass(frozen=True)
class Tables:
    """A table for each part, the folder that paths in them start from, and the names of classes by column."""

    parts: dict[str, pa.Table]
    folder: Path
    class_names: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A line for each part that was put together from several files, or has semicolons between its columns."""

    @property
    def columns(self) -> list[str]:
        return list(self.parts["train"].column_names)


def is_table(path: Path) -> bool:
    """Whether it is a file with columns, or a folder of such files."""
    if path.is_file():
        return path.suffix.lower() in BUILDERS
    return path.is_dir() and bool(_files(path))


def read_tables(path: Path) -> Tables:
    """A file, or a folder with a file for each part, such as train.csv and test.csv, or several as the hub has them."""
    files = [path] if path.is_file() else _files(path)
    by_part: dict[str, list[Path]] = {}
    for file in files:
        part = "train" if len(files) == 1 else split_of(file.stem)
        if part is None:
            raise DataError(f"{file} is not named for a part: name the files of a folder train, validation and test")
        by_part.setdefault(part, []).append(file)
    if "train" not in by_part:
        raise DataError(f"{path} has no training part, only {', '.join(by_part)}: name a file of it train")
    folder = path if path.is_dir() else path.parent
    read = {part: _read(found) for part, found in by_part.items()}
    names: dict[str, list[str]] = {}
    for _, known in read.values():
        names |= known
    joined = [
        f"{part}: {len(found)} files together, {', '.join(file.name for file in found[:3])}{', …' * (len(found) > 3)}"
        for part, found in by_part.items()
        if len(found) > 1
    ]
    separated = [line for found in by_part.values() for line in _note_of_separators(found[0])]
    return Tables({part: table for part, (table, _) in read.items()}, folder, names, [*joined, *separated])


def _meant(name: str) -> str:
    """
    >>> _meant("digit")
    '. Did you mean digits?'
    """
    near = difflib.get_close_matches(name, DATA_SETS, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def read_hub(name: str, configuration: str | None = None) -> Tables:
    """A data set of the hub; one line with the remedy where it cannot be reached."""
    if _meant(name) and "/" not in name:  # names of the hub without an owner are few
        raise DataError(f"there is no data set {name!r}{_meant(name)} A data set of the hub is OWNER/{name}")
    datasets = package(f"{name} is read from the hub")
    try:
        with silent_retries():
            found = datasets.load_dataset(name, configuration)
    except Exception as error:  # of the network, of permissions, of the hub
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise DataError(
            f"{name} is neither a file nor a folder here, and as a data set of the hub it could not be loaded "
            f"({type(error).__name__}: {reason}): check the path, or the name and the connection"
        ) from error
    chosen = splits_of(found)
    if "train" not in chosen:
        raise DataError(f"{name} has no training part, only {', '.join(found)}: give a file or a folder")
    parts: dict[str, pa.Table] = {}
    names: dict[str, list[str]] = {}
    for part, split in chosen.items():
        parts[part], known = _arrow(datasets, found[split])
        names |= known
    return Tables(parts, Path(), names)


def package(why: str) -> Any:
    """The package `datasets`, imported when it is needed."""
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{why} through the package datasets, which is not installed: pip install datasets, or give Parquet files, "
            "which need no more than pyarrow"
        ) from None


def _files(folder: Path) -> list[Path]:
    """The files with columns of a folder that are named for a part, or the only one; of one kind."""
    there = _with_endings(folder)
    kinds = {path.suffix.lower() for path in there}
    named = [path for path in there if split_of(path.stem)]
    return there if len(there) == 1 else named if len(kinds) == 1 else []


def _with_endings(folder: Path) -> list[Path]:
    """The files of a folder that have the endings of tables, by name."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in BUILDERS)
    return [path for path in files if not is_hidden(Path(path.name))]


def why_no_tables(folder: Path) -> str | None:
    """Why the files with columns of a folder cannot be read together; None if there are none."""
    there = [path.name for path in _with_endings(folder)]
    if not there or is_table(folder):
        return None
    kinds = {Path(name).suffix.lower() for name in there}
    remedy = "name them train and test, or give one of them" if len(kinds) == 1 else "write all of them in one format"
    return f"{folder} has the tables {', '.join(there[:3])}{', …' if len(there) > 3 else ''}: {remedy}"


def _refuse_names_twice(files: Sequence[Path]) -> None:
    for path in files:
        names = pq.read_schema(path).names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path} has two columns of the name {twice!r}: rename or remove one of them")


def _with_usual_types(table: pa.Table) -> pa.Table:
    """Columns of views, which few functions of pyarrow take, as ordinary ones."""
    usual = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    fields = [field.with_type(usual.get(field.type, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def _read(files: Sequence[Path]) -> tuple[pa.Table, dict[str, list[str]]]:
    for path in files:
        check_plain(path)
    if files[0].suffix.lower() == ".parquet":
        try:
            _refuse_names_twice(files)
            table = pa.concat_tables([pq.read_table(path) for path in files])
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{files[0]} is not a complete Parquet file ({error}): get it again") from error
        return _with_usual_types(table), _names_of(table.schema)
    datasets = package(f"{files[0].name} is read")
    builder = BUILDERS[files[0].suffix.lower()]
    options = _separators(files[0])
    if builder == "csv":
        for path in files:
            _refuse_more_fields_than_names(path, options.get("sep", ","))
    with tempfile.TemporaryDirectory() as cache:  # its copy would stay in the user's folder otherwise
        try:
            with silent_retries(), _without_bars(datasets):
                found = datasets.load_dataset(
                    builder, data_files=[str(path) for path in files], split="train", cache_dir=cache, **options
                )
        except Exception as error:  # of pandas, of pyarrow, of datasets
            cause = error.__cause__ or error
            reason = next(iter(str(cause).splitlines()), "")[:200]
            if "corresponds to no data" in reason:
                raise DataError(f"{files[0]} has no rows below its header: add some") from error
            if isinstance(cause, UnicodeDecodeError):
                byte = cause.object[cause.start]
                raise DataError(f"{files[0]} is not in UTF-8 (byte {byte:#04x}): save it as UTF-8") from error
            if "Expected" in reason and "fields" in reason:
                raise DataError(f"{files[0]} cannot be read as csv ({reason}): {REMEDY_OF_FIELDS}") from error
            raise DataError(f"{files[0]} cannot be read as {builder} ({reason}): correct the file") from error
        table, names = _arrow(datasets, found)
    if builder != "csv":
        return table, names
    if any(name.startswith(INDEX) for name in table.column_names):  # their first fields, which are no column then
        raise DataError(f"{files[0]} has rows with more fields than its header: {REMEDY_OF_FIELDS}")
    return table.rename_columns([name.strip() for name in table.column_names]), names


def _refuse_more_fields_than_names(path: Path, separator: str) -> None:
    """Raise if the first row is longer than the header: pandas would take its first fields for names of rows."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = (row for row in csv.reader(file, delimiter=separator) if row)
        try:
            header, first = next(rows, []), next(rows, [])
        except csv.Error:  # of a field longer than the module reads
            return
    if len(first) > len(header):
        raise DataError(f"{path} has rows with more fields than its header: {REMEDY_OF_FIELDS}")


def _separators(path: Path) -> dict[str, str]:
    """What separates columns and decimals, as options of pandas; empty for commas and points."""
    if path.suffix.lower() == ".tsv":
        return {"sep": "\t"}
    if path.suffix.lower() != ".csv":
        return {}
    with path.open("rb") as file:
        header, rows = file.readline(LONGEST_HEADER), file.read(LONGEST_HEADER)
    if b";" not in header or b"," in header:
        return {}
    has_commas = DECIMAL_COMMA.search(rows) is not None and DECIMAL_POINT.search(rows) is None
    return {"sep": ";", "decimal": "," if has_commas else "."}


def _note_of_separators(path: Path) -> list[str]:
    """A line for a table as spreadsheets write it where a comma is the sign of decimals."""
    found = _separators(path)
    if found.get("sep") != ";":
        return []
    decimals = "commas" if found["decimal"] == "," else "points"
    return [f"{path.name}: columns are separated by semicolons, decimals are written with {decimals}"]


@contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    """A local file is read at once; the bars of downloads stay."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _arrow(datasets: Any, found: Any) -> tuple[pa.Table, dict[str, list[str]]]:
    """The whole as a table in memory, images as they are encoded."""
    for name, feature in found.features.items():
        if type(feature).__name__ == "Image":
            found = found.cast_column(name, datasets.Image(decode=False))
    names = {name: list(feature.names) for name, feature in found.features.items() if hasattr(feature, "names")}
    table = found.with_format("arrow")[:]
    return pa.Table.from_pydict({name: table[name].combine_chunks() for name in table.column_names}), names


def _names_of(schema: pa.Schema) -> dict[str, list[str]]:
    """Names of classes that the hub's Parquet files carry."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: list(feature["names"]) for name, feature in features.items() if "names" in feature}
    except (KeyError, ValueError, TypeError):
        return {}
