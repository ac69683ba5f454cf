"""How much it matters how a tie between the likeliest classes is counted, on the best weights of runs under way.

python benchmarks/ties.py RUN... --data FOLDER    # run folders of CIFAR-10 with a checkpoint; writes results/ties.json
"""

import argparse
from pathlib import Path

import receipt
import torch
from torch import Tensor, nn
from under_way import best_model

from bisam.lab import records
from bisam.lab.config import recorded
from bisam.lab.data import load
from bisam.lab.data.sources import Batched, InMemory
from bisam.objectives import correct


@torch.no_grad()
def counts(model: nn.Module, batches: Batched) -> dict[str, float]:
    """Per cent that are right: the label is any of the likeliest classes in bf16, the first of them, and in fp32."""
    right, count = torch.zeros(3), 0
    for x, y in batches.epoch(0):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x).float()
        ways = (is_any_of_the_largest(logits, y), correct(logits, y), correct(model(x), y))
        right += torch.stack([way.sum() for way in ways])
        count += len(y)
    share = 100 * right / count
    return {name: round(value, 2) for name, value in zip(("any", "first", "fp32"), share.tolist(), strict=True)}


def is_any_of_the_largest(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels.long().unsqueeze(1)).squeeze(1) >= logits.amax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    source = InMemory(load("cifar10", arguments.data))
    table = {}
    for folder in arguments.runs:
        config = recorded(records.read(folder).config)
        loaders = source.loaders(config, torch.device("cpu"))
        model, epoch = best_model(folder, config)
        model.eval().to(memory_format=torch.channels_last)
        found = {"validation": counts(model, loaders.validation), "test": counts(model, loaders.test)}
        table[f"{config.recipe}/{folder.name}"] = {"epoch": epoch, **found}
        print(folder.name, epoch, found, flush=True)
    print(receipt.save("ties", {"table": table}))


if __name__ == "__main__":
    main()
