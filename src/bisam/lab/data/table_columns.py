"""Columns of a table as inputs: numbers, and one input for each category, learnt from the training part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from bisam.lab.data.classes import listed_rows
from bisam.lab.data.images import DataError

MOST_CATEGORIES = 50
"""Different texts of a column that is read as categories."""

FEWEST_ROWS = 3
"""Training rows that a category needs, and missing numbers to be marked.

A seed may validate on all rows of a rarer one: its input would have untrained weights. A column whose texts have fewer
on average has texts of their own, such as names.
"""

INDEX = "__index_level_"
"""How the name of a column begins that pandas saves for an index without a name."""

DATE = (
    r"^(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d{1,2}/\d{1,2}/\d{2})"
    r"([ T]\d{1,2}:\d{2}[\d:.,+\- ZAPMapm]*)?$"
)
"""A text that is a date, with or without a time."""

NUMBER = r"^\s*[-+$€£]?\s*\d[\d.,' ]*([eE][-+]?\d+)?\s*[%$€£]?\s*$"
"""A text that a person reads as a number."""


@dataclass(frozen=True)
class NumberColumn:
    """One input; with `is_marked` a second one, which is 1 where the number is missing."""

    name: str
    median: float
    """Of the training part: it takes the place of a missing number."""
    is_marked: bool

    @property
    def names(self) -> list[str]:
        return [self.name, f"{self.name} missing"] if self.is_marked else [self.name]

    def read(self, column: pa.ChunkedArray, where: str) -> np.ndarray[Any, Any]:
        if content_of(column) not in ("numbers", "nothing"):
            raise DataError(
                f"{where}: column {self.name!r} has {content_of(column)}, and numbers in the training part: correct it"
            )
        numbers = numbers_of(column)
        missing = np.isnan(numbers)
        filled = np.where(missing, np.float32(self.median), numbers)
        return np.stack([filled, missing.astype(np.float32)] if self.is_marked else [filled], axis=1)


@dataclass(frozen=True)
class CategoryColumn:
    """One input for each category, 1 for the one that a row has. Rare and unknown ones are 0 in all of them."""

    name: str
    categories: tuple[str | None, ...]
    """By name; None is a missing one, and the last."""

    @property
    def names(self) -> list[str]:
        return [f"{self.name} missing" if one is None else f"{self.name}={one}" for one in self.categories]

    def read(self, column: pa.ChunkedArray, where: str) -> np.ndarray[Any, Any]:
        content, values = content_of(column), plain(column)
        keys: list[Any] = [*self.categories]
        if content == "numbers" and missing_in(column) == len(column):
            values = pa.nulls(len(column))
        elif content == "numbers":  # of a CSV file whose texts in this column all look like numbers
            keys = self._as_numbers(where, are_truths=pa.types.is_boolean(values.type))
            wide = values.cast(pa.float64(), safe=False)
            values = pc.if_else(pc.is_nan(wide), None, wide)
        elif content not in ("texts", "nothing"):
            raise self._other_kind(content, where)
        known = {key: place for place, key in enumerate(keys) if key is not None or self.categories[place] is None}
        found = np.array([known.get(value, -1) for value in values.to_pylist()], dtype=np.int64)
        return (found[:, None] == np.arange(len(self.categories))).astype(np.float32)

    def _as_numbers(self, where: str, *, are_truths: bool) -> list[float | None]:
        """The number that each category is, as 7 of "007"; None for others."""
        found = [None if one is None else _number_of(one, is_truth=are_truths) for one in self.categories]
        numbers = [number for number in found if number is not None]
        if not numbers:
            raise self._other_kind("numbers", where)
        if len({*numbers}) < len(numbers):
            raise DataError(
                f"{where}: column {self.name!r} has numbers, and texts in the training part, some of which are the "
                "same number: give texts, in a Parquet or JSONL file"
            )
        return found

    def _other_kind(self, content: str, where: str) -> DataError:
        return DataError(f"{where}: column {self.name!r} has {content}, and texts in the training part: correct it")


@dataclass(frozen=True)
class TableInputs:
    """How the columns of a table become inputs, in the order of the columns."""

    columns: tuple[NumberColumn | CategoryColumn, ...]

    @property
    def names(self) -> list[str]:
        """One for each input."""
        return [name for column in self.columns for name in column.names]

    @property
    def are_numbers(self) -> bool:
        """Whether each column is one input, the number that it has."""
        return all(isinstance(column, NumberColumn) and not column.is_marked for column in self.columns)

    def read(self, rows: Any, where: str = "the rows") -> Tensor:
        """The inputs, float32 (N, F), of a table of pyarrow, a data frame, or anything that gives Arrow its columns.

        >>> learnt = TableInputs((NumberColumn("age", 28.0, True), CategoryColumn("sex", ("f", "m"))))
        >>> learnt.read(pa.table({"sex": ["m", "x"], "age": [30, None]})).tolist()
        [[30.0, 0.0, 0.0, 1.0], [28.0, 1.0, 0.0, 0.0]]
        """
        table = as_table(rows)
        read = [column.read(column_of(table, column.name, where), where) for column in self.columns]
        return torch.from_numpy(np.concatenate(read, axis=1))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the inverse."""
        return {
            column.name: {"median": column.median, "is_marked": column.is_marked}
            if isinstance(column, NumberColumn)
            else {"categories": list(column.categories)}
            for column in self.columns
        }

    @staticmethod
    def from_dict(columns: Mapping[str, Mapping[str, Any]]) -> TableInputs:
        """ValueError, TypeError or KeyError for what `as_dict` does not return."""
        return TableInputs(tuple(_column_from(name, values) for name, values in columns.items()))


