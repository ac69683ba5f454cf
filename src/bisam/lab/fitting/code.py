"""The lines of Python that train in the same way in one's own code."""

from __future__ import annotations

from bisam.lab.config import Config
from bisam.lab.methods import METHODS

CLASSES = {
    "sam": "SAM", "bisam": "BiSAM", "asam": "ASAM", "abisam": "ABiSAM", "esam": "ESAM", "ebisam": "EBiSAM",
    "ksam": "KSAM", "looksam": "LookSAM", "msam": "MSAM",
}  # fmt: skip


def lines(config: Config) -> str:
    """The whole training, with `model` and `loader` in it.

    >>> print(lines(Config(method="bisam-log", rho=0.1, label_smoothing=0.0, precision="fp32")))
    import bisam, torch
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0005)
    optimizer = bisam.BiSAM(base, model, rho=0.1, phi="log")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    for epoch in range(200):
        for x, y in loader:
            optimizer.minimize(x, y)
        schedule.step()
    """
    by_step = config.schedule == "linear"
    return "\n".join(
        [
            "import bisam, torch",
            f"base = {_base(config)}",
            f"optimizer = {_optimizer(config)}",
            *_schedule(config),
            f"for epoch in range({config.epochs}):",
            "    for x, y in loader:",
            "        optimizer.minimize(x, y)",
            f"{'    ' * by_step}    schedule.step()",
        ]
    )


def _base(config: Config) -> str:
    if config.optimizer == "adamw":
        return f"torch.optim.AdamW(model.parameters(), lr={config.lr:g}, weight_decay={config.weight_decay:g})"
    return (
        f"torch.optim.SGD(model.parameters(), lr={config.lr:g}, momentum={config.momentum:g}, "
        f"weight_decay={config.weight_decay:g})"
    )


def _optimizer(config: Config) -> str:
    kind, _, phi = config.method.partition("-")
    options = [f"rho={config.rho:g}"]
    fields = METHODS[config.method].fields
    if phi:
        options.append(f'phi="{phi}"')
    for name, default in (("mu", None), ("alpha", 0.1), ("eta", 0.0), ("beta", 0.5), ("gamma", 0.5)):
        if name in fields and getattr(config, name) != default:
            options.append(f"{name}={getattr(config, name):g}")
    if config.label_smoothing:
        options.append(f"descent=bisam.CrossEntropy(label_smoothing={config.label_smoothing:g})")
    shared = [name for name in ("micro_batch", "every") if name in fields and getattr(config, name) is not None]
    options += [f"{name}={getattr(config, name)}" for name in shared]
    for name, default in (("start", 0.0), ("stop", 1.0)):
        if name in fields and getattr(config, name) != default:
            options.append(f"{name}=round({getattr(config, name):g} * {config.epochs} * len(loader))")
    if config.clip_norm is not None:
        options.append(f"clip_norm={config.clip_norm:g}")
    if config.precision == "bf16":
        options.append("autocast=torch.bfloat16")
    return f"bisam.{CLASSES[kind]}(base, model, {', '.join(options)})"


def _schedule(config: Config) -> list[str]:
    """`bisam.lab.config.rate` by torch's schedulers."""
    place, rising = "torch.optim.lr_scheduler", config.warmup_epochs
    if config.schedule == "linear":
        return [
            f"steps = {config.epochs} * len(loader)",
            f"rising = round({config.warmup:g} * steps)",
            "rate = lambda step: (step + 1) / rising if step < rising else (steps - step) / (steps - rising)",
            f"schedule = {place}.LambdaLR(optimizer, rate)",
        ]
    cosine = f"{place}.CosineAnnealingLR(optimizer, T_max={config.epochs - rising})"
    if not rising:
        return [f"schedule = {cosine}"]
    return [
        f"rise = {place}.LambdaLR(optimizer, lambda epoch: (epoch + 1) / {rising})",
        f"schedule = {place}.SequentialLR(optimizer, [rise, {cosine}], [{rising}])",
    ]
