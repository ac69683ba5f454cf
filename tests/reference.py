"""The equations again, as plainly as they can be written, in float64: what the library must agree with.

Nothing here is imported from bisam. Losses are loops over samples, steps are `torch.autograd.grad` and arithmetic.
"""

import math
from contextlib import contextmanager

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


# The other variants. `ascent` is any of the three objectives; each step is given a dict for its memory.


def each(objective, logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([objective(z.unsqueeze(0), y.unsqueeze(0)) for z, y in zip(logits, labels, strict=True)])


def gradient(model: nn.Module, x: Tensor, y: Tensor, objective) -> list[Tensor]:
    return list(torch.autograd.grad(objective(model(x), y), list(model.parameters())))


def dot(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


@contextmanager
def without_trace(model: nn.Module):
    """Restores the buffers afterwards."""
    buffers = [b.clone() for b in model.buffers()]
    yield
    for b, saved in zip(model.buffers(), buffers, strict=True):
        b.copy_(saved)


@contextmanager
def moved(model: nn.Module, epsilon: list[Tensor]):
    """At w + ε; restores weights and buffers afterwards."""
    weights = [p.detach().clone() for p in model.parameters()]
    with without_trace(model):
        for p, w, e in zip(model.parameters(), weights, epsilon, strict=True):
            p.data = w + e
        yield
        for p, w in zip(model.parameters(), weights, strict=True):
            p.data = w


def update(model: nn.Module, base: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g
    base.step()


def ball(gradients: list[Tensor], rho: float) -> list[Tensor]:
    return round_epsilon([], gradients, rho)


def msam(model, base, x, y, ascent, memory, rho=0.05, m=6) -> None:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for xs, ys in zip(x.split(m), y.split(m), strict=True):
        with moved(model, ball(gradient(model, xs, ys, ascent), rho)):
            own = gradient(model, xs, ys, cross_entropy)
        total = [t + len(xs) / len(x) * g for t, g in zip(total, own, strict=True)]
    update(model, base, total)


def esam(model, base, x, y, ascent, memory, rho=0.05, beta=0.5, gamma=0.5) -> None:
    params = list(model.parameters())
    seeds = memory.setdefault("generator", torch.Generator().manual_seed(torch.initial_seed() ^ 0x5A4D))
    generator = torch.Generator().manual_seed(torch.randint(2**62, (1,), generator=seeds).item())
    draws = torch.rand(len(params), generator=generator)
    kept = [d < beta or d == draws.min() for d in draws]
    logits = model(x)
    before = each(ascent, logits, y).detach()
    g = torch.autograd.grad(ascent(logits, y), params)
    norm = math.sqrt(sum(float((t * t).sum()) for t, k in zip(g, kept, strict=True) if k))
    epsilon = [rho / beta * t / norm if k else torch.zeros_like(t) for t, k in zip(g, kept, strict=True)]
    with moved(model, epsilon):
        rise = each(ascent, model(x), y).detach() - before
        chosen = rise.argsort(descending=True)[: math.ceil(gamma * len(x))]
        descent = gradient(model, x[chosen], y[chosen], cross_entropy)
    update(model, base, descent)


def ksam(model, base, x, y, ascent, memory, rho=0.05) -> None:
    chosen = each(cross_entropy, model(x), y).detach().argsort(descending=True)[: len(x) // 2]
    x, y = x[chosen], y[chosen]
    with without_trace(model):
        epsilon = ball(gradient(model, x, y, ascent), rho)
    with moved(model, epsilon):
        descent = gradient(model, x, y, cross_entropy)
    update(model, base, descent)


def rsam(model, base, x, y, ascent, memory, rho=0.05, sigma=0.01) -> None:
    seeds = memory.setdefault("generator", torch.Generator().manual_seed(torch.initial_seed() ^ 0x5A4D))
    generator = torch.Generator().manual_seed(torch.randint(2**62, (1,), generator=seeds).item())
    delta = []
    for w in (p.detach() for p in model.parameters()):
        noise = torch.empty_like(w).normal_(generator=generator)
        filters = w if w.dim() > 1 else w.unsqueeze(0)
        scale = torch.stack([sigma * f.norm() / math.sqrt(f.numel()) for f in filters])
        delta.append(noise * scale.view(-1, *[1] * (w.dim() - 1)) if w.dim() > 1 else noise * scale)
    buffers = None
    with moved(model, delta):
        g = gradient(model, x, y, ascent)
        buffers = [b.clone() for b in model.buffers()]
    for b, value in zip(model.buffers(), buffers, strict=True):  # the first pass is the one whose statistics stay
        b.copy_(value)
    with moved(model, [d + e for d, e in zip(delta, ball(g, rho), strict=True)]):
        descent = gradient(model, x, y, cross_entropy)
    update(model, base, descent)


def gsam(model, base, x, y, ascent, memory, rho=0.05, alpha=0.4) -> None:
    lr = base.param_groups[0]["lr"]
    radius = rho / 2 + (rho - rho / 2) * lr / memory.setdefault("lr_max", lr)
    with without_trace(model):
        g = gradient(model, x, y, cross_entropy)
    with moved(model, ball(gradient(model, x, y, ascent), radius)):
        perturbed = gradient(model, x, y, cross_entropy)
    along = dot(g, perturbed) / dot(perturbed, perturbed)
    update(model, base, [p - alpha * (t - along * p) for p, t in zip(perturbed, g, strict=True)])


def looksam(model, base, x, y, ascent, memory, rho=0.05, every=2, alpha=0.7) -> None:
    memory["step"] = memory.get("step", -1) + 1
    if memory["step"] % every == 0:
        with without_trace(model):
            g = gradient(model, x, y, cross_entropy)
        with moved(model, ball(gradient(model, x, y, ascent), rho)):
            perturbed = gradient(model, x, y, cross_entropy)
        cosine = dot(g, perturbed) / math.sqrt(dot(g, g) * dot(perturbed, perturbed))
        along = math.sqrt(dot(perturbed, perturbed)) * cosine / math.sqrt(dot(g, g))
        memory["g_v"] = [p - along * t for p, t in zip(perturbed, g, strict=True)]
        update(model, base, perturbed)
    else:
        g, v = gradient(model, x, y, cross_entropy), memory["g_v"]
        factor = alpha * math.sqrt(dot(g, g)) / math.sqrt(dot(v, v))
        update(model, base, [t + factor * u for t, u in zip(g, v, strict=True)])


def friendlysam(model, base, x, y, ascent, memory, rho=0.05, sigma=1.0, decay=0.9) -> None:
    g = gradient(model, x, y, ascent)
    mean = memory.get("mean")
    memory["mean"] = g if mean is None else [decay * m + (1 - decay) * t for m, t in zip(mean, g, strict=True)]
    along = g if mean is None else [t - sigma * m for t, m in zip(g, mean, strict=True)]
    with moved(model, ball(along, rho)):
        descent = gradient(model, x, y, cross_entropy)
    update(model, base, descent)


def vasso(model, base, x, y, ascent, memory, rho=0.05, theta=0.9) -> None:
    g = gradient(model, x, y, ascent)
    d = memory.get("d", g)
    memory["d"] = [(1 - theta) * m + theta * t for m, t in zip(d, g, strict=True)]
    with moved(model, ball(memory["d"], rho)):
        descent = gradient(model, x, y, cross_entropy)
    update(model, base, descent)


def fisher_sam(model, base, x, y, ascent, memory, rho=0.1, eta=1.0) -> None:
    g = gradient(model, x, y, ascent)
    natural = [t / (1 + eta * t**2) for t in g]
    length = math.sqrt(dot(g, natural))
    with moved(model, [rho * t / length for t in natural]):
        descent = gradient(model, x, y, cross_entropy)
    update(model, base, descent)


def periodic(model, base, x, y, ascent, memory, rho=0.05, every=2) -> None:
    memory["step"] = memory.get("step", -1) + 1
    if memory["step"] % every == 0:
        step(model, base, x, y, ascent, round_epsilon, rho)
    else:
        update(model, base, gradient(model, x, y, cross_entropy))


def wsam(model, base, x, y, ascent, memory, rho=0.05, gamma=0.9) -> None:
    with without_trace(model):
        g = gradient(model, x, y, cross_entropy)
    with moved(model, ball(gradient(model, x, y, ascent), rho)):
        perturbed = gradient(model, x, y, cross_entropy)
    update(model, base, [t + gamma / (1 - gamma) * (p - t) for p, t in zip(perturbed, g, strict=True)])


def momentum_sam(model, base, x, y, rho=0.3) -> None:
    """One pass; its batch statistics stay."""
    weights = [p.detach().clone() for p in model.parameters()]
    states = [base.state[p] for p in model.parameters()]
    momenta = [s.get("momentum_buffer", s.get("exp_avg")) for s in states]
    if momenta[0] is not None:
        for p, w, e in zip(model.parameters(), weights, ball(momenta, rho), strict=True):
            p.data = w - e
    descent = gradient(model, x, y, cross_entropy)
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data = w
    update(model, base, descent)


STEPS = {
    "WSAM": wsam,
    "mSAM": msam,
    "ESAM": esam,
    "KSAM": ksam,
    "RSAM": rsam,
    "GSAM": gsam,
    "LookSAM": looksam,
    "FriendlySAM": friendlysam,
    "VaSSO": vasso,
    "FisherSAM": fisher_sam,
    "periodic": periodic,
}
OBJECTIVES = {"cross entropy": cross_entropy, "log": q_log, "tanh": q_tanh}
