"""What bf16 autocast leaves of SAM's step, on the weights of runs under way: the same batches in float32 and in bf16.

A perturbation of ρ = 0.05 moves most weights by less than bf16 resolves. SAM's step differs from a plain one by
its correction, the gradient at w + ε minus that at w: is it the same?

python benchmarks/autocast.py RUN... --data FOLDER    # runs of CIFAR-10 with a checkpoint; writes results/autocast.json
"""

import argparse
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import receipt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from under_way import last_model

from bisam.lab import records
from bisam.lab.config import Config, recorded
from bisam.lab.data import load
from bisam.lab.data.sources import InMemory


@dataclass
class Step:
    """SAM's two gradients on a batch, each as one vector, and the losses that they belong to."""

    losses: tuple[float, float]
    plain: Tensor
    perturbed: Tensor

    @property
    def correction(self) -> Tensor:
        return self.perturbed - self.plain

    @property
    def rise(self) -> float:
        return self.losses[1] - self.losses[0]


def gradient(model: nn.Module, x: Tensor, y: Tensor, config: Config, *, bf16: bool) -> tuple[float, Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y.long(), label_smoothing=config.label_smoothing)
    return loss.item(), torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*model.parameters()])])


def sam_step(model: nn.Module, x: Tensor, y: Tensor, config: Config, *, bf16: bool) -> Step:
    """Without the update: the weights come back as they were."""
    params = [*model.parameters()]
    weights = nn.utils.parameters_to_vector(params).detach()
    before, plain = gradient(model, x, y, config, bf16=bf16)
    nn.utils.vector_to_parameters(weights + config.rho * plain / plain.norm(), params)
    after, perturbed = gradient(model, x, y, config, bf16=bf16)
    nn.utils.vector_to_parameters(weights, params)
    return Step((before, after), plain, perturbed)


def compared(exact: Step, rounded: Step) -> dict[str, float]:
    """Lengths and directions of the corrections, and what they come from."""
    wanted, found = exact.correction, rounded.correction
    return {
        "rise of the loss, fp32": exact.rise,
        "rise of the loss, bf16": rounded.rise,
        "correction ÷ gradient, fp32": (wanted.norm() / exact.plain.norm()).item(),
        "cosine of the perturbed gradients": F.cosine_similarity(exact.perturbed, rounded.perturbed, dim=0).item(),
        "cosine of the corrections": F.cosine_similarity(wanted, found, dim=0).item(),
        "length of the corrections, bf16 ÷ fp32": (found.norm() / wanted.norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=8)
    arguments = parser.parse_args()
    source = InMemory(load("cifar10", arguments.data))
    table = {}
    for folder in arguments.runs:
        config = recorded(records.read(folder).config)
        model, epoch = last_model(folder, config)
        model.train()
        batches = source.loaders(config, torch.device("cpu")).train.epoch(epoch)
        rows = []
        for x, y in islice(batches, arguments.batches):
            exact, rounded = (sam_step(model, x, y, config, bf16=bf16) for bf16 in (False, True))
            rows.append(compared(exact, rounded))
        means = {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in rows[0]}
        table[f"{config.recipe}/{folder.name}"] = {"epoch": epoch, "batches": len(rows), **means}
        print(folder.name, epoch, means, flush=True)
    print(receipt.save("autocast", {"table": table}))


if __name__ == "__main__":
    main()
