"""Which ρ is best for each method and rate of wrong labels on digits, on other seeds than those of the tables?

First a grid of ρ for each cell of `label_noise_digits` and `demo`, with the seeds from 100 on: five, and ten for the
demo's 40 %. Then, with `--closer`, the three best of each cell by validation accuracy get 20 seeds, and so do values
that the grid got later: the 120 validation images of five seeds leave about two points of chance. Keeps validation and
test accuracies. Finished runs in the folder are not trained again: `--only` names the rates of one of several
processes.

    python benchmarks/digits_noise_rho.py --runs FOLDER [--closer] [--only 20%,60%] [--save NAME]
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import receipt
import torch
from digits_rho import trained

from bisam.lab import records
from bisam.lab.methods import perturbs
from bisam.lab.recipes import find_recipe

GRIDS = {
    "0%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14),
    "20%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28),
    "40%": (0.05, 0.07, 0.08, 0.09, 0.1, 0.12, 0.14),
    "60%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14),
    "80%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14),
}
"""Coarse at first, then finer or wider where the best was at an edge or between two values."""

FIRST_SEED, MOST_SEEDS, BEST = 100, 20, 3
SEEDS = {"40%": 10}
"""Seeds of a grid, where they are not five."""

NOTHING = {"validation": [], "test": []}

GRID_FILE = receipt.RESULTS / "digits_noise_rho.json"


def grid(cell, rate, root):
    """Accuracies of a cell by ρ."""
    return trained(cell, GRIDS[rate], root, range(FIRST_SEED, FIRST_SEED + SEEDS.get(rate, 5)))


def closer(cell, rate, found, root):
    """Accuracies of a cell, as the grid found them; its best values of ρ, and new ones, with all seeds."""
    seeds = SEEDS.get(rate, 5)
    best = sorted(found, key=lambda rho: -fmean(found[rho]["validation"][:seeds]))[:BEST]
    fewer = {rho: found.get(rho, NOTHING) for rho in map(str, GRIDS[rate]) if rho in best or rho not in found}
    for rho, of in fewer.items():
        missing = range(FIRST_SEED + len(of["validation"]), FIRST_SEED + MOST_SEEDS)
        more = trained(cell, [float(rho)], root, missing)[rho] if missing else NOTHING
        found[rho] = {part: of[part] + more[part] for part in of}
    return {rho: found[rho] for rho in sorted(found, key=float)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--closer", action="store_true", help=f"more seeds for the best values in {GRID_FILE.name}")
    parser.add_argument("--only", help="rates, with a comma between")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    saved = json.loads(GRID_FILE.read_text()) if arguments.closer else {"commits": []}
    table = {}
    for rate in arguments.only.split(",") if arguments.only else GRIDS:
        recipe = "demo" if rate == "40%" else "label_noise_digits"
        table[rate] = {}
        for method in filter(perturbs, find_recipe(recipe).methods):
            cell = f"{recipe}/{rate}/{method}"
            found = saved["rates"][rate][method] if arguments.closer else grid(cell, rate, arguments.runs)
            table[rate][method] = closer(cell, rate, found, arguments.runs) if arguments.closer else found
    if arguments.save:
        commits = sorted({*saved["commits"], *(record.commits for record in records.find_records(arguments.runs))})
        print("wrote", receipt.save(arguments.save, {"commits": commits, "rates": table}))


if __name__ == "__main__":
    main()
