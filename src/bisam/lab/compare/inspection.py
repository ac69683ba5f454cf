"""What the loss is like around the weights of a run, on its own data.

The samples are training samples with the run's own labels, wrong ones too, since sharpness is about the training loss;
loss and error are also those of clean test samples. So that runs can be compared, whatever they were trained with, L is
cross entropy without smoothing, nothing is augmented, numbers are float32, and radius and random directions are the
same. BatchNorm is in evaluation mode.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import bisam
from bisam.diagnostics import (
    Estimate,
    Sharpness,
    Surface,
    average_sharpness,
    hessian_eigenvalues,
    hessian_trace,
    sharpness,
    surface,
)
from bisam.diagnostics import arguments as diagnosed
from bisam.diagnostics.passes import Probe
from bisam.lab.compare.trained import Trained
from bisam.lab.data.pools import Samples
from bisam.objectives import Objective

Progress = Callable[[str, int, int], None]
"""Told what is measured, how much of it is done, and of how much."""

ASCENTS: dict[str, Objective | None] = {
    "cross entropy": None,
    "Q (−log)": bisam.LowerBound("log"),
    "Q (tanh)": bisam.LowerBound("tanh"),
}
"""What is climbed. Of Q, the bound of the 0-1 error is told too."""

TOLERATED = 0.01
"""How far a test error may be from the recorded one: bf16 against float32 makes less than this."""


class InspectionError(ValueError):
    """Why a run cannot be looked at."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how finely."""

    rho: float = 0.05
    """Radius of all perturbations."""
    samples: int = 1000
    """Training samples, if the run has as many."""
    steps: int = 10
    """Gradients that a worst case of cross entropy follows. The perturbations of SAM and BiSAM follow one."""
    draws: int = 10
    """Random perturbations of an average."""
    eigenvalues: int = 3
    iterations: int = 100
    """Products with the Hessian that the eigenvalues may take."""
    signs: int = 20
    """Random vectors of the trace."""
    points: int = 21
    """On the line."""
    grid: int = 15
    """On each side of the plane."""
    span: float = 1.0
    """How far line and plane go to each side, in lengths of the filters."""
    seed: int = 0
    """Of all random directions."""

    def __post_init__(self) -> None:
        diagnosed.check_radius("rho", self.rho)
        diagnosed.check_count("samples", self.samples, 1)
        diagnosed.check_count("steps", self.steps, 2)


@dataclass(frozen=True)
class Point:
    """At the weights themselves. Errors are fractions, as everywhere here."""

    loss: float
    error: float


@dataclass(frozen=True)
class WorstCase:
    """How far the loss rises in a ball, and what else happens there."""

    climbed: str
    """What the perturbation maximises: a name in `ASCENTS`."""
    adaptive: bool
    steps: int
    found: Sharpness

    @property
    def name(self) -> str:
        """
        >>> WorstCase("cross entropy", True, 10, Sharpness(0, 0, 0, 0, 0, 0, None, 0)).name
        'cross entropy, adaptive, 10 steps'
        """
        ball = "adaptive" if self.adaptive else "L2"
        return f"{self.climbed}, {ball}, {self.steps} step{'s' if self.steps > 1 else ''}"


@dataclass(frozen=True)
class Inspection:
    """What was found at and around the weights of a run."""

    plan: Plan
    parameters: int
    samples: int
    """Training samples that loss, worst cases, averages and the line are of."""
    few: int
    """The first of these, for what takes hundreds of passes: curvature and the plane."""
    test_samples: int
    train: Point
    test: Point
    worst: list[WorstCase]
    average: Estimate
    """E L(w + ε) − L(w) over ‖ε‖ = ρ."""
    adaptive_average: Estimate
    """The same over ‖ε/|w|‖ = ρ."""
    eigenvalues: list[float]
    """The largest of the Hessian; none where it is not finite."""
    trace: Estimate
    line: Surface
    plane: Surface
    """Its first direction is that of the line."""
    notes: list[str] = field(default_factory=list)
    """What should be known when these numbers are read."""


