"""Sharpness-aware training for PyTorch, built around BiSAM: each player has its own objective."""

from bisam import compat, diagnostics, objectives
from bisam.capture import capture, capture_together
from bisam.engine.criterion import Criterion
from bisam.engine.optimizer import SharpnessAware
from bisam.engine.telemetry import Telemetry
from bisam.integrations import callers as _callers  # noqa: F401  (checks who calls `step`)
from bisam.merge import Merge
from bisam.objectives import CrossEntropy, LowerBound, bound, lower_bound, zero_one_error
from bisam.perturbation import Around, Ball, Perturbation
from bisam.plan import Batch, Plan
from bisam.tensors.buckets import Bucket
from bisam.tensors.memory import Memory
from bisam.tuning import RhoSweep, find_rho
from bisam.variants import (
    ASAM,
    ESAM,
    GSAM,
    KSAM,
    MSAM,
    RSAM,
    SAM,
    WSAM,
    ABiSAM,
    BiSAM,
    EBiSAM,
    FisherSAM,
    FriendlySAM,
    LookSAM,
    VaSSO,
)

__version__ = "0.2.0"

__all__ = [
    "ASAM",
    "ESAM",
    "GSAM",
    "KSAM",
    "MSAM",
    "RSAM",
    "SAM",
    "WSAM",
    "ABiSAM",
    "Around",
    "Ball",
    "Batch",
    "BiSAM",
    "Bucket",
    "Criterion",
    "CrossEntropy",
    "EBiSAM",
    "FisherSAM",
    "FriendlySAM",
    "LookSAM",
    "LowerBound",
    "Memory",
    "Merge",
    "Perturbation",
    "Plan",
    "RhoSweep",
    "SharpnessAware",
    "Telemetry",
    "VaSSO",
    "bound",
    "capture",
    "capture_together",
    "compat",
    "diagnostics",
    "find_rho",
    "lower_bound",
    "objectives",
    "zero_one_error",
]
