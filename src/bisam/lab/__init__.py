"""The outer ring: data, models, recipes, training, records and reports. `fit` and `load` are its use from Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bisam.lab.fitting.notebook import fit
    from bisam.lab.predicting.predictor import load

__all__ = ["fit", "load"]

_MODULES = {"fit": "bisam.lab.fitting.notebook", "load": "bisam.lab.predicting.predictor"}


def __getattr__(name: str) -> Any:
    """They are imported when they are used: the commands of the paper's tables do not need them."""
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "bisam").split(".")[0]
            if missing == "bisam":
                raise
            raise ModuleNotFoundError(
                f"bisam.lab needs {missing}, which is not installed: pip install 'bisam[lab]'", name=missing
            ) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
