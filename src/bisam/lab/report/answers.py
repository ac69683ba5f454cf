"""The answer of a fit, as `bisam fit` prints it: the sentence, its table, how to predict, how the data were read."""

from __future__ import annotations

from pathlib import Path

from bisam.lab.records import PLAN, WEIGHTS
from bisam.lab.report.page.blocks import Block, Grid, Sentences
from bisam.lab.tables.answer import answer
from bisam.lab.tables.cells import ResultTable


def folder_of_fit(table: ResultTable) -> Path | None:
    """Where the plan of a fit is, beside its runs; None for another table."""
    if len(table.recipe.rows) > 1 or table.changes:
        return None
    parents = {run.record.folder.parent for row in table.rows for run in table.of_row(row)}
    return next((folder for folder in sorted(parents) if (folder / PLAN).is_file()), None)


def answer_of(table: ResultTable) -> list[Block]:
    """Empty for a table that is not a fit's."""
    folder = folder_of_fit(table)
    if folder is None:
        return []
    found = answer(table)
    blocks: list[Block] = [Sentences([found.sentence], "answer"), Grid(found.sheet)]
    if (folder / WEIGHTS).is_file():
        blocks.append(Sentences(found.to_predict(folder)))
    notes = _data_notes(table)
    return [*blocks, Sentences(notes, title="How the data were read")] if notes else blocks


def _data_notes(table: ResultTable) -> list[str]:
    """Of all receipts, each once."""
    receipts = [run.record.receipt or {} for row in table.rows for run in table.of_row(row)]
    notes = [note for receipt in receipts if isinstance(note := receipt.get("data_notes"), list)]
    return list(dict.fromkeys(str(line) for lines in notes for line in lines))
