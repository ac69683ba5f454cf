"""The answer of a fit, as `bisam fit` prints it: the sentence, its table, how to predict, how the data were read."""

from __future__ import annotations

from pathlib import Path

from bisam.lab.records import PLAN, WEIGHTS
from bisam.lab.report.page.blocks import Block, Grid, Sentences
from bisam.lab.tables.answer import answer
from bisam.lab.tables.cells import Group


def folder_of_fit(group: Group) -> Path | None:
    """Where the plan of a fit is, beside its runs; None for another table."""
    if len(group.recipe.rows) > 1 or group.changes:
        return None
    parents = {run.record.folder.parent for row in group.rows for run in group.of_row(row)}
    return next((folder for folder in sorted(parents) if (folder / PLAN).is_file()), None)


def answer_of(group: Group) -> list[Block]:
    """None for a table that is not a fit's."""
    folder = folder_of_fit(group)
    if folder is None:
        return []
    found = answer(group)
    blocks: list[Block] = [Sentences([found.sentence], "answer"), Grid(found.sheet)]
    if (folder / WEIGHTS).is_file():
        blocks.append(Sentences(found.to_predict(folder)))
    notes = _data_notes(group)
    return [*blocks, Sentences(notes, title="How the data were read")] if notes else blocks


def _data_notes(group: Group) -> list[str]:
    """Of all receipts, each once."""
    receipts = [run.record.receipt or {} for row in group.rows for run in group.of_row(row)]
    notes = [note for receipt in receipts if isinstance(note := receipt.get("data_notes"), list)]
    return list(dict.fromkeys(str(line) for lines in notes for line in lines))
