"""How samples are read from a table, in values that a file of JSON keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bisam.lab.data.table_columns import TableInputs


@dataclass(frozen=True)
class TableReading:
    """What the columns of a table become, and which one is the label."""

    inputs: TableInputs | tuple[str, ...]
    """What was learnt from the columns of rows; the names of those of texts or images."""
    label: str | None = None
    """None for data frames, whose labels are given apart."""

    @property
    def names(self) -> list[str]:
        """Columns that are read."""
        if isinstance(self.inputs, TableInputs):
            return [column.name for column in self.inputs.columns]
        return [*self.inputs]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the inverse.

        >>> TableReading(("review",), "stars").as_dict()
        {'inputs': ['review'], 'label': 'stars'}
        """
        inputs = self.inputs.as_dict() if isinstance(self.inputs, TableInputs) else [*self.inputs]
        return {"inputs": inputs, "label": self.label}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TableReading:
        """ValueError, TypeError or KeyError for what `as_dict` does not return."""
        inputs, label = values["inputs"], values["label"]
        if not isinstance(label, (str, type(None))) or not isinstance(inputs, (dict, list)) or not inputs:
            raise ValueError("it does not name the columns of a table")
        if isinstance(inputs, dict):
            return TableReading(TableInputs.from_dict(inputs), label)
        if not all(isinstance(name, str) for name in inputs):
            raise ValueError("a column has no name")
        return TableReading(tuple(inputs), label)
