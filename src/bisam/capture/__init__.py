"""The whole step as one CUDA graph; several independent trainings side by side in one.

    step = bisam.capture(optimizer)
    for x, y in loader:
        loss = step(x, y)                     # optimizer.minimize(x, y), with one launch instead of thousands

The first steps run eagerly, and are steps like any other. Then one is captured: forward, backward, perturb, forward,
backward, restore, update and telemetry become one graph, which each further call replays on its own batch. Learning
rate and ρ are read anew at every step, so schedulers work; batch-norm statistics, dropout, hooks and checkpoints work
as in an eager step. What a graph cannot hold runs eagerly, with a warning that gives the reason.
"""

from bisam.capture.steps import CapturedStep, CapturedSteps, capture, capture_together

__all__ = ["CapturedStep", "CapturedSteps", "capture", "capture_together"]
