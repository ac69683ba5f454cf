"""One run: its model, data and optimizer, its sums and best weights, and how it is saved and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import bisam
from bisam.lab import measures, methods, models, spec
from bisam.lab.config import Config, rate
from bisam.lab.data.randomness import mixed
from bisam.lab.data.shards import Shard
from bisam.lab.data.sources import Batched, Source
from bisam.lab.models.compiling import compile_model
from bisam.lab.training.first_sample import output_of_one, with_sizes
from bisam.lab.training.ranks import ALONE, Ranks
from bisam.objectives import logits_of
from bisam.plan import Batch
from bisam.tensors.buckets import locals_of

BuildModel = Callable[[Config, Source], nn.Module]
"""Makes the model of a run, with weights drawn from torch's global generator."""


def build_by_name(config: Config, source: Source) -> nn.Module:
    return with_sizes(models.build(config.model, source.classes, source.features), config, source)


COUNTS = {
    "steps": (),
    "steps_at_weights": ("loss", "error"),
    "steps_perturbed": ("perturbed_loss", "perturbed_error", "flips", "ascent_norm"),
}
"""Counters of an epoch's steps: of all, of those with a pass at w, of those with one at w + ε, and what each measures.

MSAM has no pass at w; a plain step, as before `start`, has none at w + ε.
"""

SUMS = [*COUNTS, *(name for names in COUNTS.values() for name in names)]
"""What is summed over the steps of an epoch, on the device."""

CLASSES_FOR_TOP5 = 100
"""Report top-5 accuracy for data sets with at least this many classes: there guessing gets at most 5 %."""


@dataclass
class Best:
    """The weights that are tested: those with the best validation measure, or the last."""

    accuracy: float = -1.0
    epoch: int = -1
    weights: dict[str, Tensor] | None = None
    """Empty in a rank that has a part of the model, except for the first one."""
    score: float = -math.inf
    """The measure that counts."""
    others: dict[str, float] = field(default_factory=dict)
    """The measures beside accuracy, by their names in a record."""


