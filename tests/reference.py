"""The equations again, as plainly as they can be written, in float64: what the library must agree with.

Nothing here is imported from bisam. Losses are loops over samples, steps are `torch.autograd.grad` and arithmetic.
"""

import math

import torch
from torch import Tensor, nn

GAMMA = math.log(math.e - 1)


def phi_log(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(GAMMA - x)) + 1


def phi_tanh(x: Tensor) -> Tensor:
    return (torch.exp(0.1 * x) - torch.exp(-0.1 * x)) / (torch.exp(0.1 * x) + torch.exp(-0.1 * x))


def q(logits: Tensor, labels: Tensor, phi=phi_log, mu: float = 1.0) -> Tensor:
    samples = [
        torch.log(sum(torch.exp(mu * phi(z[j] - z[y])) for j in range(len(z)))) / mu
        for z, y in zip(logits, labels.tolist(), strict=True)
    ]
    return sum(samples) / len(samples)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    samples = [torch.log(torch.exp(z).sum()) - z[y] for z, y in zip(logits, labels.tolist(), strict=True)]
    return sum(samples) / len(samples)


def q_log(logits: Tensor, labels: Tensor) -> Tensor:
    return q(logits, labels, phi_log, 1.0)


def q_tanh(logits: Tensor, labels: Tensor) -> Tensor:
    return q(logits, labels, phi_tanh, 10.0)


def round_epsilon(weights: list[Tensor], gradients: list[Tensor], rho: float) -> list[Tensor]:
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
    return [rho * g / norm for g in gradients]


def adaptive_epsilon(weights: list[Tensor], gradients: list[Tensor], rho: float) -> list[Tensor]:
    norm = math.sqrt(sum(float(((w.abs() * g) ** 2).sum()) for w, g in zip(weights, gradients, strict=True)))
    return [rho * w.abs() ** 2 * g / norm for w, g in zip(weights, gradients, strict=True)]


def step(model: nn.Module, base: torch.optim.Optimizer, x: Tensor, y: Tensor, ascent, epsilon, rho: float) -> None:
    params = list(model.parameters())
    weights = [p.detach().clone() for p in params]
    eps = epsilon(weights, torch.autograd.grad(ascent(model(x), y), params), rho)
    buffers = [b.clone() for b in model.buffers()]
    for p, w, e in zip(params, weights, eps, strict=True):
        p.data = w + e
    gradients = torch.autograd.grad(cross_entropy(model(x), y), params)
    for p, w, g in zip(params, weights, gradients, strict=True):
        p.data, p.grad = w, g
    for b, saved in zip(model.buffers(), buffers, strict=True):
        b.copy_(saved)
    base.step()


# variant → (ascent objective, ε, ρ): the four of the paper, each with its defaults
VARIANTS = {
    "SAM": (cross_entropy, round_epsilon, 0.05),
    "ASAM": (cross_entropy, adaptive_epsilon, 2.0),
    "BiSAM(log)": (q_log, round_epsilon, 0.05),
    "BiSAM(tanh)": (q_tanh, round_epsilon, 0.05),
    "ABiSAM(log)": (q_log, adaptive_epsilon, 2.0),
    "ABiSAM(tanh)": (q_tanh, adaptive_epsilon, 2.0),
}
