"""Groups of options that several commands share: a command has one parameter for each, and typer sees the options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import torch
import typer

from bisam.lab.cli.options import Runs
from bisam.lab.training.progress import Tracker
from bisam.lab.training.ranks import Ranks, joined
from bisam.lab.training.trackers import trackers
from bisam.lab.workers.backends import backend_of
from bisam.lab.workers.watch import WorkerBackend


class OptionGroup:
    """The options of a dataclass, as one parameter of a command: see `with_groups`."""


@dataclass(frozen=True)
class Where(OptionGroup):
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to train.")] = "auto"
    together: Annotated[int, typer.Option(min=1, help="Runs that train at once, in one CUDA graph.")] = 1


@dataclass(frozen=True)
class Tracking(OptionGroup):
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves for TensorBoard beside the runs.")
    ] = False
    track: Annotated[
        str | None, typer.Option(metavar="wandb|trackio", help="Send curves there, if it is installed.")
    ] = None

    def trackers(self, root: Runs, where: Where, spread: WorkerBackend | None, ranks: Ranks) -> list[Tracker]:
        """Those of the first rank; the others have none."""
        at_once = where.together if spread is None else max(where.together, 2)
        if not ranks.is_first:
            return []
        return [*trackers(root.folder, tensorboard=self.tensorboard, service=self.track, together=at_once)]


@dataclass(frozen=True)
class UnderTorchrun(OptionGroup):
    perturb: Annotated[
        str,
        typer.Option(
            metavar="rank|global",
            help="Under torchrun: each rank by its own gradient, or all ranks alike.",
            show_default="rank; global with --shard",
        ),
    ] = ""
    sync_batchnorm: Annotated[
        bool, typer.Option("--sync-batchnorm", help="Under torchrun: batch norm over the samples of all ranks.")
    ] = False
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: FSDP2, each rank holds a part of the model.")
    ] = False

    def joined(self, device: torch.device) -> AbstractContextManager[Ranks]:
        return joined(device, perturb=self.perturb, sync_batchnorm=self.sync_batchnorm, shard=self.shard)


@dataclass(frozen=True)
class Spread(OptionGroup):
    on: Annotated[
        str,
        typer.Option(
            metavar="local|ray[=ADDRESS]", help="Train in processes here, one for each GPU, or on a Ray cluster."
        ),
    ] = ""
    workers: Annotated[
        int | None, typer.Option(help="Processes that train at once.", show_default="one for each GPU")
    ] = None
    gpus_per_run: Annotated[
        float | None,
        typer.Option(metavar="PART", help="With --on ray: part of a GPU for a run.", show_default="1 / --together"),
    ] = None
    retries: Annotated[int, typer.Option(help="How often a worker that died is started again, for each task.")] = 2

    def backend_of(self, where: Where, root: Runs) -> WorkerBackend | None:
        """Where the runs train; None is this process."""
        return backend_of(
            self.on, workers=self.workers, gpus_per_run=self.gpus_per_run, retries=self.retries, device=where.device,
            together=where.together, stored=root.storage is not None,
        )  # fmt: skip


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer is to see it: with the options of its groups in the place of the groups.

    >>> def train(name: str, *, where: Where) -> None:
    ...     print(name, where)
    >>> with_groups(train)(name="demo", device="cpu", together=2)
    demo Where(device='cpu', together=2)
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, OptionGroup)}
    own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{option.name: values.pop(option.name) for option in _options_of(group)})
        command(**values)

    shown: list[inspect.Parameter] = []
    for parameter in own:
        group = groups.get(parameter.name)
        shown += [parameter.replace(annotation=hints[parameter.name])] if group is None else _options_of(group)
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _options_of(group: type[OptionGroup]) -> Iterable[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)  # type: ignore[arg-type]
    ]