def _column_from(name: str, values: Mapping[str, Any]) -> NumberColumn | CategoryColumn:
    if "categories" in values:
        categories = tuple(values["categories"])
        if not all(isinstance(one, (str, type(None))) for one in categories) or len({*categories}) < len(categories):
            raise ValueError(f"the categories of column {name!r} are not different texts")
        return CategoryColumn(name, categories)
    median, is_marked = values["median"], values["is_marked"]
    if type(median) is not float or not math.isfinite(median) or type(is_marked) is not bool:
        raise ValueError(f"the median of column {name!r} is not a number, or not known to be marked")
    return NumberColumn(name, median, is_marked)


def learn(train: pa.Table) -> tuple[TableInputs, dict[str, str]]:
    """The inputs of a training part, and the reason for each column that cannot be one."""
    used: list[NumberColumn | CategoryColumn] = []
    left_out: dict[str, str] = {}
    for name in train.column_names:
        column = plain(train.column(name))
        if reason := "the index of a data frame" if name.startswith(INDEX) else _reason_against(column):
            left_out[name] = reason
        elif content_of(column) == "numbers":
            numbers = numbers_of(column)
            used.append(NumberColumn(name, float(np.nanmedian(numbers)), missing_in(column) >= FEWEST_ROWS))
        else:
            used.append(CategoryColumn(name, _categories(column)))
    return TableInputs(tuple(used)), left_out


def _categories(column: pa.ChunkedArray) -> tuple[str | None, ...]:
    """Those that have `FEWEST_ROWS` or more, by name; a missing one is the last.

    >>> _categories(pa.chunked_array([["b", "a", None] * 3 + ["c"]]))
    ('a', 'b', None)
    """
    counts = {one["values"]: one["counts"] for one in column.value_counts().to_pylist()}
    found = [category for category, count in counts.items() if count >= FEWEST_ROWS]
    return (*sorted(one for one in found if one is not None), *(one for one in found if one is None))


def _reason_against(column: pa.ChunkedArray) -> str:
    """Why a column of the training part cannot be an input; empty if it can."""
    content, missing = content_of(column), missing_in(column)
    if missing == len(column):
        return "empty"
    if content not in ("numbers", "texts"):
        return content
    if content == "texts" and pc.all(pc.match_substring_regex(column, DATE)).as_py():
        return "dates"
    present = column.drop_null() if content == "texts" else _finite(column)
    different = present.unique()
    if len(different) == 1 and missing < FEWEST_ROWS:
        return f"always {_shown(different[0].as_py())}"
    if content == "texts" and len(different) > min(MOST_CATEGORIES, len(present) / FEWEST_ROWS):
        return _unlike_numbers(present) or f"{len(different)} different texts in {len(present)} rows"
    return ""


