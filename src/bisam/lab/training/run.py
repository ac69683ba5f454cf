"""One run: its model, data and optimizer, its sums and best weights, and how it is saved and resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bisam
from bisam.lab import methods
from bisam.lab.config import Config, rate
from bisam.lab.data.sources import Batched, Source
from bisam.lab.models import build

SUMS = ["steps", "loss", "perturbed_loss", "error", "perturbed_error", "flips", "ascent_norm"]
"""Telemetry that is summed over the steps of an epoch, on the device."""

CLASSES_FOR_TOP5 = 100
"""Report top-5 accuracy for data sets with at least this many classes: there guessing gets at most 5 %."""


@dataclass
class Best:
    """The weights that are tested: those with the best validation accuracy, or the last."""

    accuracy: float = -1.0
    epoch: int = -1
    weights: dict[str, Tensor] | None = None


class TrainingRun:
    """A run. Split, noise, weights, order, augmentation and dropout all come from its seed."""

    def __init__(self, config: Config, source: Source, device: torch.device) -> None:
        self.config, self.device = config, device
        self.tops = {"test_accuracy": 1, **({"test_top5_accuracy": 5} if source.classes >= CLASSES_FOR_TOP5 else {})}
        parts = source.parts(config, device)
        self.batches, self.validation, self.test = parts.train, parts.validation, parts.test
        if len(self.batches) == 0:
            raise ValueError(f"a batch of {config.batch} is larger than the training data: set a smaller batch")
        if len(self.validation) == 0:
            raise ValueError(f"validation={config.validation:g} leaves no sample to validate on: set a larger fraction")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # for the weights, and for the random numbers of the optimizer
            self.model: nn.Module = build(config.model, source.classes)
            self.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.optimizer = methods.optimizer(self.model, config)
        self._check_fits()
        if config.compile:
            self.model.compile(dynamic=False)  # one compilation for each batch size: ESAM has two
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.sums = {name: torch.zeros((), device=device) for name in SUMS}
        self.best = Best()
        self.seconds = 0.0
        self.epoch_seconds = 0.0

    def add_up(self) -> None:
        """Add the telemetry of a step to the sums; captured in the graph of the step."""
        self.sums["steps"].add_(1)
        telemetry = self.optimizer.telemetry
        for name in SUMS[1:]:
            value = getattr(telemetry, name)
            if value is not None:
                self.sums[name].add_(value)

    def begin_epoch(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.config, epoch)

    def end_epoch(self, epoch: int, together: int, *, alike: bool = True) -> dict[str, Any]:
        """The metrics of the epoch; keeps its weights if they are the best so far.

        `together` is how many runs shared the device, `alike` whether their steps cost the same.
        """
        steps = self.sums["steps"].item()
        means = {name: total.item() / steps for name, total in self.sums.items() if name != "steps"}
        for total in self.sums.values():
            total.zero_()
        if not methods.find(self.config.method).perturbs:  # there is no w + ε to measure at
            means = {name: means[name] for name in ("loss", "error")}
        accuracy = self.accuracy(self.validation)
        if not self.diverged and (accuracy > self.best.accuracy or self.config.select == "last"):
            weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            self.best = Best(accuracy, epoch, weights)
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        self.seconds += seconds
        return {
            "epoch": epoch,
            "lr": rate(self.config, epoch),
            **means,
            "validation_accuracy": accuracy,
            "seconds": seconds,
            "together": together,
            "alike": alike,
            "samples_per_second": steps * self.config.batch / seconds if seconds > 0 else math.inf,
        }

    @property
    def diverged(self) -> bool:
        """Whether any weight is not finite."""
        return not all(torch.isfinite(param).all() for param in self.model.parameters())

    @torch.no_grad()
    def _check_fits(self) -> None:
        x, _ = next(iter(self.validation.epoch(0)))
        self.model.eval()
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                self.model(x[:1])
        except RuntimeError as error:
            shape = "×".join(map(str, x.shape[1:]))
            raise ValueError(
                f"{self.config.model} does not accept the images of {self.config.data}, {shape}: {error}"
            ) from None
        self.model.train()

    def accuracy(self, batches: Batched) -> float:
        """Per cent of the samples that the model gets right."""
        return self.accuracies(batches, [1])[0]

    @torch.no_grad()
    def accuracies(self, batches: Batched, tops: Sequence[int]) -> list[float]:
        """Per cent of the samples whose label is among the top k classes, for each k of `tops`; in one pass."""
        self.model.eval()
        # uncompiled: another batch size would recompile the model, also for the training
        stance = torch.compiler.set_stance("force_eager" if self.config.compile else "default")
        right = torch.zeros(len(tops), device=self.device)
        count = 0
        with stance, torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            for x, y in batches.epoch(0):
                logits = self.model(x).float()
                right += torch.stack([_among(top, logits, y).sum() for top in tops])
                count += len(y)
        self.model.train()
        return [100 * total / count for total in right.tolist()]

    def test_accuracies(self) -> dict[str, float]:
        """Test accuracies of the best weights, by their names in a result."""
        assert self.best.weights is not None
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.best.weights)
        accuracies = self.accuracies(self.test, [*self.tops.values()])
        self.model.load_state_dict(now)
        return dict(zip(self.tops, accuracies, strict=True))

    def state(self) -> dict[str, Any]:
        """Everything that is needed to resume the run bit for bit."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "sums": self.sums,
            "best": {"accuracy": self.best.accuracy, "epoch": self.best.epoch, "weights": self.best.weights},
            "seconds": self.seconds,
            "epoch_seconds": self.epoch_seconds,
        }

    def load(self, state: dict[str, Any]) -> str:
        """Resume from `state()`. Returns what differs from an uninterrupted run; empty if nothing does."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, total in self.sums.items():
            total.copy_(state["sums"][name])
        weights = state["best"]["weights"]
        self.best = Best(
            state["best"]["accuracy"],
            state["best"]["epoch"],
            None if weights is None else {name: tensor.to(self.device) for name, tensor in weights.items()},
        )
        self.seconds, self.epoch_seconds = state["seconds"], state["epoch_seconds"]
        if state["generator"].shape != self.generator.get_state().shape:
            return f"it was trained on another kind of device: on {self.device.type} dropout restarts from the seed"
        self.generator.set_state(state["generator"])
        return ""


def _among(top: int, logits: Tensor, labels: Tensor) -> Tensor:
    """Which labels are among the top k classes."""
    if top == 1:
        return bisam.objectives.correct(logits, labels)
    likeliest = logits.argsort(dim=1, descending=True, stable=True)[:, :top]  # ties in order, as in `correct`
    return (likeliest == labels.unsqueeze(1)).any(1) & ~logits.isnan().any(1)
