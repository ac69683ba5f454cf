"""What a recipe costs on one H200, from the measured milliseconds of a step."""

from __future__ import annotations

import math

from bisam.lab.recipes import Recipe

IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167, "digits": 1_197}

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

STEPS = {"sgd": 1.0, "esam": 1.83, "ebisam-log": 1.83, "ebisam-tanh": 1.83}
"""In plain steps; two for the others. The efficient methods: one, a forward pass, and one of half of the samples."""


def gradients_of_a_step(method: str) -> float:
    return STEPS.get(method, 2.0)


def hours(recipe: Recipe) -> float | None:
    """Of all cells and seeds; None where a model was not measured."""
    total = 0.0
    for (_, method), config in recipe.cells.items():
        if config.model not in PLAIN_STEP_MS:
            return None
        steps = config.epochs * math.floor(IMAGES[config.data] * (1 - config.validation) / config.batch)
        total += steps * PLAIN_STEP_MS[config.model] * gradients_of_a_step(method)
    return total * recipe.seeds / 3.6e6


def words(recipe: Recipe) -> str:
    found = hours(recipe)
    if recipe.name == "demo":
        return "2 minutes on two CPU cores"
    return "?" if found is None else f"{found:.0f}"
