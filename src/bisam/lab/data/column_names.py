"""Names of columns in one text, as `--columns` takes them: as in a line of CSV."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Sequence


def read_names(text: str, columns: Sequence[str]) -> list[str]:
    """Those of `columns` that the text names. A name that is none of them stays as it was given.

    >>> read_names("age, city", ["city", "age"])
    ['age', 'city']
    >>> read_names('age,"rooms, total"', ["age", "rooms, total"])
    ['age', 'rooms, total']
    >>> read_names("rooms, total", ["age", "rooms, total"])
    ['rooms, total']
    >>> read_names('age,"rooms\\ntotal"', ["age", "rooms\\ntotal"])
    ['age', 'rooms\\ntotal']
    """
    if text in columns:
        return [text]
    names = itertools.chain.from_iterable(csv.reader(io.StringIO(text, newline=""), skipinitialspace=True))
    # a header such as "a, b" gives the second column a name that begins with a space
    by_stripped = {column.strip(): column for column in columns}
    return [name if name in columns else by_stripped.get(name.strip(), name) for name in names if name]


def write_names(names: Iterable[str]) -> str:
    """
    >>> write_names(["age", "rooms, total"])
    'age,"rooms, total"'
    >>> read_names(write_names(["a\\nb", "c\\u2028d"]), ["a\\nb", "c\\u2028d"])
    ['a\\nb', 'c\\u2028d']
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(names)  # names with either of the two are quoted
    return text.getvalue().removesuffix("\r\n")
