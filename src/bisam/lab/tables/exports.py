"""Tables of texts as LaTeX and CSV, for papers and for other programs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from bisam.lab.files import printable
from bisam.lab.tables.summary import OPEN, Sheet

_IN_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
    "^": r"\^{}", "~": r"\~{}", "±": r"$\pm$", "−": "$-$", "–": "--", "ρ": r"$\rho$", "α": r"$\alpha$",
    "μ": r"$\mu$", "ε": r"$\epsilon$", "≥": r"$\geq$", "×": r"$\times$", "÷": r"$\div$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip

_NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?"
_NOTE = r"(?:, | )(?P<note>from \d+|(?:\d+ (?:diverged|not finished|at once)(?:, )?)+|pairs|runs? each)"
_VALUE = re.compile(rf"(?:{OPEN}|(?P<mean>{_NUMBER}))(?: ± (?P<deviation>{_NUMBER}))?(?:, n = (?P<n>\d+))?(?:{_NOTE})?")
_INTERVAL = re.compile(rf"(?P<low>{_NUMBER}) to (?P<high>[+−]\d+\.\d+)")
KEYS = {"mean": "mean", "deviation": "standard deviation", "n": "n", "low": "low", "high": "high", "note": "note"}
KINDS = [*KEYS.values(), *(f"published {kind}" for kind in KEYS.values())]
"""Of the numbers in a cell, in the order of their columns; those below the first line are the paper's."""


def latex(sheet: Sheet) -> str:
    """A tabular with booktabs' rules; the further lines of a cell are rows of their own. It needs booktabs alone."""
    lines = [
        rf"% {_plain(sheet.title)}",
        rf"\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}",
        r"\toprule",
        _row(sheet.head),
        r"\midrule",
    ]
    for row in sheet.rows:
        cells = [cell.split("\n") for cell in row]
        lines += [
            _row([cell[place] if place < len(cell) else "" for cell in cells]) for place in range(max(map(len, cells)))
        ]
    notes = [f"% {_plain(note)}" for note in sheet.notes]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes])


def csv_text(sheet: Sheet) -> str:
    """With a line of heads, and numbers alone in columns of numbers: see `_columns`.

    A text that a spreadsheet would compute is quoted as text.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [(sheet.head[0], [row[0] for row in sheet.rows])]  # names of rows, which may look like numbers
    for place, head in enumerate(sheet.head[1:], start=1):
        columns += _columns(head, [row[place] for row in sheet.rows]).items()
    for cells in [[head for head, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]:
        writer.writerow([_harmless("; ".join(map(printable, cell.split("\n")))) for cell in cells])
    return out.getvalue()


def _columns(head: str, cells: Sequence[str]) -> dict[str, list[str]]:
    """A column of texts such as "94.20 ± 0.10, n = 3" as several, one for each kind of number in it.

    >>> _columns("SAM", ["94.20 ± 0.10, n = 3", "–"])
    {'SAM mean': ['94.20', ''], 'SAM standard deviation': ['0.10', ''], 'SAM n': ['3', '']}
    >>> _columns("95 % interval", ["−0.03 to +0.29"]), _columns("resolved", ["no"])
    ({'95 % interval low': ['-0.03'], '95 % interval high': ['+0.29']}, {'resolved': ['no']})
    >>> _columns("more seeds", ["1,234", "7"]), _columns("ours", ["–"])
    ({'more seeds': ['1234', '7']}, {'ours': ['']})
    """
    found = [_numbers(cell) for cell in cells]
    if any(parts is None for parts in found):
        return {head: [*cells]}
    kept = [kind for kind in KINDS if any(parts and kind in parts for parts in found)]
    is_plain = {"standard deviation", "n"}.isdisjoint(kept)  # "ours" and "seeds" have no other numbers
    names = {kind: head if kind == "mean" and is_plain else f"{head} {kind}".strip() for kind in kept}
    columns = {names[kind]: [(parts or {}).get(kind, "") for parts in found] for kind in kept}
    return columns or {head: [""] * len(cells)}


def _numbers(cell: str) -> dict[str, str] | None:
    """The numbers of a cell by their kind, with an ASCII minus; empty for an open cell, None for another text."""
    if cell in ("", OPEN):
        return {}
    first, *below = cell.split("\n")
    lines = [_INTERVAL.fullmatch(first) or _VALUE.fullmatch(first), *map(_VALUE.fullmatch, below)]
    if len(lines) > 2:
        return None
    found: dict[str, str] = {}
    for place, line in zip(("", "published "), lines, strict=False):
        if line is None:
            return None
        parts = {place + KEYS[key]: text for key, text in line.groupdict().items() if text}
        notes = {kind for kind in parts if kind.endswith("note")}
        found |= {
            kind: text if kind in notes else text.replace("−", "-").replace(",", "") for kind, text in parts.items()
        }
    return found


def file_name(title: str) -> str:
    """
    >>> file_name("CIFAR-10: differences in points of test accuracy")
    'cifar-10-differences-in-points-of-test-accuracy'
    """
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.")[:120] or "table"


def _row(cells: list[str]) -> str:
    return " & ".join(map(_in_latex, cells)) + r" \\"


def _in_latex(text: str) -> str:
    return "".join(_IN_LATEX.get(letter, letter) for letter in printable(text))


def _plain(text: str) -> str:
    return " ".join(printable(text).split())


def _harmless(text: str) -> str:
    """Numbers stay; other texts that begin as a formula does get an apostrophe, as spreadsheets write text."""
    if text[:1] in ("=", "@", "\t") or (text[:1] in ("+", "-") and not re.fullmatch(r"[+-][\d.]+", text)):
        return f"'{text}"
    return text
