"""`capture` and `capture_together`: when a step is recorded as a graph, replayed, or run eagerly."""

from __future__ import annotations

import gc
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bisam.capture.failures import explained, first_of, let_draw_again
from bisam.capture.recording import Branch, Counter, Recording, copied, shape_of
from bisam.engine.optimizer import SharpnessAware

__all__ = ["CapturedStep", "CapturedSteps", "capture", "capture_together"]

WARMUP_OF_RANKS = 11
"""Eager steps of several processes: DistributedDataParallel lays out its buckets and times its first ten passes."""

MOST_GRAPHS = 8
"""Shapes, and kinds of steps, that have a graph of their own; what is seen after them runs eagerly."""


def capture(
    optimizer: SharpnessAware,
    closure: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    generator: torch.Generator | None = None,
    after: Callable[[SharpnessAware], Any] | None = None,
) -> CapturedStep:
    """A function that takes `(x, y)` and does what `optimizer.minimize(x, y)` does, as one CUDA graph.

    Args:
        optimizer: any variant. Its model may be compiled: call `model.compile()` first, in its default mode.
        closure: instead of `minimize`, what to run in both passes: called with a batch, it computes
            `optimizer.criterion(…)`, calls `backward` on it and returns it. It must not wait for the device.
        warmup: steps to run eagerly before the first capture.
        generator: the source of dropout's random numbers, on the model's device, instead of torch's own. Nothing else
            then draws from it, and a checkpoint can hold its state.
        after: called with the optimizer at the end of each step, inside the graph. Use it to add telemetry, in place,
            to sums that stay on the device; this costs no launch.

    The base optimizer's update runs in its fused form, or else its foreach form. A batch of another shape gets its own
    graph the second time it comes. `optimizer.telemetry` is that of the last step until the next one begins.

    Under DistributedDataParallel with NCCL the collectives are recorded too: see docs/scaling.md for the requirements.
    """
    return CapturedStep(CapturedSteps([Branch(optimizer, closure, generator, after)], warmup))


def capture_together(
    optimizers: Sequence[SharpnessAware],
    *,
    warmup: int = 3,
    generators: Sequence[torch.Generator] | None = None,
    after: Callable[[SharpnessAware], Any] | None = None,
) -> CapturedSteps:
    """A function that takes a batch for each optimizer and does one step of each, in parallel branches of one graph.

    The trainings share only the device: each computes what it computes alone. Small models, which leave most of a large
    GPU idle, train several times as fast together. With `generators`, each draws its dropout from its own generator.
    `after` is called with each optimizer, as in `capture`.

    Examples:
        >>> models = [torch.nn.Linear(4, 3) for _ in range(2)]
        >>> bases = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        >>> optimizers = [bisam.BiSAM(base, model) for base, model in zip(bases, models)]
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # that there is no GPU here
        ...     step = capture_together(optimizers)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> losses = step([(x, y), (x, y)])
    """
    if not optimizers:
        raise ValueError("the list of optimizers is empty: give at least one")
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ValueError("an optimizer is in the list twice: trainings in one graph must not share parameters")
    own: Sequence[torch.Generator | None] = [None] * len(optimizers) if generators is None else generators
    if len(own) != len(optimizers):
        raise ValueError(f"{len(optimizers)} optimizers need as many generators, got {len(own)}")
    return CapturedSteps([Branch(o, None, g, after) for o, g in zip(optimizers, own, strict=True)], warmup)


class CapturedStep:
    """What `capture` returns."""

    def __init__(self, steps: CapturedSteps) -> None:
        self._steps = steps

    def __repr__(self) -> str:
        return f"CapturedStep(eager_because={self.eager_because!r})"

    def __call__(self, *batch: Any) -> Tensor:
        """One step on a batch. Returns the loss at w, as `minimize` does: a tensor of its own."""
        return self._steps([batch])[0]

    @property
    def eager_because(self) -> str | None:
        """Why steps are not captured; None if they are."""
        return self._steps.eager_because

    def reset(self) -> None:
        """Drop the graphs: for changes that they do not see, such as of a constant of an objective."""
        self._steps.reset()


