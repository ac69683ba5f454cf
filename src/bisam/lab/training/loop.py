"""The training loop: `train` and `_epoch`, to be read from top to bottom."""

from __future__ import annotations

import shutil
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bisam.capture import CapturedSteps, capture_together
from bisam.lab.config import Config
from bisam.lab.data.sources import Source
from bisam.lab.methods import passes
from bisam.lab.models import FOR_ROWS, MODELS
from bisam.lab.predicting import beside_weights
from bisam.lab.records import (
    ConfigMismatch,
    RunFolder,
    RunInUse,
    check_result,
    checkpoint,
    config_differences,
    model_code,
)
from bisam.lab.records.metrics import is_epoch
from bisam.lab.records.receipt import receipt, timestamp
from bisam.lab.spec import TIMM, parse_model
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import ALONE, Ranks, is_of_collective
from bisam.lab.training.run import BuildModel, TrainingRun, build_by_name

SECONDS_BETWEEN_CHECKPOINTS = 20.0

LARGEST_SHARE_OF_SAVING = 0.05
"""Of the time of a training: saving several large models takes seconds, a good part of the default's twenty."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal stopped the training. Every run is saved, and the same command resumes it."""


@dataclass
class Job:
    """A run to train: its configuration and its folder."""

    config: Config
    folder: Path


@dataclass(eq=False)
class ActiveRun:
    """A run in progress, and the epoch and batch that it has reached."""

    training: TrainingRun
    run: RunFolder
    epoch: int = 0
    batch: int = 0
    receipts: list[dict[str, Any]] = field(default_factory=list)
    """One for each process that trained it, this one last; receipts that differ only in their date count as one."""

    @property
    def is_over(self) -> bool:
        return self.batch == 0 and (self.epoch >= self.training.config.epochs or self.training.diverged)


def train(
    jobs: Sequence[Job],
    source: Source,
    device: torch.device,
    progress: Progress,
    stopping: Sequence[str] = (),
    *,
    together: int | None = None,
    checkpoint_seconds: float = SECONDS_BETWEEN_CHECKPOINTS,
    build: BuildModel = build_by_name,
    ranks: Ranks = ALONE,
) -> list[RunInUse]:
    """Train these runs, `together` at a time (default: all): they step in one CUDA graph, each in its own epoch.

    Their epochs must have the same number of batches. When a run ends, the next one takes its place. Each resumes from
    its last checkpoint, if it has one, and writes its result into its folder; finished runs are skipped. Checkpoints
    are `checkpoint_seconds` apart or more, so that saving takes at most a twentieth of the time; 0 saves after every
    epoch. When `stopping` gets a name (see `signals`), all are saved and `Stopped` is raised.

    With several `ranks`, all of them call this with the same jobs. The first one decides, and writes the records; the
    others have folders of their own, which are not kept.

    Returns a RunInUse for each run that another process trains; these are skipped.
    """
    waiting, active = deque(jobs), list[ActiveRun]()
    stepping, step = list[ActiveRun](), None
    elsewhere: list[RunInUse] = []
    now = {**receipt(), **ranks.described()}
    saved, pause = time.monotonic(), checkpoint_seconds
    if source.notes:
        now["data_notes"] = list(source.notes)

    def stopped() -> bool:
        return ranks.any(bool(stopping))

    def save() -> None:
        _save(active, source.checksum)
        for one in active:
            progress.saved(one.training.config)

    with ExitStack() as stack:
        stack.enter_context(numerics(jobs[0].config))
        while waiting or active:
            stop = stopped()
            try:
                while waiting and len(active) < (together or len(jobs)) and not stop:
                    job = waiting.popleft()
                    active += _admitted(job, source, device, stack, now, progress, elsewhere, build, ranks)
                if _leave(active, source, progress):
                    stepping, step = [], None  # they hold memory of the finished runs
                    continue
            except BaseException:
                if ranks.is_first and not ranks.shard:  # others may not be here to give their parts
                    save()  # no run is within a step here
                raise
            if stop or ranks.of_first(time.monotonic() - saved > pause):
                began = time.monotonic()
                save()
                saved = time.monotonic()
                pause = _pause(checkpoint_seconds, saved - began)
            if stop:
                raise _stopped(active, stopping)
            if not active:  # other processes have finished what was waiting
                continue
            if step is None or stepping != _runs_to_step(active):
                stepping = _runs_to_step(active)
                step = steps_of([one.training for one in stepping], progress.note)
                progress.begin({one.training.config: one.epoch for one in stepping}, len(stepping[0].training.batches))
            _epoch(stepping, step, progress, stopped)
    return elsewhere


