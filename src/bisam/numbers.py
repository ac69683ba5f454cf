"""Checks of numbers that options take. Each returns the number or raises with its name and what was given."""

from __future__ import annotations

import math
import numbers
from typing import Any


def is_number(value: Any) -> bool:
    """Whether this is a real number, NumPy's included; bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_of_numpy(value: Any) -> bool:
    """Whether this is one of NumPy's numbers. A tensor is none."""
    return isinstance(value, numbers.Number) and hasattr(value, "item")


def is_whole(value: Any, *, least: int) -> bool:
    return is_number(value) and isinstance(value, numbers.Integral) and int(value) >= least


def is_count(value: Any) -> bool:
    return is_whole(value, least=1)


def non_negative(name: str, value: Any) -> float:
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be non-negative and finite, got {value}")
    return float(value)


def positive(name: str, value: Any) -> float:
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return float(value)


def count(name: str, value: Any, of: str) -> int:
    """A whole number, at least 1, of samples or steps."""
    if not is_count(value):
        raise ValueError(f"{name} must be a whole number of {of}, at least 1, got {value!r}")
    return int(value)


def fraction(name: str, value: Any, *, zero: bool) -> float:
    """A number in [0, 1) or, without zero, in (0, 1]."""
    if not (is_number(value) and (0 <= value < 1 if zero else 0 < value <= 1)):
        raise ValueError(f"{name} must lie in {'[0, 1)' if zero else '(0, 1]'}, got {value!r}")
    return float(value)
