"""What `bisam fit` prints at its end, made again from the records in benchmarks/results/your_data."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bisam.lab import records
from bisam.lab.fitting.code import lines
from bisam.lab.tables import cells
from bisam.lab.tables.answer import Answer, answer

RUNS = Path(__file__).parents[2] / "benchmarks/results/your_data"
WIDTH = 120


def answered(seeds: Sequence[int]) -> Answer:
    """The answer with these seeds alone."""
    (table,) = cells.collect(records.find_records(RUNS)).tables
    kept = {cell: {seed: run for seed, run in runs.items() if seed in seeds} for cell, runs in table.runs.items()}
    return answer(replace(table, runs=kept))


def ending() -> str:
    """With the first three seeds: the table, the lines of Python, and the sentence."""
    found, name = answered(range(3)), "runs/cancer-perceptron"
    code = [f"    {line}" for line in lines(found.best.config).splitlines()]
    return _block(
        found.sheet.rich(),
        *(line.replace(str(RUNS), "runs") for line in found.to_predict(Path(name))),
        f"to train in the same way ({name}/train.py):",
        *code,
        found.sentence,
    )


def with_ten_seeds() -> str:
    """With seven seeds more, of each method."""
    done = f"9 of {len(records.find_records(RUNS))} runs are done already"
    return _block("$ bisam fit cancer.csv --seeds 0-9", "…", done, "…", answered(range(10)).sentence)


def _block(*parts: object) -> str:
    here = Console(file=io.StringIO(), width=WIDTH, markup=False, emoji=False, highlight=False)
    for part in parts:
        here.print(part)
    text = here.file.getvalue().rstrip("\n")
    return "\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines()) + "\n"