def _pause(least: float, saving: float) -> float:
    """Seconds from a checkpoint that took `saving` to the next one. With least = 0 every epoch ends with one.

    >>> _pause(20, 0.1), _pause(20, 10), _pause(0, 10)
    (20, 200.0, 0)
    """
    return max(least, saving / LARGEST_SHARE_OF_SAVING) if least else 0


def _stopped(active: Sequence[ActiveRun], stopping: Sequence[str]) -> Stopped:
    """The exception with the signal's name and the place where the same command resumes."""
    where = f"in epoch {max(one.epoch for one in active) + 1}" if active else "between two runs"
    name = stopping[0] if stopping else "a signal to another rank"
    return Stopped(f"stopped by {name} {where}: the same command resumes there")


def _admitted(
    job: Job, source: Source, device: torch.device, stack: ExitStack, now: dict[str, Any], progress: Progress,
    elsewhere: list[RunInUse], build: BuildModel, ranks: Ranks,
) -> list[ActiveRun]:  # fmt: skip
    """The run, resumed; empty if another process trains it or has finished it."""
    training = TrainingRun(job.config, source, device, build, ranks)
    now = {**now, "kernels": training.kernels, **({model_code.KEY: training.code} if training.code else {})}
    if not ranks.is_first:
        return _following(
            ActiveRun(training, stack.enter_context(RunFolder.open(job.folder, job.config.as_dict()))), now
        )
    model_code.refuse_other_code(job.folder.parent, job.config.model, training.code)  # it may change at any time
    try:
        run = stack.enter_context(RunFolder.open(job.folder, job.config.as_dict()))
    except RunInUse as error:
        elsewhere.append(error)
        ranks.of_first(None)
        return []
    check_result(job.folder, run.result)
    if run.result is None:
        return [_resumed(ActiveRun(training, run), source.checksum, now, progress)]
    run.close()
    ranks.of_first(None)
    return []


def _following(one: ActiveRun, now: dict[str, Any]) -> list[ActiveRun]:
    """The same run in another rank than the first, which sends where it is; empty if that skips it."""
    state = one.training.ranks.of_first(None)
    if state is None:
        one.run.close()
        return []
    one.receipts = [now]
    if state:
        one.epoch, one.batch = state["epoch"], state["batch"]
        with _fitting(one, "the first rank's checkpoint"):
            one.training.load(state["training"])
    return [one]


def _runs_to_step(active: Sequence[ActiveRun]) -> list[ActiveRun]:
    """The runs that step now: those furthest within their epoch, until all are between two epochs."""
    furthest = max(one.batch for one in active)
    return [one for one in active if one.batch == furthest]


def _leave(active: list[ActiveRun], source: Source, progress: Progress) -> bool:
    """Write the results of the runs that ended, and remove them from `active`. Returns whether there were any."""
    ended = [one for one in active if one.is_over]
    for one in ended:
        _finish(one, progress, source)
        active.remove(one)
    return bool(ended)


def _epoch(stepping: Sequence[ActiveRun], step: CapturedSteps, progress: Progress, stopped: Callable[[], bool]) -> None:
    """Train to the end of the epoch that each of them is in, or until it is stopped."""
    first = stepping[0].batch
    for one in stepping:
        one.training.begin_epoch(one.epoch)
    began = time.monotonic()
    batches = zip(*(one.training.batches.epoch(one.epoch, start=first) for one in stepping), strict=True)
    for number, batch in enumerate(batches, start=first + 1):
        for one in stepping:
            one.training.begin_step(one.epoch, number - 1)
        step(batch)
        progress.step(number)
        if stopped():
            _clock(stepping, began)
            for one in stepping:
                one.batch = number
            return
    _clock(stepping, began)
    alike = len({(one.training.config.model, _passes(one)) for one in stepping}) == 1
    for one in stepping:
        metrics = one.training.end_epoch(one.epoch, together=len(stepping), alike=alike)
        one.run.metrics.append(metrics)
        one.epoch, one.batch = one.epoch + 1, 0
        progress.epoch(one.training.config, one.run.folder, metrics)


