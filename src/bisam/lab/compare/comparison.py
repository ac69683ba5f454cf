"""Two runs or two groups of seeds: how their configurations, results and losses around the weights differ."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch

from bisam.lab import records
from bisam.lab.compare.inspection import Inspection, InspectionPlan, OnProgress, inspect
from bisam.lab.compare.trained import Load, Trained, config_of, shared_rows, trained
from bisam.lab.config import Config, completed
from bisam.lab.methods import METHODS, uses
from bisam.lab.predicting.weights import TrainedError
from bisam.lab.records import Record
from bisam.lab.records.record import read_config
from bisam.lab.tables.cells import NUMERICS, text_of

NOT_REQUESTED = "--no-weights was given"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Change:
    """A field of the configuration that is not the same in both, as texts."""

    name: str
    a: str
    b: str


@dataclass
class Side:
    """One of the two runs, or the first of a group of seeds."""

    name: str
    """Short, and not the other's."""
    record: Record
    config: Config | None
    """None where the record has no valid one."""
    inspection: Inspection | None = None
    missing: str | None = NOT_REQUESTED
    """Why there is no inspection; None where there is one."""
    others: list[Side] = field(default_factory=list)
    """Further runs that differ from it in the seed alone."""

    @property
    def members(self) -> list[Side]:
        return [self, *self.others]

    @property
    def seed(self) -> int:
        found = self.record.config.get("seed")
        return found if isinstance(found, int) else 0

    @property
    def status(self) -> str:
        """Such as "done", "diverged", "not finished" or "not counted"."""
        if self.record.not_counted:
            return "not counted"
        return "not finished" if self.record.result is None else str(self.record.result.get("status", "unknown"))


@dataclass
class RunComparison:
    """Two runs and how they differ. Curves are in `record.metrics` of its sides, surfaces in their inspections."""

    a: Side
    b: Side
    changes: list[Change]
    notes: list[str] = field(default_factory=list)
    """Problems of the records, reasons for missing parts, and what makes the two less comparable."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    @property
    def members(self) -> list[Side]:
        """All runs of both sides."""
        return [*self.a.members, *self.b.members]


def compare(
    first: Path | Sequence[Path],
    second: Path | Sequence[Path],
    load: Load,
    device: torch.device,
    plan: InspectionPlan | None,
    progress: OnProgress | None = None,
    *,
    run_code: bool = False,
) -> RunComparison:
    """Read two run folders, and diagnose their weights as planned; without a plan, the records only.

    Instead of a folder there may be several, of runs that differ in the seed alone. A model of a Python file is made
    only if `run_code`.
    """
    ours, theirs = ([one] if isinstance(one, Path) else [*one] for one in (first, second))
    names = _names(ours[0], theirs[0])
    if len(ours) + len(theirs) > 2:
        names = _distinct([re.sub(r"-?seed\d+$", "", name) for name in names], names)
    a, b = (_group(name, folders) for name, folders in zip(names, (ours, theirs), strict=True))
    if a.name == b.name:
        raise ValueError(f"{ours[0]} and {theirs[0]} are the same run: give two runs")
    without = "seed" if a.others or b.others else None  # which the runs of a group differ in
    own = [{name: value for name, value in side.record.config.items() if name != without} for side in (a, b)]
    comparison = RunComparison(a, b, changes(*own))
    if plan is not None:
        _inspect(comparison, partial(trained, load=load, run_code=run_code), device, plan, progress)
    comparison.notes = _notes(comparison) + comparison.notes
    return comparison


def groups(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Sort runs into the two sides of a comparison: two runs, or two groups that differ in the seed alone."""
    if len(folders) == 2:
        return [folders[0]], [folders[1]]
    if len(folders) < 2:
        raise ValueError(f"give two runs to compare, or the seeds of two groups, got {len(folders)}")
    found: dict[str, list[Path]] = {}
    for folder in folders:
        side = _side("", folder)
        whole = completed(side.record.config)
        own = {name: value for name, value in whole.items() if name not in ("seed", *NUMERICS)}
        found.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(folder)
    if len(found) != 2:
        raise ValueError(
            f"the {len(folders)} runs have {len(found)} configurations, apart from their seeds: give runs of two, as "
            "in bisam compare runs/demo/noise40-sam-seed* runs/demo/noise40-sgd-seed*"
        )
    first, second = found.values()
    return first, second


