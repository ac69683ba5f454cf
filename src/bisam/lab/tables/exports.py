"""Tables of texts as LaTeX and CSV, for papers and for other programs."""

from __future__ import annotations

import csv
import io
import re

from bisam.lab.files import printable
from bisam.lab.tables.summary import Sheet

_IN_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
    "^": r"\^{}", "~": r"\~{}", "±": r"$\pm$", "−": "$-$", "–": "--", "ρ": r"$\rho$", "α": r"$\alpha$",
    "μ": r"$\mu$", "ε": r"$\epsilon$", "≥": r"$\geq$", "×": r"$\times$", "÷": r"$\div$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


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
    """With a line of heads; a text that a spreadsheet would compute is quoted as text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in [sheet.head, *sheet.rows]:
        writer.writerow([_harmless("; ".join(map(printable, cell.split("\n")))) for cell in row])
    return out.getvalue()


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
