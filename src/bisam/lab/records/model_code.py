"""Whether runs were trained with the code that a network of one's own has now: the same layers may compute another."""

from __future__ import annotations

from pathlib import Path

from bisam.lab.records.layout import RECEIPT
from bisam.lab.records.record import read_config
from bisam.lab.records.values import read_object

KEY = "model_code"
"""Where a receipt has the digest of that code; those of older versions, and of other models, have none."""


class OtherCode(ValueError):  # noqa: N818
    """The code of a network was changed after runs in a folder were trained with it."""

    def __init__(self, code: str, folder: Path, remedy: str) -> None:
        super().__init__(
            f"{code} has changed since the runs in {folder} began, and its network may be another: {remedy}"
        )


def differ(there: object, now: object) -> bool:
    """Whether both digests are known and they are not the same."""
    return bool(there) and bool(now) and there != now


def refuse_other_code(table: Path, model: str, code: str) -> None:
    """Raise OtherCode if a run in the folder of a table was trained with other code of this model.

    `code` is the digest of what it is now; empty for a model that is not one's own.
    """
    if not code:
        return
    for path in sorted(table.glob(f"*/{RECEIPT}")):
        config, receipt = read_config(path.parent, []), read_object(path, [])
        if config.get("model") == model and differ((receipt or {}).get(KEY), code):
            raise changed(model, path.parent)


def changed(model: str, folder: Path) -> OtherCode:
    """The error for the model `file.py:function` of a run."""
    remedy = "give another folder with --runs, or undo the change"
    return OtherCode(model.rpartition(":")[0], folder, remedy)
