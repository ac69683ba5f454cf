"""Which ρ is best for each method and setting of the recipe `frontier_digits`, on other seeds than its own?

Trains the recipe's ρ, half of it and twice of it, with the seeds 100 to 119, and keeps validation and test accuracies.
Methods that cost as much as SAM get as many values as SAM got in `digits_noise_rho.py`, where its ρ and BiSAM's are
from. The recipe's is to be the best by validation accuracy, except LookSAM's, which hardly matters if it is small.
Finished runs in the folder are not trained again, so that two processes may share the work: `--only` names the cells
of one. `--save` keeps the other cells that the file has.

    python benchmarks/digits_rho.py --runs FOLDER [--only esam,late10] [--save NAME]
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import receipt
import torch

from bisam.lab import records
from bisam.lab.data.sources import open_source
from bisam.lab.methods import perturbs
from bisam.lab.recipes import find_recipe
from bisam.lab.training import jobs
from bisam.lab.training.progress import Progress

SEEDS = range(100, 120)
FACTORS = (0.5, 1.0, 2.0)
SAMS = (0.05, 0.07, 0.08, 0.09, 0.1, 0.12, 0.14)
GRIDS = {
    **dict.fromkeys(["fsam", "gsam", "rsam", "vasso", "fishersam", "micro16"], SAMS),
    "asam": tuple(8 * rho for rho in SAMS),
    "abisam-log": tuple(16 * rho for rho in SAMS),
    "wsam": (0.0025, 0.0035, 0.005, 0.007, 0.008, 0.01, 0.014),
}
"""Around the best of four values, each twice the one before, of five seeds (not kept)."""


def cells():
    """Names of recipes of one cell, by a short name; the demo's and those that only show SAM's ρ are left out."""
    found = {}
    for row, method in find_recipe("frontier_digits").cells:
        setting = row.removeprefix("digitsnet-noise40").removeprefix("-")
        if perturbs(method) and "rho" not in setting and (setting or method not in find_recipe("demo").methods):
            found[setting or method] = f"frontier_digits/{row}/{method}"
    return found


def values(name, cell):
    """The ρ of a cell, half of it and twice of it, or its grid."""
    (config,) = find_recipe(cell).cells.values()
    return [float(f"{rho:.3g}") for rho in GRIDS.get(name, [factor * config.rho for factor in FACTORS])]


def trained(cell, values, root, seeds=SEEDS):
    """Accuracies of a cell by ρ: of the folder's runs, and of those that it lacks, which are trained."""
    by_rho = {rho: jobs.jobs_of(find_recipe(cell), seeds, {"rho": str(rho)}, root) for rho in values}
    with Progress() as progress:
        everything = [job for some in by_rho.values() for job in some]
        jobs.run(everything, partial(open_source, log=progress.note), torch.device("cpu"), progress)
    results = {rho: [records.read(job.folder).result for job in some] for rho, some in by_rho.items()}
    found = {
        str(rho): {key: [result[f"{key}_accuracy"] for result in of_rho] for key in ("validation", "test")}
        for rho, of_rho in results.items()
    }
    means = {rho: round(statistics.fmean(of["validation"]), 2) for rho, of in found.items()}
    print(cell, means, "best:", max(means, key=means.get), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", help="short names of cells, with a comma between")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = cells()
    names = arguments.only.split(",") if arguments.only else known
    table = {name: trained(known[name], values(name, known[name]), arguments.runs) for name in names}
    if arguments.save:
        path = receipt.RESULTS / f"{arguments.save}.json"
        saved = json.loads(path.read_text()) if path.exists() else {"commits": [], "cells": {}}
        commits = sorted({*saved["commits"], *(record.commits for record in records.find_records(arguments.runs))})
        table = {**saved["cells"], **table}
        print("wrote", receipt.save(arguments.save, {"commits": commits, "seeds": [*SEEDS], "cells": table}))


if __name__ == "__main__":
    main()