def _passes(one: ActiveRun) -> float:
    """What a step of its epoch costs: those before `start` are plain."""
    config = one.training.config
    return passes(config, one.epoch / config.epochs, (one.epoch + 1) / config.epochs)


def steps_of(runs: Sequence[TrainingRun], note: Callable[[str], None]) -> CapturedSteps:
    """One call that steps every run, captured where possible. `note` gets the reasons where it is not, on a GPU."""
    trainings = {training.optimizer: training for training in runs}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = capture_together(
            [*trainings],
            generators=[training.generator for training in trainings.values()],
            after=lambda optimizer: trainings[optimizer].add_up(),
        )
    if any(not is_captured(training.config) for training in runs):
        steps.eager_because = steps.eager_because or "a model from elsewhere may wait for the device within a step"
    if runs[0].device.type == "cuda":
        for warning in caught:
            note(str(warning.message))
    return steps


def is_captured(config: Config) -> bool:
    """Whether steps of this model are captured: those of transformers and of one's own may wait for the device."""
    return parse_model(config.model).source == TIMM or config.model in (*MODELS, *FOR_ROWS)


def _resumed(one: ActiveRun, checksum: str, now: dict[str, Any], progress: Progress) -> ActiveRun:
    """Resume from the last checkpoint whose epochs have all their lines of metrics; else from the last, if any."""
    loaded = checkpoint.load(one.run.checkpoints, lambda state: one.run.metrics.lacks(_epoch_of(state)))
    for note in [*one.run.notes, *(loaded.notes if loaded else ())]:
        progress.note(f"{one.run.folder.name}: {note}")
    if loaded is None:
        lost = one.run.metrics.rewind(0)
        if lost:
            progress.note(f"{one.run.folder.name} has no checkpoint and starts over; it had {lost} lines of metrics")
        one.receipts = [now]
        one.training.ranks.of_first({})
        return one
    before = loaded.state.get("receipts", [{"commit": "unknown"}])
    _check_same(one, loaded.state, checksum)
    if any(model_code.differ(old.get(model_code.KEY), one.training.code) for old in before):
        raise model_code.changed(one.training.config.model, one.run.folder)
    one.epoch, one.batch = loaded.state["epoch"], loaded.state["batch"]
    with _fitting(one, str(loaded.path)):
        if one.epoch > one.training.config.epochs or one.batch > len(one.training.batches):
            raise ValueError(f"the run has no epoch {one.epoch} with a batch {one.batch}")
        whole = loaded.state["training"]
        outline = one.training.held.outline(whole)
        one.training.ranks.of_first({"epoch": one.epoch, "batch": one.batch, "training": outline})
        different = one.training.load(whole)
    one.run.metrics.rewind(one.epoch)
    one.receipts = [*(old for old in before if {**old, "date": None} != {**now, "date": None}), now]
    where = f"{one.run.folder.name} resumes at epoch {one.epoch + 1}, batch {one.batch + 1}"
    progress.note(f"{where}; {different}" if different else where)
    return one