class TrainingRun:
    """A run. Split, noise, weights, order, augmentation and dropout all come from its seed."""

    def __init__(
        self,
        config: Config,
        source: Source,
        device: torch.device,
        build: BuildModel = build_by_name,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.device, self.classes, self.ranks = config, device, source.classes, ranks
        self.held = ranks.held
        self.others = tuple(name for name in config.measured if name != "accuracy")
        self.tops = {"test_accuracy": 1, **({"test_top5_accuracy": 5} if source.classes >= CLASSES_FOR_TOP5 else {})}
        loaders = source.loaders(config, device)
        self.batches, self.validation, self.test = loaders.train, loaders.validation, loaders.test
        if len(self.batches) == 0:
            raise ValueError(f"a batch of {config.batch} is larger than the training data: set a smaller batch")
        if len(self.validation) == 0:
            raise ValueError(f"validation={config.validation:g} leaves no sample to validate on: set a larger fraction")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # for the weights, and for the random numbers of the optimizer
            self.model: nn.Module = build(config, source)
            self.code = spec.code_of(config.model)  # now: the file may change until the run ends
            self.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            wrapped = ranks.wrapped(self.model)
            steps = config.epochs * len(self.batches)
            self.optimizer = methods.optimizer(wrapped, config, ranks.sharpness(config), steps=steps)
        self._check_fits()
        for batches in (loaders.train, loaders.validation, loaders.test):
            batches.shard = Shard(ranks.rank, ranks.count)
        self.kernels = "torch"
        """Whose kernels compute the training passes, for the receipt."""
        if config.compile:
            self.kernels = compile_model(self.model, device, bf16=config.precision == "bf16")
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.sums = {name: torch.zeros((), device=device) for name in SUMS}
        self.best = Best()
        self.seconds = 0.0
        self.epoch_seconds = 0.0

    def add_up(self) -> None:
        """Add the telemetry of a step to the sums; captured in the graph of the step."""
        telemetry = self.optimizer.telemetry
        for counter, names in COUNTS.items():
            known = {name: value for name in names if (value := getattr(telemetry, name)) is not None}
            if known or counter == "steps":
                self.sums[counter].add_(1)
            for name, value in known.items():
                self.sums[name].add_(value)

    def begin_epoch(self, epoch: int) -> None:
        self._set_rate(rate(self.config, epoch, 0, len(self.batches)))

    def begin_step(self, epoch: int, batch: int) -> None:
        """Set the rate of a schedule that goes step by step, and the dropout of a rank.

        That is drawn by key, since a checkpoint has the random state of the first rank only.
        """
        if not self.ranks.is_alone:
            self.generator.manual_seed(mixed("dropout", self.config.seed, epoch, batch, self.ranks.rank))
        if self.config.schedule == "linear":
            self._set_rate(rate(self.config, epoch, batch, len(self.batches)))

    def _set_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def end_epoch(self, epoch: int, together: int, *, alike: bool = True) -> dict[str, Any]:
        """The metrics of the epoch; keeps its weights if they are the best so far.

        `together` is how many runs shared the device, `alike` whether their steps cost the same.
        """
        whole = self._whole_sums()
        sums = dict(zip(whole, torch.stack([*whole.values()]).tolist(), strict=True))  # one wait for the device
        for total in self.sums.values():
            total.zero_()
        validation = self.measured(self.validation, "validation")
        accuracy, score = validation["validation_accuracy"], validation[f"validation_{self.config.primary}"]
        if not self.diverged and (score > self.best.score or self.config.select == "last"):
            weights = self.held.weights(self.model)
            others = {name: value for name, value in validation.items() if name != "validation_accuracy"}
            self.best = Best(accuracy, epoch, weights, score, others)
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        self.seconds += seconds
        return {
            "epoch": epoch,
            "lr": rate(self.config, epoch, 0, len(self.batches)),
            **_means(sums),
            **validation,
            "seconds": seconds,
            "together": together,
            "alike": alike,
            "samples_per_second": sums["steps"] * self.config.batch / seconds if seconds > 0 else math.inf,
        }

    def _whole_sums(self) -> dict[str, Tensor]:
        """The sums of one process with the whole batch: flips are counted, other numbers are means over the samples."""
        totals = torch.stack([*self.sums.values()])
        self.ranks.sum_(totals)
        return {
            name: total if name == "flips" else total / self.ranks.count
            for name, total in zip(self.sums, totals, strict=True)
        }

    @property
    @torch.no_grad()
    def diverged(self) -> bool:
        """Whether any weight is not finite."""
        weights = [weight for weight in self.model.parameters() if weight.is_floating_point() or weight.is_complex()]
        loaders = [part for part in locals_of(weights) if part.numel()]
        found = False
        if loaders:  # a rank may hold none of a small model that is sharded
            largest = [norm.float() for norm in torch._foreach_norm(loaders, math.inf)]
            found = not bool(torch.isfinite(torch.stack(largest)).all())  # one wait for the device
        return self.ranks.any(found) if self.held.is_sharded else found

    @torch.no_grad()
    def _check_fits(self) -> None:
        """Raise ValueError if the model does not accept these data, or has another number of outputs."""
        batch, name = Batch(*next(iter(self.validation.epoch(0)))), self.config.model
        with self._autocast():
            output = output_of_one(self.model, batch, self.config)
        logits = logits_of(output)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, self.classes):
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"{name} returns {shape} for one sample of {self.config.data}, which has {self.classes} classes: it "
                f"must return logits (N, {self.classes})"
            )
        if _are_probabilities(logits) and _are_probabilities(self._logits(batch.rows(slice(0, 16)))):
            raise ValueError(
                f"{name} returns probabilities, which are not negative and add up to 1 for each sample: let it return "
                "what goes into its softmax, since the loss takes logits"
            )

    @torch.no_grad()
    def _logits(self, batch: Batch) -> Tensor:
        self.model.eval()
        with self._autocast():
            found: Tensor = logits_of(batch.run(self.model))
        self.model.train()
        return found

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def accuracies(self, batches: Batched, tops: Sequence[int]) -> list[float]:
        """Per cent of the samples whose label is among the top k classes, for each k of `tops`; in one pass."""
        return self._evaluated(batches, tops)[0]

    def measured(self, batches: Batched, part: str, tops: Sequence[int] = (1,)) -> dict[str, float]:
        """Accuracies, and the other measures of the configuration, by their names in a record."""
        accuracies, counts = self._evaluated(batches, tops, confusion=bool(self.others))
        names = [f"{part}_accuracy" if top == 1 else f"{part}_top{top}_accuracy" for top in tops]
        others = {} if counts is None else measures.computed(self.others, counts)
        return {
            **dict(zip(names, accuracies, strict=True)),
            **{f"{part}_{name}": value for name, value in others.items()},
        }

    @torch.no_grad()
    def _evaluated(
        self, batches: Batched, tops: Sequence[int], *, confusion: bool = False
    ) -> tuple[list[float], Tensor | None]:
        """Accuracies, and the confusion counts if wanted."""
        self.ranks.share_buffers(self.model)
        self.model.eval()
        # uncompiled: another batch size would recompile the model, also for the training
        stance = torch.compiler.set_stance("force_eager" if self.config.compile else "default")
        right = torch.zeros(len(tops), device=self.device)
        size = (self.classes, self.classes + 1)
        counts = torch.zeros(size, dtype=torch.int64, device=self.device) if confusion else None
        count = torch.zeros((), device=self.device)
        with stance, self._autocast():
            for x, y in batches.epoch(0):
                if len(y) == 0:  # fewer samples than ranks
                    if self.held.is_sharded:  # all ranks gather the weights, or none
                        _zeros(x, y).run(self.model)
                    continue
                logits = logits_of(Batch(x, y).run(self.model)).float()
                right += torch.stack([_among(top, logits, y).sum() for top in tops])
                if counts is not None:
                    counts += measures.confusion(logits, y, self.classes)
                count += len(y)
        self.model.train()
        self.ranks.sum_(right, count, *([] if counts is None else [counts]))
        return [100 * total / count.item() for total in right.tolist()], counts

    def test_accuracies(self) -> dict[str, float]:
        """Test accuracies and other measures of the best weights, by their names in a result."""
        assert self.best.weights is not None
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.held.load_weights(self.model, self.best.weights)
        found = self.measured(self.test, "test", [*self.tops.values()])
        self.model.load_state_dict(now)
        return found

    def last_test_accuracies(self) -> dict[str, float]:
        """The same of the weights as they are, for what the choice of an epoch does; empty if they are not finite."""
        if self.diverged:
            return {}
        return self.measured(self.test, "test", [*self.tops.values()])

    def state(self) -> dict[str, Any]:
        """Everything that is needed to resume the run bit for bit. All ranks call it together."""
        weights, optimizer = self.held.state(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": optimizer,
            **self._memories(optimizer),
            "generator": self.generator.get_state(),
            "sums": self._whole_sums() if self.sums["steps"] else self.sums,
            "best": {
                "accuracy": self.best.accuracy,
                "epoch": self.best.epoch,
                "weights": self.best.weights,
                "others": self.best.others,
            },
            "seconds": self.seconds,
            "epoch_seconds": self.epoch_seconds,
        }

    def load(self, state: dict[str, Any]) -> str:
        """Resume from `state()`. Returns what differs from an uninterrupted run; empty if nothing does."""
        self.held.load_weights(self.model, state["model"])
        memories = state.get("memories", [])
        own = {"memory": memories[self.ranks.rank]} if len(memories) == self.ranks.count else {}
        optimizer = state["optimizer"]
        if own:
            optimizer = {**optimizer, "sharpness": {**optimizer["sharpness"], **own}}
        self.held.load_optimizer(self.optimizer, optimizer)
        sums = state["sums"]
        for name, total in self.sums.items():
            whole = sums[name] if name in sums else self._counted(name, sums["steps"])
            total.copy_(whole / self.ranks.count if name == "flips" else whole)
        self.best = self._loaded_best(state["best"])
        self.seconds, self.epoch_seconds = state["seconds"], state["epoch_seconds"]
        notes = []
        if memories and not own:
            notes.append(
                f"{len(memories)} ranks trained it, and what each remembered is the first one's on every rank now"
            )
        if state["generator"].shape == self.generator.get_state().shape:
            self.generator.set_state(state["generator"])
        else:
            notes.append(
                f"it was trained on another kind of device: on {self.device.type} dropout restarts from the seed"
            )
        return "; ".join(notes)

    def _memories(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """What the variant remembers on each rank, in the first rank's state: where each perturbs by itself."""
        memory = optimizer.get("sharpness", {}).get("memory")
        if not memory or self.ranks.sharpness(self.config) != "local":
            return {}
        return {"memories": self.ranks.gathered(_on_cpu(memory))}

    def _counted(self, counter: str, steps: Tensor) -> Tensor:
        """A counter that a checkpoint of an older version lacks: there every step was perturbed, or none."""
        is_counted = counter == "steps_at_weights" or methods.find_method(self.config.method).perturbs
        return steps if is_counted else torch.zeros_like(steps)

    def _loaded_best(self, state: dict[str, Any]) -> Best:
        weights, others = state["weights"], state.get("others", {})  # older checkpoints have accuracy alone
        if weights is None:
            return Best()
        kept = self.held.kept(weights, self.device)
        primary = self.config.primary
        score = state["accuracy"] if primary == "accuracy" else others[f"validation_{primary}"]
        return Best(state["accuracy"], state["epoch"], kept, score, others)


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Telemetry of a step: means over the steps that measure a number. What no step has measured is left out."""
    means = {name: sums[name] / sums[one] for one, names in COUNTS.items() for name in names if sums[one]}
    if "loss" not in means:  # without a pass at w nothing has turned from right to wrong
        means.pop("flips", None)
    return means


def _among(top: int, logits: Tensor, labels: Tensor) -> Tensor:
    """Which labels are among the top k classes."""
    if top == 1:
        return bisam.objectives.correct(logits, labels)
    likeliest = logits.argsort(dim=1, descending=True, stable=True)[:, :top]  # ties in order, as in `correct`
    return (likeliest == labels.unsqueeze(1)).any(1) & ~logits.isnan().any(1)


def _zeros(x: Any, y: Tensor) -> Batch:
    """One sample of zeros, in the form of a batch that has none."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(1, *tensor.shape[1:])

    return Batch({name: one(tensor) for name, tensor in x.items()} if isinstance(x, dict) else one(x), one(y))


def _are_probabilities(outputs: Tensor) -> bool:
    """Of samples that differ, unless there is one only: a head of zeros gives all of them its bias."""
    differ = len(outputs) == 1 or bool((outputs != outputs[0]).any())
    return differ and bool((outputs >= 0).all()) and bool(((outputs.sum(1) - 1).abs() < 1e-2).all())


def _on_cpu(state: Any) -> Any:
    """The same with its tensors on the CPU: another process may not see this one's device."""
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state
