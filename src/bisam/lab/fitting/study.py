"""One's own data, one's own model, and several methods: from the defaults to the answer.

`Study` joins what the lab has: paired seeds and records (`bisam.lab.training`), a search of ρ (`bisam.tuning`),
differences with intervals (`bisam.lab.tables`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from bisam.lab import records, spec
from bisam.lab.config import Config, refuse_without_effect
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.sources import open_source
from bisam.lab.files import write_atomically
from bisam.lab.fitting import budget as budgets
from bisam.lab.fitting import defaults, radius
from bisam.lab.fitting import plan as plans
from bisam.lab.fitting.budget import StudySize
from bisam.lab.fitting.code import lines as lines_of_code
from bisam.lab.fitting.names import as_folder_name, short_name
from bisam.lab.fitting.own_code import code_of_network
from bisam.lab.fitting.rehearsal import Cost, is_out_of_memory, rehearse
from bisam.lab.methods import BASES, METHODS, RHOS, find_method, title_of, uses
from bisam.lab.models.pretraining import expected
from bisam.lab.predicting import beside_weights
from bisam.lab.recipes import Recipe
from bisam.lab.records import model_code
from bisam.lab.records.storage import Storage
from bisam.lab.tables import cells
from bisam.lab.tables.answer import Answer, answer
from bisam.lab.training import jobs as runs
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS, Job
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import ALONE, Ranks, unlike_fields
from bisam.lab.training.run import BuildModel, build_by_name
from bisam.lab.workers import watch
from bisam.lab.workers.watch import WorkerBackend

METHODS_OF_A_STUDY = ("base", "sam", "bisam-log")
"""What is compared where no methods are named; "base" is the base optimizer alone."""

SEEDS, REPEATS = 3, 2
CODE = "train.py"

NOT_CHANGED = {
    "data": "DATA", "model": "--model", "method": "--methods", "seed": "--seeds", "rho": "--rho",
    "recipe": "", "title": "", "row": "",
}  # fmt: skip
"""Fields of a configuration that a study sets by itself, and the option that sets each."""


def check_changes(changes: Mapping[str, str]) -> None:
    """ValueError if a field is among them that a study sets by itself."""
    for name, option in NOT_CHANGED.items():
        if name in changes:
            remedy = f"use {option} instead of --set {name}=" if option else f"remove --set {name}="
            raise ValueError(f"bisam fit sets {name} by itself: {remedy}")


@dataclass
class Study:
    """A comparison on one's own data. Its records are in a folder of its own, `root/name`."""

    source: OwnData
    model: str
    root: Path
    device: torch.device
    methods: Sequence[str] = METHODS_OF_A_STUDY
    rho: float | None = None
    """None searches it on validation data."""
    seeds: Sequence[int] | None = None
    """None is `SEEDS`, or fewer where the minutes do not suffice."""
    minutes: float | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration as text, as after --set."""
    name: str = ""
    pretrained: bool | None = None
    """Whether the defaults are those of fine-tuning; None decides by where the model is from."""
    build: BuildModel = build_by_name
    make: Callable[..., nn.Module] | None = None
    """The function that makes the network, where it has no name that could be written down."""
    ranks: Ranks = ALONE
    """With several, all of them make the same study. The first one decides, and writes into the folder."""

    def __post_init__(self) -> None:
        check_changes(self.changes)
        made = self._built()
        samples = self.source.sizes(Config(validation=self._validation))
        self.settings = defaults.settings(
            self.source.dataset, self.model, expected(made, self.model), samples, self.device,
            pretrained=self.pretrained, changes=self.changes,
        )  # fmt: skip
        self.fingerprint = hashlib.sha256(str(made).encode()).hexdigest()[:16]
        self.code = code_of_network(self.make, made) if self.make is not None else spec.code_of(self.model)
        base = self.settings.config.optimizer
        wanted = [base if method == "base" else find_method(method).name for method in self.methods]
        _refuse_other_bases(wanted, base)
        self.methods = [method for method in METHODS if method in {base, *wanted}]
        if len(self.methods) < 2:
            raise ValueError(f"a comparison needs a method beside {title_of(base)}: name some, such as sam,bisam-log")
        runs.refuse_unused(self.changes, self.methods, option="{}=" if self.make is not None else "--set {}=")
        refuse_without_effect(self.changes, self.settings.config)
        self.name = self.name or self._default_name()
        self._refuse_unlike_ranks()

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def searched(self) -> list[str]:
        """The methods whose ρ is searched."""
        return [method for method in self.methods if uses(method, "rho")] if self.rho is None else []

    def config(self, method: str, plan: plans.StudyPlan | None = None) -> Config:
        """The configuration of a method, with seed 0, as the ranks train it."""
        own = replace(
            self.settings.config, method=method, recipe=self.name, title=self.title, row=short_name(self.model)
        )
        if not uses(method, "micro_batch"):
            own = replace(own, micro_batch=None)
        own = self.ranks.adapted(own)
        if plan is None:
            return own if self.rho is None else replace(own, rho=self.rho)
        epochs, rising = plan.budget.epochs, own.warmup_epochs
        if self.minutes is not None:  # fewer epochs, with the same part of them as a warm-up
            rising = round(rising * epochs / own.epochs)
        return replace(own, epochs=epochs, warmup_epochs=rising, rho=plan.rho.get(method, own.rho))

    @property
    def title(self) -> str:
        return f"{short_name(spec.parse_data(self.source.dataset.name).place)}, {short_name(self.model)}"

    def decide(
        self,
        note: Callable[[str], None],
        progress: Callable[[str, int, int], None] | None = None,
        *,
        uncounted: str = "",
    ) -> plans.StudyPlan:
        """The plan in the folder if there is one, else a new one, which takes a few steps and the search of ρ.

        Its time is that of one run after the other. `uncounted` names what trains several at once, for the note.
        """
        plan = self.ranks.of_first(plans.read(self.folder) if self.ranks.is_first else None)
        if plan is not None:
            self._check_same(plan)
            if self.ranks.is_first:
                self._check_runs(plan)
            note(f"{self.folder / records.PLAN} has the plan: {self._described(plan)}")
        open_ = [method for method in self.methods if plan is None or (uses(method, "rho") and method not in plan.rho)]
        costs = _built_alike({method: self._cost(method) for method in open_})
        if plan is None:
            budget, lost = self.ranks.of_first(self._budget(costs, note, uncounted))
            described = self.source.described()
            plan = plans.StudyPlan(self.source.checksum, self.fingerprint, budget, lost, data=described, code=self.code)
        for method in open_:
            if uses(method, "rho"):
                self._set_rho(plan, method, costs[method], note, progress)
                if self.ranks.is_first:  # a search that is interrupted is not repeated
                    plan.save(self.folder)
        return plan

    def _cost(self, method: str) -> Cost:
        return rehearse(self.config(method), self.source, self.device, self.build, self.ranks)

    def _set_rho(
        self,
        plan: plans.StudyPlan,
        method: str,
        cost: Cost,
        note: Callable[[str], None],
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        """Put ρ of a method into the plan: the given one, or the best of a grid."""
        budget = plan.budget
        if self.rho is not None or not budget.grid:
            plan.rho[method] = self._fixed_rho(method)
            return
        grid = _thinned(self._grid(method), budget.grid)
        found = radius.search(
            self.config(method), self.source, self.device, self.build, rhos=grid,
            steps=budget.search_steps(cost.steps), repeats=budget.repeats,
            progress=None if progress is None else _labelled(progress, f"ρ of {title_of(method)}"),
            ranks=self.ranks,
        )  # fmt: skip
        plan.rho[method], plan.search[method] = found.rho, str(found).splitlines()
        note(f"ρ of {title_of(method)}: {found.rho:g}, of {', '.join(f'{rho:g}' for rho in grid)}")
        if found.edge:
            note(f"{found.edge} Set it by --rho (from Python, rho=).")

    def recipe(self, plan: plans.StudyPlan) -> Recipe:
        row = short_name(self.model)
        made = {(row, method): self.config(method, plan) for method in self.methods}
        return Recipe(self.name, self.title, None, plan.budget.seeds, made)

    def jobs(self, plan: plans.StudyPlan) -> list[Job]:
        return runs.jobs_of(self.recipe(plan), self._seeds(plan), {}, self.root, self.ranks)

    def _seeds(self, plan: plans.StudyPlan) -> Sequence[int]:
        """The given seeds, which may be more than an earlier command planned; within --minutes, the plan's."""
        seeds = range(plan.budget.seeds) if self.seeds is None else self.seeds
        return seeds if self.minutes is None else seeds[: plan.budget.seeds]

    def train(
        self,
        plan: plans.StudyPlan,
        progress: Progress,
        *,
        together: int = 1,
        checkpoint_seconds: float = SECONDS_BETWEEN_CHECKPOINTS,
        backend: WorkerBackend | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Train what is missing. Workers of a `backend` open the data and the model by their names."""
        if others := self._other_seeds(plan):
            progress.note(f"finished runs of seeds {', '.join(map(str, others))} are there too, and not compared here")
        try:
            watch.train(
                self.jobs(plan), self._opened if backend is None else open_source, backend, progress,
                device=self.device, root=self.root, storage=storage, together=together,
                checkpoint_seconds=checkpoint_seconds, build=self.build, ranks=self.ranks,
            )  # fmt: skip
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            remedy = (
                "give a smaller --together"
                if together > 1
                else f"give --batch {self.ranks.half(self.settings.config.batch)}"
            )
            raise ValueError(f"memory ran out in the training: {remedy}. Finished runs are kept") from error

    def _other_seeds(self, plan: plans.StudyPlan) -> list[int]:
        """Those of finished runs in the folder that are not of this comparison, of the same methods."""
        found = records.find_records(self.folder) if self.folder.is_dir() else []
        seeds = {one.config.get("seed") for one in found if one.result and one.config.get("method") in self.methods}
        return sorted(seed for seed in seeds - {*self._seeds(plan)} if isinstance(seed, int))

    def _opened(self, name: str, *, log: Callable[[str], None]) -> OwnData:
        """The study's data, which are read already."""
        return self.source

    def conclude(self, plan: plans.StudyPlan) -> Answer:
        """Answer from the records. Writes the best weights, and what predicting and training again need."""
        found = answer(cells.fill(self.recipe(plan), [records.read(job.folder) for job in self.jobs(plan)]))
        if found.best is not None:
            weights = found.best.record.folder / records.WEIGHTS
            if weights.is_file():
                write_atomically(self.folder / records.WEIGHTS, weights.read_bytes(), follow_links=False)
                there = found.best.record.folder / records.PREDICT  # which runs of older versions have not
                beside = (
                    there.read_bytes() if there.is_file() else beside_weights.for_run(found.best.config, self.source)
                )
                if beside is not None:
                    write_atomically(self.folder / records.PREDICT, beside, follow_links=False)
            code = lines_of_code(found.best.config) + "\n"
            write_atomically(self.folder / CODE, code.encode(), follow_links=False)
        return found

    def _refuse_unlike_ranks(self) -> None:
        """ValueError if another rank makes another study, before any of them decides anything."""
        choices = {
            "data_checksum": self.source.checksum, "layers": self.fingerprint, "name": self.name, "rho": self.rho,
            "seeds": None if self.seeds is None else list(self.seeds), "minutes": self.minutes, **self.ranks.options,
        }  # fmt: skip
        self.ranks.refuse_unlike(unlike_fields([self.config(method) for method in self.methods], choices))

    @property
    def _validation(self) -> float:
        return float(self.changes.get("validation", Config().validation))

    def _built(self) -> torch.nn.Module:
        """A model to look at."""
        with torch.random.fork_rng(devices=[]):
            config = Config(data=self.source.dataset.name, model=self.model, validation=self._validation)
            return self.build(config, self.source)

    def _budget(
        self, costs: Mapping[str, Cost], note: Callable[[str], None], uncounted: str
    ) -> tuple[StudySize, list[str]]:
        searched = {method: costs[method] for method in self.searched}
        grid = max((len(self._grid(method)) for method in searched), default=0)
        seeds = SEEDS if self.seeds is None else len(self.seeds)
        wanted = StudySize(self.settings.config.epochs, seeds, grid, REPEATS if searched else 0)
        without = f", one run after the other: it does not count {uncounted}" if uncounted else ""
        if self.minutes is None:
            note(f"this takes about {budgets.duration(wanted, costs, searched)}{without}")
            return wanted, []
        chosen = budgets.planned(wanted, costs, searched, 60 * self.minutes)
        lost = budgets.given_up(wanted, chosen)
        time = budgets.duration(chosen, costs, searched)
        note(f"for --minutes {self.minutes:g}: {', '.join(lost) or 'nothing is given up'}; about {time}{without}")
        return chosen, lost

    def _grid(self, method: str) -> tuple[float, ...]:
        is_pretrained = self.settings.config.optimizer == "adamw"
        return METHODS[method].rhos(defaults.RHOS_OF_PRETRAINED if is_pretrained else RHOS)

    def _fixed_rho(self, method: str) -> float:
        return METHODS[method].rho if self.rho is None else self.rho

    def _default_name(self) -> str:
        """Data and model, and what was chosen by options: another choice is another folder."""
        place, options = spec.parse_data(self.source.dataset.name)
        chosen = {
            **options,
            **self.changes,
        }
        for method in self.methods:
            if (micro_batch := self.config(method).micro_batch) is not None:  # of ranks that perturb by themselves
                chosen["micro_batch"] = str(micro_batch)
        if self.rho is not None:
            chosen["rho"] = f"{self.rho:g}"
        if self.pretrained not in (None, defaults.comes_pretrained(self.model)):
            chosen["pretrained"] = str(self.pretrained).lower()
        if self.minutes is not None:
            chosen["minutes"] = f"{self.minutes:g}"
        extra = "".join(f"+{key}={value}" for key, value in chosen.items())
        return as_folder_name(f"{short_name(place)}-{short_name(self.model)}{extra}")

    def _check_same(self, plan: plans.StudyPlan) -> None:
        now = {"other data": self.source.checksum, "another model": self.fingerprint}
        for what, there in (("other data", plan.data_checksum), ("another model", plan.model)):
            if there != now[what]:
                raise ValueError(
                    f"{self.folder} was trained with {what}: give another --name (from Python, runs=), or move it"
                )
        if model_code.differ(plan.code, self.code):
            place = f"the code of {self.model}" if self.make is not None else self.model.rpartition(":")[0]
            raise model_code.OtherCode(
                place, self.folder, "give another --name (from Python, runs=), or move the folder"
            )
        other = {method: rho for method, rho in plan.rho.items() if self.rho is not None and rho != self.rho}
        if other:
            raise ValueError(
                f"the plan in {self.folder} has {_listed(other)}: remove --rho, or give another --name (from Python, "
                "remove rho=, or give another runs=)"
            )
        planned, wanted = plan.budget.epochs, self.settings.config.epochs
        if "epochs" in self.changes and self.minutes is None and planned != wanted:
            raise ValueError(
                f"the plan in {self.folder} has {budgets.counted(planned, 'epoch')}, got {wanted}: give another --name "
                "(from Python, runs=)"
            )

    def _check_runs(self, plan: plans.StudyPlan) -> None:
        """ValueError if the folder has a run with other settings, such as one of rows.csv beside rows.parquet."""
        try:
            for job in self.jobs(plan):
                records.check(job.folder, job.config.as_dict())
        except records.ConfigMismatch as error:
            raise ValueError(
                f"{self.folder} has a run with another configuration, {'; '.join(error.differences)}: give another "
                "--name or --runs (from Python, runs=), or move it"
            ) from None

    def _described(self, plan: plans.StudyPlan) -> str:
        count = budgets.counted
        return f"{count(plan.budget.epochs, 'epoch')}, {count(len(self._seeds(plan)), 'seed')}, {_listed(plan.rho)}"


def _refuse_other_bases(methods: Sequence[str], base: str) -> None:
    """ValueError if another base optimizer is named than the one that all methods of a comparison use."""
    others = [method for method in methods if method in BASES and method != base]
    if others:
        raise ValueError(
            f"the methods name {others[0]}, and all of them are trained with {base} as the base optimizer: to train "
            f"with {others[0]}, give --set optimizer={others[0]} and its --lr (from Python optimizer={others[0]!r}, "
            f"lr=…); to keep {base}, name base instead of {others[0]}"
        )


def _built_alike(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The costs with the least time for building and testing: the first method also imports and decodes."""
    least = min((cost.once for cost in costs.values()), default=0.0)
    return {method: replace(cost, once=least) for method, cost in costs.items()}


def _listed(rho: Mapping[str, float]) -> str:
    """
    >>> _listed({"sam": 0.05})
    'ρ of SAM 0.05'
    """
    return ", ".join(f"ρ of {title_of(method)} {value:g}" for method, value in rho.items())


def _thinned(grid: tuple[float, ...], count: int) -> tuple[float, ...]:
    """That many values of a grid, its ends among them.

    >>> _thinned((0.01, 0.02, 0.05, 0.1, 0.2), 3)
    (0.01, 0.05, 0.2)
    """
    if count >= len(grid):
        return grid
    return tuple(grid[round(place * (len(grid) - 1) / (count - 1))] for place in range(count))


def _labelled(progress: Callable[[str, int, int], None], label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(label, done, total)
