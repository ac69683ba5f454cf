"""The lines of Python that train in the same way in one's own code."""

from __future__ import annotations

from bisam.integrations.methods import VARIANTS
from bisam.lab.config import Config
from bisam.lab.methods import METHODS


def lines(config: Config) -> str:
    """The whole training; `model` and `loader` are to be written before it, as its first line says.

    >>> print(lines(Config(method="bisam-log", rho=0.1, label_smoothing=0.0, precision="fp32")))
    # before these lines: model, your network, and loader, shuffled batches (x, y) of 128 samples
    import bisam, torch
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0005)
    optimizer = bisam.BiSAM(base, model, rho=0.1, phi="log")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    for epoch in range(200):
        for x, y in loader:
            optimizer.minimize(x, y)
        schedule.step()
    """
    by_step, chosen = config.schedule == "linear", config.epoch_steps is not None
    endless = "batches = itertools.chain.from_iterable(itertools.repeat(loader))"  # through the data as often as needed
    batches = f"itertools.islice(batches, {config.epoch_steps})" if chosen else "loader"
    return "\n".join(
        [
            f"# before these lines: model, your network, and loader, shuffled batches (x, y) of {config.batch} samples",
            f"import bisam, {'itertools, ' * chosen}torch",
            f"base = {_base(config)}",
            f"optimizer = {_optimizer(config)}",
            *_schedule(config),
            *([endless] if chosen else []),
            f"for epoch in range({config.epochs}):",
            f"    for x, y in {batches}:",
            "        optimizer.minimize(x, y)",
            f"{'    ' * by_step}    schedule.step()",
        ]
    )


def _base(config: Config) -> str:
    if config.optimizer == "adamw":
        return f"torch.optim.AdamW(model.parameters(), {_set(config, 'lr', 'weight_decay')})"
    return f"torch.optim.SGD(model.parameters(), {_set(config, 'lr', 'momentum', 'weight_decay')})"


def _optimizer(config: Config) -> str:
    variant, method = VARIANTS[config.method], METHODS[config.method]
    name_of_class = getattr(variant, "func", variant).__name__  # tanh is an argument of the same class
    options, fields = [_set(config, "rho")], method.fields
    if method.phi:
        options.append(f'phi="{method.phi}"')
    for name, default in (("mu", None), ("alpha", 0.1), ("eta", 0.0), ("beta", 0.5), ("gamma", 0.5)):
        if name in fields and getattr(config, name) != default:
            options.append(_set(config, name))
    if config.label_smoothing:
        options.append(f"descent=bisam.CrossEntropy({_set(config, 'label_smoothing')})")
    shared = [name for name in ("micro_batch", "every") if name in fields and getattr(config, name) is not None]
    options += [_set(config, name) for name in shared]
    if "start" in fields:
        options += _window(config)
    if config.clip_norm is not None:
        options.append(_set(config, "clip_norm"))
    if config.precision == "bf16":
        options.append("autocast=torch.bfloat16")
    return f"bisam.{name_of_class}(base, model, {', '.join(options)})"


def _window(config: Config) -> list[str]:
    """`start` and `stop` as numbers of steps, as the lab rounds them: one step at least perturbs."""
    steps = _steps(config)
    first = f"min(round({_number(config.start)} * {steps}), {steps} - 1)"
    found = [f"start={first}"] if config.start else []
    if config.stop < 1:
        least = f"{first} + 1" if config.start else "1"
        found.append(f"stop=max(round({_number(config.stop)} * {steps}), {least})")
    return found


def _schedule(config: Config) -> list[str]:
    """`bisam.lab.config.rate` by torch's schedulers."""
    place, rising = "torch.optim.lr_scheduler", config.warmup_epochs
    if config.schedule == "linear":
        return [
            f"steps = {_steps(config)}",
            f"rising = round({_number(config.warmup)} * steps)",
            # the schedule steps once more after the last update, where all steps may have been of the warm-up
            "rate = lambda step: (step + 1) / rising if step < rising else (steps - step) / max(1, steps - rising)",
            f"schedule = {place}.LambdaLR(optimizer, rate)",
        ]
    cosine = f"{place}.CosineAnnealingLR(optimizer, T_max={config.epochs - rising})"
    rise = f"{place}.LambdaLR(optimizer, lambda epoch: (epoch + 1) / {rising})"
    if rising in (0, config.epochs):  # torch's cosine cannot have no epochs
        return [f"schedule = {rise if rising else cosine}"]
    return [f"rise = {rise}", f"schedule = {place}.SequentialLR(optimizer, [rise, {cosine}], [{rising}])"]


def _steps(config: Config) -> str:
    """The number of all steps."""
    return f"{config.epochs} * {'len(loader)' if config.epoch_steps is None else config.epoch_steps}"


def _set(config: Config, *names: str) -> str:
    return ", ".join(f"{name}={_number(getattr(config, name))}" for name in names)


def _number(value: float) -> str:
    """With all digits.

    >>> _number(1.0), _number(2e-05), _number(0.12345678)
    ('1', '2e-05', '0.12345678')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
