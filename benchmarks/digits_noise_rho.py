"""Which ρ is best for each method and rate of wrong labels on digits, on other seeds than those of the tables?

Trains a grid of ρ for each cell of `label_noise_digits` and `demo`, with the seeds from 100 on: five, and ten for the
demo's 40 %. Keeps validation and test accuracies. Finished runs in the folder are not trained again: `--only` names the
rates of one of several processes.

    python benchmarks/digits_noise_rho.py --runs FOLDER [--only 20%,60%] [--save NAME]
"""

import argparse
from pathlib import Path

import receipt
import torch
from digits_rho import trained

from bisam.lab import records
from bisam.lab.methods import perturbs
from bisam.lab.recipes import find

GRIDS = {
    "0%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14),
    "20%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28),
    "40%": (0.05, 0.07, 0.1, 0.12, 0.14),
    "60%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14),
    "80%": (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14),
}
"""Coarse at first, then finer or wider where the best was at an edge or between two values."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", help="rates, with a comma between")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    for rate in arguments.only.split(",") if arguments.only else GRIDS:
        recipe = "demo" if rate == "40%" else "label_noise_digits"
        methods = filter(perturbs, find(recipe).methods)
        seeds = range(100, 110 if recipe == "demo" else 105)
        table[rate] = {m: trained(f"{recipe}/{rate}/{m}", GRIDS[rate], arguments.runs, seeds) for m in methods}
    if arguments.save:
        commits = sorted({record.commits for record in records.find(arguments.runs)})
        print("wrote", receipt.save(arguments.save, {"commits": commits, "rates": table}))


if __name__ == "__main__":
    main()