def rho_of(record: Record) -> float | None:
    """The radius that a run was trained with; None for a method without one, or a record without a valid one."""
    found = record.config.get("rho")
    return float(found) if isinstance(found, (int, float)) and _is_used("rho", record.config) else None


def shared_rho(folders: Iterable[Path]) -> float | None:
    """The radius of all of these runs that perturb, if they have the same one; None also for adaptive radii.

    An adaptive radius is measured in lengths of the weights: it is no radius of the diagnoses.
    """
    found = [records.read(folder) for folder in folders]
    radii = {rho for record in found if (rho := rho_of(record)) is not None}
    names = {str(record.config.get("method")) for record in found}
    is_adaptive = any(name in METHODS and METHODS[name].is_adaptive for name in names)
    return radii.pop() if len(radii) == 1 and not is_adaptive else None


def _distinct(names: Sequence[str], otherwise: tuple[str, str]) -> tuple[str, str]:
    """
    >>> _distinct(["sam", "sam"], ("sam-seed0", "sam")), _distinct(["", "sgd"], ("seed0", "sgd"))
    (('sam-seed0', 'sam'), ('seed0', 'sgd'))
    """
    a, b = names
    return (a, b) if a and b and a != b else otherwise


def _group(name: str, folders: Sequence[Path]) -> Side:
    """The side of these runs, in the order of their seeds; ValueError if two have the same: a seed counts once."""
    first, *others = made = sorted((_side(name, folder) for folder in folders), key=lambda side: side.seed)
    for one, other in pairwise(made):
        if one.seed == other.seed:
            both = f"{one.record.folder} and {other.record.folder}"
            raise ValueError(f"{both} are runs of one side with the same seed, {one.seed}: give one of them")
    for side in others:
        side.name = f"{name}, seed {side.seed}"
    first.others = others
    return first


def changes(a: dict[str, Any], b: dict[str, Any]) -> list[Change]:
    """The fields in which two configurations differ, of those that both methods use, such as no ρ beside SGD.

    A field that an older version lacks has what that trained with.

    >>> changes({"seed": 0, "rho": 0.1}, {"seed": 0, "flip": False})
    [Change(name='rho', a='0.1', b='0.05, not recorded'), Change(name='flip', a='true, not recorded', b='false')]
    """
    ours, theirs = completed(a), completed(b)
    names = dict.fromkeys([*(one.name for one in fields(Config)), *ours, *theirs])
    return [
        Change(name, _shown(name, a, ours), _shown(name, b, theirs))
        for name in names
        if _is_used(name, ours) and _is_used(name, theirs)
        if not _is_same(ours.get(name, NOT_RECORDED), theirs.get(name, NOT_RECORDED))
    ]


def _is_used(name: str, config: dict[str, Any]) -> bool:
    method = config.get("method")
    return method not in METHODS or uses(method, name)


def _is_same(value: Any, other: Any) -> bool:
    """
    >>> nan = float("nan")
    >>> _is_same(1, 1.0), _is_same(nan, nan), _is_same(nan, 1.0), _is_same(1.0, nan)
    (True, True, False, False)
    """
    return bool(value == other) or (value != value and other != other)


def _shown(name: str, values: dict[str, Any], whole: dict[str, Any]) -> str:
    if name in values:
        return text_of(values[name])
    return f"{text_of(whole[name])}, {NOT_RECORDED}" if name in whole else NOT_RECORDED


# Reading.


def _side(name: str, folder: Path) -> Side:
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder of a run{_meant(folder.parent)}")
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: give the folder of a run")
    if not (folder / records.CONFIG).exists():
        raise ValueError(f"{folder} is not a run, it has no {records.CONFIG}: give the folder of one{_inside(folder)}")
    record = records.read(folder)
    if not record.config:
        problems: list[str] = []
        read_config(folder, problems)
        raise ValueError(f"{folder} cannot be compared: {'; '.join(problems) or 'its configuration is empty'}")
    try:
        return Side(name, record, config_of(record))
    except TrainedError as error:
        return Side(name, record, None, missing=str(error))


def _meant(folder: Path) -> str:
    return f", such as {folder}" if (folder / records.CONFIG).exists() else ""