def _finite(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without what is missing, as null or as NaN."""
    return numbers.filter(pa.array(~np.isnan(numbers_of(numbers))))


def _unlike_numbers(texts: pa.ChunkedArray) -> str:
    """What keeps texts from being numbers, if most of them are; else empty.

    >>> _unlike_numbers(pa.chunked_array([["1.5", "2", "?"]]))
    "numbers mixed with texts such as '?': leave these empty"
    """
    is_number = pc.match_substring_regex(texts, NUMBER)
    others = texts.filter(pc.invert(is_number))
    if len(others) > len(texts) / 2:
        return ""
    if len(others):
        return f"numbers mixed with texts such as {_shown(others[0].as_py())}: leave these empty"
    return f"numbers written as texts, such as {_shown(texts[0].as_py())}: write plain numbers"


def _number_of(text: str, *, is_truth: bool) -> float | None:
    """The number that a text is; of truth values, 1 or 0.

    >>> _number_of("007", is_truth=False), _number_of("False", is_truth=True), _number_of("Bern", is_truth=False)
    (7.0, 0.0, None)
    """
    if is_truth:
        return {"true": 1.0, "false": 0.0}.get(text.strip().lower())
    try:
        return float(text) if text.isascii() and "_" not in text and math.isfinite(float(text)) else None
    except ValueError:
        return None


def _shown(value: Any) -> str:
    """
    >>> _shown(7.0), _shown("CH"), _shown(True)
    ('7', "'CH'", 'True')
    """
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.40}" if isinstance(value, str) else str(value)


def content_of(column: pa.ChunkedArray) -> str:
    """What its type holds: "numbers", "texts", "dates", "times", "nothing", or the name of another type.

    >>> content_of(pa.chunked_array([[1.5]])), content_of(pa.chunked_array([["a"]]))
    ('numbers', 'texts')
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_any = {
        "numbers": (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal),
        "texts": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "dates": (pa.types.is_date, pa.types.is_timestamp),
        "times": (pa.types.is_time, pa.types.is_duration, pa.types.is_interval),
        "nothing": (pa.types.is_null,),
    }
    return next((name for name, tests in is_any.items() if any(test(kind) for test in tests)), str(kind))


def numbers_of(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """float32, with NaN for what is missing."""
    wide = plain(column).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # what is too large for float32 is refused as infinite
        return np.asarray(wide, dtype=np.float32)


def missing_in(column: pa.ChunkedArray) -> int:
    """How many rows lack a value."""
    if content_of(column) == "numbers":
        return int(np.isnan(numbers_of(column)).sum())
    return int(column.null_count)


def check_finite(table: pa.Table, where: str) -> None:
    """DataError for a number that is infinite: a missing one can be filled, but this is a fault of the data."""
    for name in table.column_names:
        if content_of(table.column(name)) == "numbers":
            infinite = np.flatnonzero(np.isinf(numbers_of(table.column(name))))
            if len(infinite):
                raise DataError(
                    f"{where}: column {name!r} has an infinite number in {listed_rows(infinite.tolist())}: correct it, "
                    "leave it empty, or remove the row"
                )


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """With the values of a dictionary in its place, and texts of one type."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.large_string()) if content_of(column) == "texts" else column


def column_of(table: pa.Table, name: str, where: str) -> pa.ChunkedArray:
    places = table.schema.get_all_field_indices(name)  # not column_names, a list that is made anew for each column
    if not places:
        raise DataError(f"{where}: there is no column {name!r}, which the training part has: add it")
    if len(places) > 1:
        raise DataError(f"{where}: {len(places)} columns are called {name!r}: rename them")
    return table.column(places[0])


def has_columns(rows: Any) -> bool:
    """Whether it is a table of pyarrow, or a data frame that gives Arrow its columns, as those of pandas and polars.

    Their single columns give Arrow values too, but have no columns.
    """
    return isinstance(rows, pa.Table) or (hasattr(rows, "__arrow_c_stream__") and hasattr(rows, "columns"))


def as_table(rows: Any) -> pa.Table:
    """Without the index that pandas adds as columns, which have its names where it has some."""
    if isinstance(rows, pa.Table):
        return rows.drop_columns([name for name in rows.column_names if name.startswith(INDEX)])
    twice = [name for name, count in Counter(map(str, rows.columns)).items() if count > 1]
    if twice:
        raise DataError(f"the data frame has several columns of the name {twice[0]!r}: rename them, or keep one")
    try:
        table = pa.table(rows)
    except pa.ArrowInvalid as error:
        raise DataError(f"the data frame has a column of mixed values: give it one type ({error})") from None
    index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    return table.drop_columns([name for name in index if isinstance(name, str)])