class CapturedSteps:
    """What `capture_together` returns."""

    def __init__(self, branches: list[Branch], warmup: int) -> None:
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1, for state that the first step creates, got {warmup}")
        self._branches = branches
        self._alike = None if all(branch.replay.is_alone for branch in branches) else AlikeOnAllRanks()
        self._warmup = warmup if self._alike is None else max(warmup, WARMUP_OF_RANKS)
        self._seen: dict[int, int] = {}
        self._warned: set[str] = set()
        self._replays = Counter()
        self._graphs: dict[Any, _Graph] = {}
        self._streams: list[torch.cuda.Stream] = []
        self.eager_because = _reason(branches)
        if self.eager_because is not None:
            _warn(f"{self.eager_because}. Every step runs eagerly, as optimizer.minimize does")
            return
        self._pool = torch.cuda.graph_pool_handle()
        self._streams = [torch.cuda.Stream(branch.device) for branch in branches]  # type: ignore[no-untyped-call]
        this = weakref.ref(self)
        for branch in branches:
            branch.fit_state()
            branch.optimizer.register_load_state_dict_post_hook(partial(_reset, this))

    def __call__(self, batches: Sequence[Sequence[Any]]) -> list[Tensor]:
        """One step of each training on its batch `(x, y)`. Returns the losses at w."""
        if len(batches) != len(self._branches):
            raise ValueError(f"{len(self._branches)} trainings need as many batches, got {len(batches)}")
        for branch in self._branches:
            branch.replay.refuse_while_perturbed()
        if self.eager_because is not None:
            return [branch.eager(batch) for branch, batch in zip(self._branches, batches, strict=True)]
        for branch, batch in zip(self._branches, batches, strict=True):
            unfit = branch.unfit(batch)
            if self._alike is not None:
                self._alike.check(batch, unfit)
            if unfit is not None:
                self._warn_once(f"{unfit}. Steps on such batches run eagerly")
                return self._eager(batches)
        key = tuple(branch.signature(batch) for branch, batch in zip(self._branches, batches, strict=True))
        if key not in self._graphs and not self._capture_if_due(key, batches):
            return self._eager(batches)
        return self._graphs[key].replay(batches)

    def reset(self) -> None:
        """Drop the graphs; they are captured anew, after as many eager steps as at first."""
        self._graphs.clear()
        self._seen.clear()
        if self._streams:
            self._pool = torch.cuda.graph_pool_handle()  # torch does not take one up again that is used no more

    def _capture_if_due(self, key: Any, batches: Sequence[Sequence[Any]]) -> bool:
        """Capture this kind of step if it is due. Returns whether it has a graph now."""
        seen = self._seen[hash(key)] = self._seen.get(hash(key), 0) + 1
        if seen == 1 and len(self._seen) > 2 * MOST_GRAPHS:
            self._warn_once(
                f"the step changed {len(self._seen)} times, and each kind needs its own graph. Only lr and rho may "
                "change: keep shapes, momentum and weight decay fixed (OneCycleLR: cycle_momentum=False). A counter "
                "that the base optimizer keeps in Python and a buffer that the model replaces change the step too. "
                "These steps run eagerly"
            )
            self._seen = {hash(key): 1}
        if seen == 1 or sum(self._seen.values()) <= self._warmup:
            return False
        if len(self._graphs) >= MOST_GRAPHS:
            self._warn_once(
                f"{MOST_GRAPHS} graphs are captured already, and this step would need another: its shape, or an "
                "option other than lr and rho, has changed. It runs eagerly"
            )
            return False
        self.eager_because = _reason(self._branches)  # which may have changed since
        try:
            if self.eager_because is None:
                self._graphs[key] = self._capture(batches)
        except torch.cuda.OutOfMemoryError as error:
            if self._alike is not None:
                raise  # other ranks may have enough, and would replay what this one runs eagerly
            self.eager_because = f"there is not enough memory for a captured step: {str(error).splitlines()[0]}"
        except DrawsOnHostError:
            self.eager_because = "the step draws random numbers on the host, which a graph would repeat in every step"
        if self.eager_because is not None:
            self.reset()
            self._warn_once(f"{self.eager_because} – every step runs eagerly from now on")
        return self.eager_because is None

    def _warn_once(self, message: str) -> None:
        if message[:40] not in self._warned:
            self._warned.add(message[:40])
            _warn(message, level=5)

    def _capture(self, batches: Sequence[Sequence[Any]]) -> _Graph:
        recordings = [
            Recording(branch, copied(tuple(batch)), self._replays)
            for branch, batch in zip(self._branches, batches, strict=True)
        ]
        graph = torch.cuda.CUDAGraph()
        for branch in self._branches:
            branch.replay.prepare_recording()
            for generator in branch.generators():
                graph.register_generator_state(generator)
        outside = sys.exc_info()[1]
        try:
            # thread_local: a loader's thread that pins memory meanwhile is none of our business
            with (
                _undisturbed(),
                _quiet_about_streams(),
                _no_draws_on_host(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._streams[0], capture_error_mode="thread_local"),
            ):
                self._record(recordings)
        except Exception as error:
            for branch in self._branches:
                branch.replay.abandon()
            let_draw_again([g for branch in self._branches for g in branch.generators()], self._streams[0].device)
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses to record into that of a failed capture
            raise explained(first_of(error, outside), several_ranks=self._alike is not None) from None
        return _Graph(graph, recordings)

    def _record(self, recordings: list[Recording]) -> None:
        main, *others = self._streams
        for stream in others:
            stream.wait_stream(main)
        # the first branch is recorded last: it is on the main stream, which the others start from
        for recording, stream in [*zip(recordings, self._streams, strict=True)][::-1]:
            with torch.cuda.stream(stream):
                recording.record()
        for stream in others:
            main.wait_stream(stream)

    def _eager(self, batches: Sequence[Sequence[Any]]) -> list[Tensor]:
        """On the streams of the capture: an accumulated gradient stays on the stream where it began."""
        caller = torch.cuda.current_stream(self._branches[0].device)
        losses = []
        for branch, batch, stream in zip(self._branches, batches, self._streams, strict=True):
            stream.wait_stream(caller)
            with torch.cuda.stream(stream), nullcontext() if self._alike is None else _quiet_about_streams():
                losses.append(branch.like_captured(batch))
            caller.wait_stream(stream)
        return losses


