"""What was read from a table, in lines: inputs, missing values, columns that are left out, and identifiers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from bisam.lab.data.column_names import write_names
from bisam.lab.data.table_columns import FEWEST_ROWS, CategoryColumn, NumberColumn, TableInputs, missing_in

MOST_NAMED = 10
"""Columns of a kind that the summary names; of more, their number."""

NO_HEADER = re.compile(r"Unnamed: \d+(\.\d+)?")
"""What a column without a name in a CSV file is called, as the index that `DataFrame.to_csv` writes."""


def summary(inputs: TableInputs, left_out: Mapping[str, str], train: pa.Table) -> list[str]:
    """A line about the inputs; one about missing values and one about columns left out, where there are some."""
    numbers = [column.name for column in inputs.columns if isinstance(column, NumberColumn)]
    categories = [column.name for column in inputs.columns if isinstance(column, CategoryColumn)]
    kinds = {"numbers": numbers, "categories": categories}
    read = "; ".join(f"{kind} {_listed(names)}" for kind, names in kinds.items() if names)
    size = len(inputs.names)
    lines = [f"{size} input{'s' * (size != 1)}: {read}"]
    missing = [
        f"{column.name} in {count} ({_remedy(column)})"
        for column in inputs.columns
        if (count := missing_in(train.column(column.name)))
    ]
    if missing:
        lines.append(f"missing in training rows: {_shortened(missing)}")
    if left_out:
        lines.append(f"left out: {_shortened([f'{name} ({reason})' for name, reason in left_out.items()])}")
    return lines


def unlike_training(inputs: TableInputs, rows: pa.Table) -> list[str]:
    """Lines about values of new rows that the training could not learn from: missing ones, and other categories.

    >>> learnt = TableInputs((NumberColumn("age", 28.0, False), CategoryColumn("city", ("Bern", "Oslo"))))
    >>> for line in unlike_training(learnt, pa.table({"age": [30, None, 31], "city": ["Bern", "Rome", "Rome"]})):
    ...     print(line)
    age: missing in 1 of 3 rows (filled with the median 28)
    city: 2 of 3 rows have a category that fewer than 3 training rows had ('Rome'): 0 in all inputs
    """
    found = []
    for column in inputs.columns:
        values = rows.column(column.name)
        if count := missing_in(values):
            found.append(f"{column.name}: missing in {count} of {len(values)} rows ({_remedy(column)})")
        if isinstance(column, CategoryColumn) and len(others := _other_categories(column, values)):
            named = _shortened([f"{one!r:.40}" for one in others.unique().to_pylist()])
            found.append(
                f"{column.name}: {len(others)} of {len(values)} rows have a category that fewer than {FEWEST_ROWS} "
                f"training rows had ({named}): 0 in all inputs"
            )
    return found


def _other_categories(column: CategoryColumn, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values that are not missing and have no input."""
    is_known = pa.array(column.read(values, "the rows").any(axis=1))
    return values.filter(pc.invert(pc.or_(is_known, pc.is_null(values, nan_is_null=True))))


def _remedy(column: NumberColumn | CategoryColumn) -> str:
    if isinstance(column, CategoryColumn):
        return "a category of its own" if None in column.categories else "0 in all inputs"
    return f"filled with the median {column.median:g}{', and marked' if column.is_marked else ''}"


def row_numbers(table: pa.Table, *, by_option: bool) -> dict[str, str]:
    """Columns that only number the rows, with the reason to leave them out and how to use them after all.

    In a sorted table they give the classes away. They are integers, all different and consecutive, in any order: a
    table may have been shuffled since. By chance a number is seldom like that: twelve draws from twelve values are all
    different once in 19,000 times. Integers without a header are the index of pandas, which has gaps after rows were
    chosen.

    >>> row_numbers(pa.table({"row": [3, 2], "paid": [1, 5]}), by_option=True)
    {'row': 'numbers the rows: to use it, name it in --columns'}
    """
    remedy = f"to use it, {'name it in --columns' if by_option else 'give it as float'}"
    found = {}
    for name in table.column_names:
        column = table.column(name)
        if _numbers_rows(column):
            found[name] = f"numbers the rows: {remedy}"
        elif pa.types.is_integer(column.type) and NO_HEADER.fullmatch(name):
            found[name] = f"an index of pandas: {remedy}"
    return found


def _numbers_rows(column: pa.ChunkedArray) -> bool:
    if not pa.types.is_integer(column.type) or column.null_count or len(column) < 2:
        return False
    ends = pc.min_max(column).as_py()
    return bool(ends["max"] - ends["min"] + 1 == len(column) == len(column.unique()))


def identifiers(table: pa.Table) -> list[str]:
    """Columns of integers that seem to be identifiers: they number the rows, or are named as one.

    >>> identifiers(pa.table({"CustomerId": [7, 7], "row": [3, 2], "paid": [1, 5]}))
    ['CustomerId', 'row']
    """
    columns = {name: table.column(name) for name in table.column_names}
    return [
        name
        for name, column in columns.items()
        if _numbers_rows(column)
        or (pa.types.is_integer(column.type) and not column.null_count and len(column) and _is_named_as_one(name))
    ]


def _is_named_as_one(name: str) -> bool:
    """
    >>> [_is_named_as_one(name) for name in ("id", "PassengerId", "user_id", "Index", "paid", "body_mass_index")]
    [True, True, True, True, False, False]
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return name.lower() == "index" or bool(words and words[-1].lower() == "id")


def note_of_identifiers(suspects: Sequence[str], inputs: TableInputs, *, by_option: bool) -> list[str]:
    """A line if some inputs look like identifiers, with how to leave them out: by --columns, or in one's own code."""
    used = [column.name for column in inputs.columns]
    found = [name for name in used if name in suspects]
    others = [name for name in used if name not in suspects]
    if not found or not others:
        return []
    looks, it = ("looks like an identifier", "it") if len(found) == 1 else ("look like identifiers", "them")
    remedy = f"give --columns {shlex.quote(write_names(others))}" if by_option else f"drop {it} from the data frame"
    return [f"{_listed(found)} {looks}: to leave {it} out, {remedy}"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"in {len(names)} columns"


def _shortened(parts: Sequence[str]) -> str:
    """
    >>> _shortened(["a", "b"]), _shortened([str(number) for number in range(12)])[-18:]
    ('a, b', '7, 8, 9 and 2 more')
    """
    rest = len(parts) - MOST_NAMED
    return ", ".join(parts) if rest <= 0 else f"{', '.join(parts[:MOST_NAMED])} and {rest} more"