@contextmanager
def _fitting(one: ActiveRun, name: str) -> Iterator[None]:
    """Raise CheckpointError for any error of loading a state into a run."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:  # torch raises any of them
        if is_of_collective(error):
            raise
        raise checkpoint.CheckpointError(
            f"{name} does not fit the run: {str(error).splitlines()[0]:.200}. It may be of another version: "
            f"remove {one.run.checkpoints} to start over."
        ) from error


def _epoch_of(state: dict[str, Any]) -> int:
    """The epoch of a state; ValueError if `_save` did not write it."""
    epoch, receipts = state.get("epoch"), state.get("receipts", [])
    is_ours = (
        is_epoch(epoch)
        and is_epoch(state.get("batch"))
        and all(isinstance(state.get(name), dict) for name in ("config", "training"))
        and "checksum" in state
        and isinstance(receipts, list)
        and all(isinstance(one, dict) for one in receipts)
    )
    if not is_ours:
        raise ValueError("it is not a checkpoint of a training")
    assert is_epoch(epoch)
    return epoch


def _check_same(one: ActiveRun, state: dict[str, Any], checksum: str) -> None:
    """Raise ConfigMismatch if the checkpoint belongs to another run or other data."""
    there, now = {**state["config"], "data": state["checksum"]}, {**one.training.config.as_dict(), "data": checksum}
    found = config_differences(there, now)
    if found:
        raise ConfigMismatch(one.run.checkpoints, found)


def _save(active: Sequence[ActiveRun], checksum: str) -> None:
    for one in active:
        steps = one.epoch * len(one.training.batches) + one.batch
        config, point = one.training.config.as_dict(), {"epoch": one.epoch, "batch": one.batch}
        state = {"config": config, "checksum": checksum, **point, "receipts": one.receipts}
        whole = {**state, "training": one.training.state()}
        if one.training.ranks.is_first:
            checkpoint.save(one.run.checkpoints, steps, whole)


def _tested(one: ActiveRun) -> dict[str, float | None]:
    """Test accuracies of the best weights and, named `last_…`, of the last ones; the same weights are tested once."""
    training = one.training
    best = None if training.best.weights is None else training.test_accuracies()
    is_last = training.best.epoch == one.epoch - 1
    last = best if best is not None and is_last else training.last_test_accuracies()
    return {**(best or {"test_accuracy": None}), **{f"last_{name}": value for name, value in last.items()}}


def _finish(one: ActiveRun, progress: Progress, source: Source) -> None:
    """Write result, receipt and weights, and remove the checkpoints."""
    training = one.training
    result = {
        "status": "diverged" if training.diverged else "done",
        "epochs": one.epoch,
        "best_epoch": training.best.epoch,
        "validation_accuracy": training.best.accuracy,
        **training.best.others,
        **_tested(one),
        "seconds": training.seconds,
    }
    if training.best.weights:
        one.run.save_weights(training.best.weights)
        if (beside := beside_weights.for_run(training.config, source, training.code)) is not None:
            one.run.save_for_prediction(beside)
    *earlier, own = one.receipts  # made when the process began: the code on disk may have changed since
    whole = {**own, "date": timestamp(), "data_checksum": source.checksum, "seconds": training.seconds}
    one.run.finish(result, {**whole, "earlier": earlier} if earlier else whole)
    shutil.rmtree(one.run.checkpoints, ignore_errors=True)
    one.run.close()
    progress.finish(training.config, result)


@contextmanager
def numerics(config: Config) -> Iterator[None]:
    """cuDNN's choice of algorithms: the fastest, or those that give the same bits in every process."""
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not config.deterministic, config.deterministic
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


@contextmanager
def signals() -> Iterator[list[str]]:
    """A list that SIGTERM and Ctrl-C append their names to; the loop reads it after every step."""
    names: list[str] = []

    def record(number: int, _: FrameType | None) -> None:
        names.append(signal.Signals(number).name)
        if len(names) > 2:  # the third Ctrl-C stops at once
            raise KeyboardInterrupt

    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    is_lost = False
    try:
        yield names
    except RuntimeError as error:
        is_lost = is_of_collective(error)  # torchrun sends SIGTERM then, which must not come before the message
        raise
    finally:
        for number, handler in before.items():
            if not is_lost:
                signal.signal(number, handler)


def _clock(active: Sequence[ActiveRun], began: float) -> None:
    """Add the time since `began` to the epoch's seconds, after synchronizing the device."""
    if active[0].training.device.type == "cuda":
        torch.cuda.synchronize(active[0].training.device)
    for one in active:
        one.training.epoch_seconds += time.monotonic() - began
