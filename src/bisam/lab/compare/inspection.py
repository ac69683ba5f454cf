"""Diagnoses of the loss around the weights of a run, on its own data.

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
from bisam.lab.data.pools import SampleBatches
from bisam.objectives import Objective

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a measurement, its finished part and its total."""

ASCENTS: dict[str, Objective | None] = {
    "cross entropy": None,
    "Q (−log)": bisam.LowerBound("log"),
    "Q (tanh)": bisam.LowerBound("tanh"),
}
"""Objectives that perturbations maximise. Those with Q also give a bound of the 0-1 error."""

LARGEST_BASIS = 4 * 2**30
"""Bytes that the eigenvalues may take: each product with the Hessian keeps a vector as large as the weights."""

TOLERATED = 0.01
"""Tolerated deviation from the recorded test error: bf16 against float32 makes less."""


class InspectionError(ValueError):
    """A run cannot be diagnosed."""


@dataclass(frozen=True)
class InspectionPlan:
    """The settings of the diagnoses."""

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
    """Points on the line."""
    grid: int = 15
    """Points on each side of the plane."""
    span: float = 1.0
    """How far line and plane go to each side, in lengths of the filters."""
    seed: int = 0
    """Seed of all random directions."""

    def __post_init__(self) -> None:
        diagnosed.check_radius("rho", self.rho)
        diagnosed.check_count("samples", self.samples, 1)
        diagnosed.check_count("steps", self.steps, 2)


@dataclass(frozen=True)
class LossAndError:
    """At the weights. Errors are fractions, as everywhere here."""

    loss: float
    error: float


@dataclass(frozen=True)
class WorstCase:
    """The rise of the loss in a ball, with the error and flips there."""

    objective: str
    """What the perturbation maximises: a name in `ASCENTS`."""
    adaptive: bool
    steps: int
    found: Sharpness

    @property
    def name(self) -> str:
        """
        >>> WorstCase("cross entropy", True, 2, Sharpness(0, 0, 0, 0, 0, 0, None, 0)).name
        'cross entropy, adaptive, 2 steps'
        """
        ball = "adaptive" if self.adaptive else "L2"
        return f"{self.objective}, {ball}, {self.steps} step{'s' if self.steps > 1 else ''}"


@dataclass(frozen=True)
class Inspection:
    """The diagnoses at and around the weights of a run."""

    plan: InspectionPlan
    parameters: int
    samples: int
    """Training samples that loss, worst cases, averages and the line are of."""
    few: int
    """The first of these, for what takes hundreds of passes: curvature and the plane."""
    test_samples: int
    train: LossAndError
    test: LossAndError
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
    """Cautions for reading these numbers."""


def inspect(
    run: Trained,
    rows: Tensor,
    device: torch.device,
    plan: InspectionPlan | None = None,
    progress: OnProgress | None = None,
) -> Inspection:
    """Diagnose a run on these training samples. Raises InspectionError if it cannot be diagnosed."""
    if len(rows) == 0:
        raise InspectionError("there is no training sample to diagnose it on")
    # not TensorFloat-32, whose rounding is as large as what is measured; and the same bits every time
    exactly = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    run.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with exactly:
            return _inspected(run, rows, device, InspectionPlan() if plan is None else plan, progress)
    except torch.OutOfMemoryError:
        raise InspectionError(
            f"{run.config.model} does not fit into the memory of {device}: use --device cpu"
        ) from None
    finally:
        run.model.cpu()


