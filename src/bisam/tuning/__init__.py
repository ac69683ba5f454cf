"""Which ρ? `find_rho` trains a short while with each of a few, on one's own model and data, and compares."""

from bisam.tuning.search import find_rho
from bisam.tuning.verdict import RhoPoint, RhoSweep

__all__ = ["RhoPoint", "RhoSweep", "find_rho"]
