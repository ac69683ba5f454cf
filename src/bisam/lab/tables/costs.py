"""The cost of a recipe on one H200, from the measured milliseconds of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bisam.lab.config import Config
from bisam.lab.data import DATA_SETS
from bisam.lab.methods import METHODS, passes
from bisam.lab.recipes import Recipe

# Milliseconds of a captured plain step at batch 128 in bf16, compiled but for densenet121, from
# benchmarks/results/bench_h200.json; resnet32 from frontier_h200.json. A test compares.
PLAIN_STEP_MS = {
    "densenet121": 17.8,
    "resnet32": 1.39,
    "resnet56": 2.24,
    "vgg19bn": 2.03,
    "wrn28-2": 2.49,
    "wrn28-10": 10.98,
}

NOT_MEASURED = "not measured"
ON_A_CPU = {"demo": "2 min, two CPU cores", "frontier_digits": "30 min, one CPU core",
            "label_noise_digits": "20 min, one CPU core"}  # fmt: skip


def hours(recipe: Recipe) -> float | None:
    """Hours of all cells and seeds; None where `hours_of_run` is None for one of them."""
    found = [hours_of_run(config) for config in recipe.cells.values()]
    return None if None in found else sum(each for each in found if each is not None) * recipe.seeds


def hours_of_run(config: Config, plain_ms: Mapping[str, float] = PLAIN_STEP_MS) -> float | None:
    """None where the model was not measured, or its data set or method is not registered.

    >>> round(hours_of_run(Config(model="resnet56", method="sam")), 3)
    0.087
    >>> round(hours_of_run(Config(model="resnet56", method="sam", epochs=100, epoch_steps=100)), 3)
    0.012
    """
    if config.model not in plain_ms or config.data not in DATA_SETS or config.method not in METHODS:
        return None
    images = DATA_SETS[config.data].samples["train"] * (1 - config.validation)
    steps = config.epochs * (config.epoch_steps or math.floor(images / config.batch))
    return steps * plain_ms[config.model] * passes(config) / 3.6e6


def describe(recipe: Recipe) -> str:
    """The time as text, with what it is of."""
    found = hours(recipe)
    if recipe.name in ON_A_CPU:
        return ON_A_CPU[recipe.name]
    return NOT_MEASURED if found is None else f"{found:.0f} h, one H200"
