"""What was decided before a training began, in a file beside its runs: the same command reads it and resumes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bisam.lab.files import read_file, write_atomically
from bisam.lab.fitting.budget import StudySize
from bisam.lab.records import PLAN

FORMAT = 1
LARGEST = 2**20


@dataclass
class StudyPlan:
    """The budget, ρ of each method, and what it was decided for."""

    data_checksum: str
    model: str
    """A digest of the model's layers."""
    budget: StudySize
    given_up: list[str] = field(default_factory=list)
    rho: dict[str, float] = field(default_factory=dict)
    search: dict[str, list[str]] = field(default_factory=dict)
    """The tables of the searches, by method, line by line."""
    data: list[str] = field(default_factory=list)
    """What was read, line by line: samples, classes, columns, and what was assumed or left out."""
    code: str = ""
    """A digest of the code of a network of one's own: of its file, or of its function and classes."""

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, indent=1)
        write_atomically(folder / PLAN, text.encode() + b"\n", follow_links=False)


def read(folder: Path) -> StudyPlan | None:
    """None if there is none; ValueError for a file that is not one."""
    path = folder / PLAN
    try:
        values: Any = json.loads(read_file(path, LARGEST))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        if values.pop("format") != FORMAT:
            raise ValueError("it is of another version")
        return StudyPlan(**{**values, "budget": StudySize(**values["budget"])})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it, and the plan is made anew") from error
