"""One training: its model, data and optimizer, what it has learnt of itself, and how it is saved and resumed."""

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
"""What is added up over the steps of an epoch, on the device."""

CLASSES_FOR_TOP5 = 100
"""From so many classes on top-5 accuracy is told too: guessing gets at most 5 % then, but half of ten classes."""


@dataclass
class Best:
    """The weights that count: those that did best on the validation data, or the last."""

    accuracy: float = -1.0
    epoch: int = -1
    weights: dict[str, Tensor] | None = None


class Training:
    """A run as objects. All random choices come from its seed: split, noise, weights, order, augmentation, dropout."""

    def __init__(self, config: Config, source: Source, device: torch.device) -> None:
        self.config, self.device = config, device
        self.tops = {"test_accuracy": 1, **({"test_top5_accuracy": 5} if source.classes >= CLASSES_FOR_TOP5 else {})}
        parts = source.parts(config, device)
        self.batches, self.validation, self.test = parts.train, parts.validation, parts.test
        if len(self.batches) == 0:
            raise ValueError(f"a batch of {config.batch} is larger than the training data: set a smaller batch")
        if len(self.validation) == 0:
            raise ValueError(f"validation={config.validation:g} leaves no sample to validate on: set a larger part")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # for the weights, and for what an optimizer draws by itself
            self.model: nn.Module = build(config.model, source.classes)
            self.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.optimizer = methods.optimizer(self.model, config)
        self._check_fits()
        if config.compile:
            self.model.compile(dynamic=False)  # code for each size of batch: ESAM has two, and no others come
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.sums = {name: torch.zeros((), device=device) for name in SUMS}
        self.best = Best()
        self.seconds = 0.0
        self.epoch_seconds = 0.0

    def add_up(self) -> None:
        """After a step, inside of its graph."""
        self.sums["steps"].add_(1)
        told = self.optimizer.telemetry
        for name in SUMS[1:]:
            value = getattr(told, name)
            if value is not None:
                self.sums[name].add_(value)

    def begin_epoch(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.config, epoch)

    def end_epoch(self, epoch: int, together: int, *, alike: bool = True) -> dict[str, Any]:
        """What the epoch came to, and whether its weights are the best so far.

        So many runs shared the device, alike in what their steps cost or not.
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
                f"{self.config.model} cannot take the images of {self.config.data}, {shape}: {error}"
            ) from None
        self.model.train()

    def accuracy(self, batches: Batched) -> float:
        """Per cent of the samples that the model gets right."""
        return self.accuracies(batches, [1])[0]

    @torch.no_grad()
    def accuracies(self, batches: Batched, tops: Sequence[int]) -> list[float]:
        """Per cent of the samples whose label is among so many of the likeliest classes; all in one pass."""
        self.model.eval()
        # uncompiled: code for another size of batch would be made, and that of the training made anew for any size
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
        """Of the best weights, by their names in a result."""
        assert self.best.weights is not None
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.best.weights)
        accuracies = self.accuracies(self.test, [*self.tops.values()])
        self.model.load_state_dict(now)
        return dict(zip(self.tops, accuracies, strict=True))

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs to go on as if nothing had happened."""
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
        """Go on from what `state` gave. Returns what is not as if nothing had happened; empty if all is."""
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
            return f"it was trained on another kind of device: on {self.device.type} dropout draws from the seed anew"
        self.generator.set_state(state["generator"])
        return ""


def _among(top: int, logits: Tensor, labels: Tensor) -> Tensor:
    """Which labels are among so many of the likeliest classes."""
    if top == 1:
        return bisam.objectives.correct(logits, labels)
    likeliest = logits.argsort(dim=1, descending=True, stable=True)[:, :top]  # ties in order, as in `correct`
    return (likeliest == labels.unsqueeze(1)).any(1) & ~logits.isnan().any(1)
