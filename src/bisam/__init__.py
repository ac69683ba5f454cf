"""Sharpness-aware training for PyTorch, built around BiSAM: each player has its own objective."""

from bisam import compat, diagnostics, objectives
from bisam.capture import capture, capture_together
from bisam.criterion import Criterion, Telemetry
from bisam.objectives import CrossEntropy, LowerBound, bound, lower_bound, zero_one_error
from bisam.optimizer import SharpnessAware
from bisam.perturbation import Ball, Perturbation
from bisam.tuning import RhoSweep, find_rho
from bisam.variants import ASAM, ESAM, GSAM, KSAM, RSAM, SAM, ABiSAM, BiSAM, EBiSAM, FriendlySAM, LookSAM

__version__ = "0.1.0"

__all__ = [
    "ASAM",
    "ESAM",
    "GSAM",
    "KSAM",
    "RSAM",
    "SAM",
    "ABiSAM",
    "Ball",
    "BiSAM",
    "Criterion",
    "CrossEntropy",
    "EBiSAM",
    "FriendlySAM",
    "LookSAM",
    "LowerBound",
    "Perturbation",
    "RhoSweep",
    "SharpnessAware",
    "Telemetry",
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
