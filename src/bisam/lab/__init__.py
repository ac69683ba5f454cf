"""The outer ring: data, models, recipes, training, records and reports. `fit` is its use from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bisam.lab.fitting.notebook import fit

__all__ = ["fit"]


def __getattr__(name: str) -> Any:
    """`fit` is imported when it is used: the commands of the paper's tables do not need it."""
    if name == "fit":
        try:
            from bisam.lab.fitting.notebook import fit
        except ModuleNotFoundError as error:
            missing = (error.name or "bisam").split(".")[0]
            if missing == "bisam":
                raise
            raise ModuleNotFoundError(
                f"bisam.lab needs {missing}, which is not installed: pip install 'bisam[lab]'", name=missing
            ) from None
        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
