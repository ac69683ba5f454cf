"""The cost of a recipe on one H200, from the measured milliseconds of a step."""

from __future__ import annotations

import math

from bisam.lab.data import DATA_SETS
from bisam.lab.methods import METHODS
from bisam.lab.recipes import Recipe

# Milliseconds of a captured plain step at batch 128 in bf16, compiled but for densenet121, from
# benchmarks/results/bench_h200.json and bench_h200_resnet32.json: a test compares.
PLAIN_STEP_MS = {
    "densenet121": 17.51,
    "resnet32": 2.43,
    "resnet56": 4.19,
    "vgg19bn": 1.98,
    "wrn28-2": 2.46,
    "wrn28-10": 10.82,
}


def hours(recipe: Recipe) -> float | None:
    """Hours of all cells and seeds; None where a model was not measured, or a data set or method is not registered."""
    total = 0.0
    for (_, method), config in recipe.cells.items():
        if config.model not in PLAIN_STEP_MS or config.data not in DATA_SETS or method not in METHODS:
            return None
        images = DATA_SETS[config.data].samples["train"] * (1 - config.validation)
        steps = config.epochs * math.floor(images / config.batch)
        total += steps * PLAIN_STEP_MS[config.model] * METHODS[method].passes
    return total * recipe.seeds / 3.6e6


def describe(recipe: Recipe) -> str:
    """The time as text, with what it is of."""
    found = hours(recipe)
    if recipe.name == "demo":
        return "2 min, two CPU cores"
    return "not measured" if found is None else f"{found:.0f} h, one H200"