class AlikeOnAllRanks:
    """Keeps ranks together: NCCL needs all of them to replay a graph, or none.

    Each rank decides by itself when to record and when to replay, by the steps that it has seen. With batches of one
    shape they all decide alike.
    """

    def __init__(self) -> None:
        self._shape: Any = None

    def check(self, batch: Sequence[Any], unfit: str | None) -> None:
        """Refuse a batch that this rank alone might run eagerly."""
        if unfit is not None:
            raise RuntimeError(f"{unfit}: with several processes every batch must fit the captured step")
        shape = shape_of(tuple(batch))
        self._shape = self._shape or shape
        if shape != self._shape:
            raise RuntimeError(
                "a captured step of several processes takes batches of one shape, because all ranks must replay the "
                f"same graph: the first was {self._shape}, got {shape}. Use drop_last=True in the loader, or "
                "optimizer.minimize for this batch on all ranks"
            )


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    recordings: list[Recording]

    def replay(self, batches: Sequence[Sequence[Any]]) -> list[Tensor]:
        for recording, batch in zip(self.recordings, batches, strict=True):
            recording.load(batch)
        return self._through_steps(0)

    def _through_steps(self, number: int) -> list[Tensor]:
        """Replay inside of every optimizer's `step`, whose hooks belong around it: they may set a learning rate."""
        if number == len(self.recordings):
            for recording in self.recordings:
                recording.branch.refresh()
            self.graph.replay()
            self.recordings[0].replays.count += 1
            return [recording.finish() for recording in self.recordings]
        replay = self.recordings[number].branch.replay
        return replay.with_hooks(partial(self._through_steps, number + 1))


def _reset(steps: weakref.ref[CapturedSteps], _: torch.optim.Optimizer) -> None:
    """State that is loaded lies in other tensors than those of the graphs."""
    this = steps()
    if this is not None:
        this.reset()
        for branch in this._branches:
            branch.fit_state()


def _reason(branches: Sequence[Branch]) -> str | None:
    """The reason why their steps cannot be captured; None if they can."""
    devices = {param.device for branch in branches for param in branch.replay.params}
    if any(device.type != "cuda" for device in devices):
        kinds = ", ".join(sorted({device.type for device in devices}))
        return f"a CUDA graph needs parameters on a CUDA device, and these are on {kinds}"
    if len(devices) > 1:
        return f"a captured step runs on one device, and the parameters are on {len(devices)}"
    for branch in branches:
        optimizer = branch.optimizer
        if optimizer.same_dropout:
            return "same_dropout sets random states from the host in the middle of a step"
        if optimizer.scaler is not None:
            return "a GradScaler decides on the host whether to update: use autocast=torch.bfloat16, which needs none"
        if branch.replay.base_has_hooks():
            return "the base optimizer has step hooks of its own: register them on the sharpness-aware optimizer"
        if any(param.requires_grad for param in branch.replay.others()):
            return (
                "the model has parameters that the optimizer does not have, whose gradients a graph would not put back "
                "after zero_grad(): freeze them by requires_grad_(False), or give their optimizer as one of a list of "
                "base optimizers"
            )
        if (unrecordable := branch.replay.unrecordable()) is not None:
            return unrecordable
        if len(branches) > 1 and not branch.replay.is_alone:
            return "collectives of trainings side by side may wait for each other: capture one training in a process"
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Collect no garbage during a capture: a graph among it would be destroyed, which breaks the one that is made."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():  # of a capture that failed at its first operation: its error has the details
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _quiet_about_streams() -> Iterator[None]:
    """No warning that a replica adds gradients up on the stream where it was built: torch lets the step wait for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        yield


@contextmanager
def _no_draws_on_host() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate()
    yield
    if random.getstate() != before[1] or not torch.equal(torch.get_rng_state(), before[0]):
        raise DrawsOnHostError


class DrawsOnHostError(RuntimeError):
    """A captured step drew from a generator of the CPU's."""


def _warn(message: str, level: int = 4) -> None:
    warnings.warn(message, stacklevel=level)