def inspect(
    run: Trained,
    rows: Tensor,
    device: torch.device,
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Diagnose a run on these training samples. InspectionError says why it cannot be done."""
    if len(rows) == 0:
        raise InspectionError("there is no training sample to look at it with")
    # not TensorFloat-32, whose rounding is as large as what is looked for; and the same bits every time
    exactly = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    run.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with exactly:
            return _inspected(run, rows, device, Plan() if plan is None else plan, progress)
    except torch.OutOfMemoryError:
        raise InspectionError(
            f"{run.config.model} does not fit into the memory of {device}: use --device cpu"
        ) from None
    finally:
        run.model.cpu()


def _inspected(run: Trained, rows: Tensor, device: torch.device, plan: Plan, progress: Progress | None) -> Inspection:
    few = rows[: -(-len(rows) // 4)]
    test, is_all = run.pool.test(plan.samples, device)
    look = _Look(
        run.model,
        run.pool.training(run.config, rows, device),
        run.pool.training(run.config, few, device),
        plan,
        progress,
    )
    at_train, at_test = _checked_point(run, look, look.samples), look.point(test)
    return Inspection(
        plan=plan,
        parameters=sum(param.numel() for param in run.model.parameters()),
        samples=len(rows),
        few=len(few),
        test_samples=sum(len(labels) for _, labels in test),
        train=at_train,
        test=at_test,
        worst=look.worst(),
        average=look.average(adaptive=False),
        adaptive_average=look.average(adaptive=True),
        eigenvalues=look.eigenvalues(),
        trace=look.trace(),
        line=look.line(),
        plane=look.plane(),
        notes=[*_doubts(run, at_test, is_all), *look.notes],
    )


def _checked_point(run: Trained, look: _Look, samples: Samples) -> Point:
    """At the weights, where everything else begins."""
    try:
        found = look.point(samples)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise InspectionError(f"{run.config.model} cannot take the images of {run.config.data}: {error}") from error
    if not math.isfinite(found.loss):
        raise InspectionError(f"its training loss is {found.loss} at its weights: there is nothing to rise from")
    return found


def _doubts(run: Trained, at_test: Point, is_all: bool) -> list[str]:
    notes = []
    if not run.is_verified:
        notes.append("no receipt tells which data it was trained on: those that are here are taken for them")
    recorded = (run.record.result or {}).get("test_accuracy")
    if is_all and isinstance(recorded, float):
        measured = 100 * (1 - at_test.error)
        if not abs(measured - recorded) <= 100 * TOLERATED:
            notes.append(
                f"its weights are right on {measured:.2f} % of the test samples, and its result says {recorded:.2f} %: "
                "they may be of another run"
            )
    return notes


class _Look:
    """One model, its samples, and every diagnosis of them."""

    def __init__(self, model: nn.Module, samples: Samples, few: Samples, plan: Plan, progress: Progress | None) -> None:
        self.model, self.samples, self.few, self.plan = model, samples, few, plan
        self.notes: list[str] = []
        self._progress = progress

    def point(self, samples: Samples) -> Point:
        with Probe(self.model, samples, None, None, False, self._told("loss and error"), passes=1) as probe:
            found = probe.look()
        assert found.error is not None  # these are classes
        return Point(found.loss, found.error)

    def worst(self) -> list[WorstCase]:
        """Within both balls as near as can be, and where SAM, ASAM and BiSAM would go."""
        cases = [("cross entropy", adaptive, steps) for adaptive in (False, True) for steps in (1, self.plan.steps)]
        cases += [(climbed, False, 1) for climbed, ascent in ASCENTS.items() if ascent is not None]
        return [WorstCase(*case, self._sharpness(*case)) for case in cases]

    def average(self, *, adaptive: bool) -> Estimate:
        plan, told = self.plan, self._told("average case")
        return average_sharpness(
            self.model, self.samples, plan.rho, samples=plan.draws, adaptive=adaptive, seed=plan.seed, progress=told
        )

    def eigenvalues(self) -> list[float]:
        plan, told = self.plan, self._told("eigenvalues")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = hessian_eigenvalues(
                    self.model,
                    self.few,
                    plan.eigenvalues,
                    iterations=plan.iterations,
                    tolerance=1e-3,
                    seed=plan.seed,
                    progress=told,
                )
            except ValueError as error:  # the Hessian is not finite
                self.notes.append(str(error))
                return []
        self.notes += [str(warning.message) for warning in warned]
        return found

    def trace(self) -> Estimate:
        plan, told = self.plan, self._told("trace")
        return hessian_trace(self.model, self.few, samples=plan.signs, seed=plan.seed, progress=told)

    def line(self) -> Surface:
        plan, told = self.plan, self._told("line")
        return surface(self.model, self.samples, span=plan.span, points=plan.points, seed=plan.seed, progress=told)

    def plane(self) -> Surface:
        plan, told = self.plan, self._told("plane")
        return surface(
            self.model, self.few, span=plan.span, points=plan.grid, dimensions=2, seed=plan.seed, progress=told
        )

    def _sharpness(self, climbed: str, adaptive: bool, steps: int) -> Sharpness:
        told = self._told("worst case")
        return sharpness(
            self.model,
            self.samples,
            self.plan.rho,
            adaptive=adaptive,
            steps=steps,
            ascent=ASCENTS[climbed],
            progress=told,
        )

    def _told(self, what: str) -> diagnosed.Progress | None:
        progress = self._progress
        return None if progress is None else lambda done, total: progress(what, done, total)