def _inside(folder: Path) -> str:
    """A run that is in it."""
    found = next((path for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/{records.CONFIG}"))), None)
    return "" if found is None else f", such as {found.parent}"


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Short names for two folders: the parts in which their paths differ; the whole path if they do not.

    >>> _names(Path("runs/sam"), Path("runs/sam+rho=1")), _names(Path("old/sam"), Path("new/sam"))
    (('sam', 'sam+rho=1'), ('old', 'new'))
    >>> _names(Path("/disk1/runs/sam"), Path("/disk2/runs/sam"))
    ('disk1', 'disk2')
    """
    ends = Path(os.path.realpath(first)).parts, Path(os.path.realpath(second)).parts
    for count in range(1, max(map(len, ends)) + 1):
        a, b = ("/".join(parts[-count:]) for parts in ends)
        if a != b:
            return _without_common(a, b)
    return a, b


def _without_common(a: str, b: str) -> tuple[str, str]:
    """Names of folders without the words that both begin and end with.

    >>> _without_common("noise40-sam-seed0", "noise40-bisam-log-seed0")
    ('sam', 'bisam-log')
    >>> _without_common("x-sam-seed0+lr=1e-05", "x-sam-seed0+lr=1e-04")
    ('lr=1e-05', 'lr=1e-04')
    """
    words = [re.split(r"((?<![0-9]e)-|[+/])", name) for name in (a, b)]
    for _ in range(2):  # from the front, and then from the back
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False))])
        words = [parts[common:][::-1] for parts in words]
    short, other = ("".join(parts).strip("-+/") for parts in words)
    return (short, other) if short and other else (a, b)


# Weights.


def _inspect(
    comparison: RunComparison,
    read: Callable[[Record], Trained],
    device: torch.device,
    plan: InspectionPlan,
    progress: OnProgress | None,
) -> None:
    runs = [_trained(side, read) for side in comparison.members]
    shared = _shared(comparison, [run for run in runs if run is not None], plan)
    for side, run in zip(comparison.members, runs, strict=True):
        if run is None:
            continue
        rows = shared_rows([run], plan.samples) if shared is None else shared
        try:
            side.inspection = inspect(run, rows, device, plan, _named(side, progress))
            side.missing = None
        except (ValueError, OSError) as error:  # also of files that are read only now
            side.missing = str(error)


def _trained(side: Side, read: Callable[[Record], Trained]) -> Trained | None:
    try:
        return read(side.record)
    except TrainedError as error:
        side.missing = str(error)
        return None


def _shared(comparison: RunComparison, runs: Sequence[Trained], plan: InspectionPlan) -> torch.Tensor | None:
    """Samples that both were trained on, if there are enough; a note if not."""
    if len(runs) < 2:
        return None
    if len({run.pool.checksum for run in runs}) > 1:
        comparison.notes.append("They were trained on different data, and each is diagnosed on its own.")
        return None
    rows = shared_rows(runs, plan.samples)
    if len(rows) < min(plan.samples, *(len(run.rows) for run in runs)) / 2:
        comparison.notes.append("They share few training samples, and each is diagnosed on its own.")
        return None
    return rows


def _named(side: Side, progress: OnProgress | None) -> OnProgress | None:
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{side.name}: {what}", done, total)


# Notes.


def _notes(comparison: RunComparison) -> list[str]:
    notes = [f"{side.name}: {problem}." for side in comparison.members for problem in side.record.problems]
    notes += [f"{side.name}: {line}." for side in comparison.members for line in _doubts(side)]
    if not comparison.changes:
        notes.append("Their configurations are the same.")
    if all(side.inspection for side in comparison.sides):
        notes += _incomparable(comparison)
    return notes


def _doubts(side: Side) -> list[str]:
    unrecorded = [one.name for one in fields(Config) if one.name not in side.record.config]
    lines = [f"it does not record {', '.join(unrecorded)}"] if unrecorded else []
    if side.missing not in (None, NOT_REQUESTED):
        lines.append(f"its weights are not diagnosed: {side.missing}")
    return lines + (side.inspection.notes if side.inspection else [])


def _incomparable(comparison: RunComparison) -> list[str]:
    """Reasons why numbers of the same name are not comparable."""
    a, b = (side.config for side in comparison.sides)
    assert a is not None  # both have been looked at
    assert b is not None
    notes = []
    if a.model != b.model:
        notes.append("Their models differ: perturbations of one length are not comparable.")
    if a.data == b.data and (a.noise != b.noise or (a.noise and a.seed != b.seed)):
        notes.append("Their training labels differ, and so does the training loss.")
    return notes
