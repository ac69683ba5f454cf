"""Arrays, tensors, data frames and lists of texts in memory, as the inputs and labels of samples."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bisam.lab.data import columns
from bisam.lab.data.images import DataError
from bisam.lab.data.own_dataset import Kind
from bisam.lab.data.table_columns import as_table, has_columns


def refuse_other_index(x: Any, y: Any, where: str) -> None:
    """DataError if x and y are of pandas and their rows have other names: a row would have the label of another."""
    of_x: Any = getattr(x, "index", None)  # of a list it is a method
    of_y: Any = getattr(y, "index", None)
    if not (hasattr(of_x, "equals") and hasattr(of_y, "equals")) or len(of_x) != len(of_y) or of_x.equals(of_y):
        return
    found, remedy = "another index than x", "the labels of these rows"
    if {*of_x} == {*of_y}:
        found, remedy = "the index of x in another order", "y.loc[x.index]"
    raise DataError(
        f"{where}: y has {found}: give {remedy}, or y.to_numpy() if its labels are in the order of the rows of x"
    )


def refuse_labels_among_inputs(x: Any, y: Any, where: str) -> None:
    """DataError if x is a data frame that still has the column y: every network would read its labels there."""
    name = getattr(y, "name", None)
    if (
        has_columns(x)
        and isinstance(name, str)
        and name in x.columns
        and type(x[name]) is type(y)
        and x[name].equals(y)
    ):
        raise DataError(f"{where}: x still has the labels, in its column {name!r}: give x.drop(columns={name!r})")


def label_values(y: Any, where: str) -> list[Any]:
    """One label for each sample, from an array with one axis, or a second one of length 1."""
    if not isinstance(y, (Tensor, np.ndarray)):
        return list(y)
    if y.ndim > 1 and y.shape[1:] != (1,) * (y.ndim - 1):
        raise DataError(
            f"{where}: labels of shape {tuple(y.shape)}, and each sample has one class: of one-hot labels give "
            "y.argmax(1)"
        )
    return y.reshape(-1).tolist()


def inputs_of(x: Any, where: str) -> tuple[Kind, Any]:
    """The kind of arrays, tensors, data frames or lists of texts, and their values as `DataSplit` has them."""
    if isinstance(x, (list, tuple)) and len(x) and all(isinstance(one, str) for one in x):
        return "text", [(one,) for one in x]
    if isinstance(x, (list, tuple)) and len(x) and isinstance(x[0], tuple) and isinstance(x[0][0], str):
        return "text", list(x)
    if has_columns(x):
        return "rows", columns.values(as_table(x), "rows", as_table(x).column_names, where, Path())
    found = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(_array(x, where)))
    if found.dtype == torch.uint8 and found.ndim in (3, 4):
        return "image", _pixels(found, where)
    if found.ndim < 2:
        raise DataError(
            f"{where}: inputs of shape {tuple(found.shape)}: give rows of numbers (N, F) or images (N, H, W)"
        )
    numbers = found.float()
    if not bool(torch.isfinite(numbers).all()):
        raise DataError(f"{where}: some inputs are not finite numbers: fill them in, or remove their rows")
    return "rows", numbers


def _array(x: Any, where: str) -> np.ndarray[Any, Any]:
    found = np.asarray(x)
    if found.dtype.kind not in "biuf":
        raise DataError(f"{where}: inputs of type {found.dtype}: give numbers, uint8 images, or a list of texts")
    return found.astype(np.float32) if found.dtype.kind in "bf" or found.dtype != np.uint8 else found


def _pixels(found: Tensor, where: str) -> Tensor:
    """uint8 (N, 3, H, W) from (N, H, W), (N, C, H, W) or (N, H, W, C) with one or three channels."""
    if found.ndim == 3:
        found = found.unsqueeze(1)
    elif found.shape[1] not in (1, 3) and found.shape[3] in (1, 3):
        found = found.permute(0, 3, 1, 2)
    if found.shape[1] not in (1, 3):
        raise DataError(f"{where}: images of shape {tuple(found.shape[1:])}: give one or three channels")
    return found.expand(-1, 3, -1, -1).contiguous()


def load_npz(path: Path) -> dict[str, Any]:
    """Its arrays; X_train and x_train are the same name, unless it has both."""
    try:
        with path.open("rb") as raw:  # which numpy leaves open where it is broken
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it has one array without a name")
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read as .npz ({error}): write it with numpy.savez(path, x=…, y=…)"
        ) from error
    in_lower_case = {name.lower(): array for name, array in arrays.items()}
    return in_lower_case if len(in_lower_case) == len(arrays) else arrays
