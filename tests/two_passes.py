"""A step on micro-batches written out by hand, for frameworks: sum, perturb, sum again, clip, update.

Losses are those of `reference`: nothing here is imported from bisam.
"""

import copy

import torch
from torch import nn

import reference

ASCENTS = {"SAM": reference.cross_entropy, "BiSAM": reference.q_log}
RHO, LR, MOMENTUM, DECAY = 0.3, 0.5, 0.9, 0.9
CLIP = {"norm": 0.2, "value": 0.02}


def net(dtype=torch.float64, batch_norm=True):
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def samples(count=36, dtype=torch.float64):
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(count, 6, generator=draws, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (count,), generator=draws)


def windows(x, y, size=8, count=2):
    """The micro-batches of each update: `count` of `size` samples; the last update has the rest."""
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return [batches[start : start + count] for start in range(0, len(batches), count)]


def base_of(params):
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


def train(model, updates, ascent, *, divisor=2, clip="norm", rho=RHO, sharpness="local", decays=1):
    """A trained copy of the model, and the mean loss at w of each micro-batch.

    `updates` are lists of micro-batches, one list for each update; with several ranks, one list for each of them.
    The framework divides each loss by `divisor`, and multiplies the learning rate `decays` times after an update.
    """
    model = copy.deepcopy(model)
    base = base_of(model.parameters())
    params, losses = list(model.parameters()), []
    for update in updates:
        shards = [update] if isinstance(update[0], tuple) else update
        at_weights = [gradient(model, shard, ASCENTS[ascent], divisor, losses) for shard in shards]
        if sharpness == "global":
            at_weights = [mean(at_weights)] * len(shards)
        weights, buffers = ([t.detach().clone() for t in found()] for found in (model.parameters, model.buffers))
        perturbed = []
        for shard, ascent_gradient in zip(shards, at_weights, strict=True):
            length = torch.sqrt(sum((g * g).sum() for g in ascent_gradient))
            for p, w, g in zip(params, weights, ascent_gradient, strict=True):
                p.data = w + rho * g / length
            perturbed.append(gradient(model, shard, reference.cross_entropy, divisor))
        for p, w, g in zip(params, weights, mean(perturbed), strict=True):
            p.data, p.grad = w, g
        for b, saved in zip(model.buffers(), buffers, strict=True):
            b.copy_(saved)
        if clip == "norm":
            length = torch.sqrt(sum((p.grad * p.grad).sum() for p in params))
            for p in params:
                p.grad = p.grad * torch.clamp(CLIP["norm"] / (length + 1e-6), max=1.0)
        elif clip == "value":
            for p in params:
                p.grad = p.grad.clamp(-CLIP["value"], CLIP["value"])
        base.step()
        for group in base.param_groups:
            group["lr"] *= DECAY**decays
    return model, losses


def gradient(model, micro_batches, objective, divisor, losses=None):
    total = None
    for x, y in micro_batches:
        logits = model(x)
        found = torch.autograd.grad(objective(logits, y) / divisor, list(model.parameters()))
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
        if losses is not None:
            losses.append(float(reference.cross_entropy(logits.detach(), y)))
    return total


def mean(shards):
    return [sum(of_param) / len(shards) for of_param in zip(*shards, strict=True)]


def assert_equal_weights(model, expected, tolerance=1e-12):
    """Relative to the largest entry of each tensor: parameters and floating-point buffers."""
    ours, theirs = ([*m.parameters(), *m.buffers()] for m in (model, expected))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))