def _inspected(
    run: Trained, rows: Tensor, device: torch.device, plan: InspectionPlan, progress: OnProgress | None
) -> Inspection:
    few = rows[: -(-len(rows) // 4)]
    test, is_all = run.pool.test(run.config, plan.samples, device)
    look = _Diagnoses(
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


def _checked_point(run: Trained, look: _Diagnoses, samples: SampleBatches) -> LossAndError:
    """At the weights, where everything else begins."""
    try:
        found = look.point(samples)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise InspectionError(f"{run.config.model} does not accept the data, {run.config.data}: {error}") from error
    if not math.isfinite(found.loss):
        raise InspectionError(f"its training loss is {found.loss} at its weights: sharpness needs a finite one")
    return found


def _doubts(run: Trained, at_test: LossAndError, is_all: bool) -> list[str]:
    notes = []
    if not run.is_verified:
        notes.append("it has no receipt with a checksum of its data: the data that are here are used")
    recorded = (run.record.result or {}).get("test_accuracy")
    if is_all and isinstance(recorded, float):
        measured = 100 * (1 - at_test.error)
        if not abs(measured - recorded) <= 100 * TOLERATED:
            notes.append(
                f"its weights have a test accuracy of {measured:.2f} %, and its result has {recorded:.2f} %: "
                "they may belong to another run"
            )
    return notes


class _Diagnoses:
    """One model, its samples, and every diagnosis of them."""

    def __init__(
        self,
        model: nn.Module,
        samples: SampleBatches,
        few: SampleBatches,
        plan: InspectionPlan,
        progress: OnProgress | None,
    ) -> None:
        self.model, self.samples, self.few, self.plan = model, samples, few, plan
        self.notes: list[str] = []
        self._progress = progress

    def point(self, samples: SampleBatches) -> LossAndError:
        with Probe(self.model, samples, None, None, False, self._progress_of("loss and error"), passes=1) as probe:
            found = probe.look()
        assert found.error is not None  # these are classes
        return LossAndError(found.loss, found.error)

    def worst(self) -> list[WorstCase]:
        """Within both balls as near as can be, and where SAM, ASAM and BiSAM would go."""
        cases = [("cross entropy", adaptive, steps) for adaptive in (False, True) for steps in (1, self.plan.steps)]
        cases += [(objective, False, 1) for objective, ascent in ASCENTS.items() if ascent is not None]
        return [WorstCase(*case, self._sharpness(*case)) for case in cases]

    def average(self, *, adaptive: bool) -> Estimate:
        plan, progress = self.plan, self._progress_of("average case")
        return average_sharpness(
            self.model, self.samples, plan.rho, samples=plan.draws, adaptive=adaptive, seed=plan.seed, progress=progress
        )

    def eigenvalues(self) -> list[float]:
        plan, progress = self.plan, self._progress_of("eigenvalues")
        size = 4 * sum(param.numel() for param in self.model.parameters())
        iterations = min(plan.iterations, max(LARGEST_BASIS // size, 2 * plan.eigenvalues))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = hessian_eigenvalues(
                    self.model,
                    self.few,
                    plan.eigenvalues,
                    iterations=iterations,
                    tolerance=1e-3,
                    seed=plan.seed,
                    progress=progress,
                )
            except ValueError as error:  # the Hessian is not finite
                self.notes.append(str(error))
                return []
        self.notes += [str(warning.message) for warning in warned]
        return found

    def trace(self) -> Estimate:
        plan, progress = self.plan, self._progress_of("trace")
        return hessian_trace(self.model, self.few, samples=plan.signs, seed=plan.seed, progress=progress)

    def line(self) -> Surface:
        plan, progress = self.plan, self._progress_of("line")
        return surface(self.model, self.samples, span=plan.span, points=plan.points, seed=plan.seed, progress=progress)

    def plane(self) -> Surface:
        plan, progress = self.plan, self._progress_of("plane")
        return surface(
            self.model, self.few, span=plan.span, points=plan.grid, dimensions=2, seed=plan.seed, progress=progress
        )

    def _sharpness(self, objective: str, adaptive: bool, steps: int) -> Sharpness:
        progress = self._progress_of("worst case")
        return sharpness(
            self.model,
            self.samples,
            self.plan.rho,
            adaptive=adaptive,
            steps=steps,
            ascent=ASCENTS[objective],
            progress=progress,
        )

    def _progress_of(self, what: str) -> diagnosed.Progress | None:
        progress = self._progress
        return None if progress is None else lambda done, total: progress(what, done, total)
