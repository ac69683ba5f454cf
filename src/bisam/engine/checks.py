"""What is refused before anything has changed, with the reason and the remedy."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bisam.engine.criterion import Criterion, Pass
from bisam.engine.objective_options import setting
from bisam.merge import Merge
from bisam.numbers import is_count, is_number, is_whole
from bisam.objectives import LowerBound
from bisam.perturbation import Perturbation
from bisam.plan import Plan
from bisam.tensors.distributed import GradientSync

Closure = Callable[[], Any]
Start = int | Callable[[int], bool]
"""The first step that perturbs, or a function that returns whether a step does."""

FRAMEWORKS = "docs/frameworks.md"
"""The page on Lightning, Accelerate and others."""

DEPTH = 8
"""Frames between a caller and a check of it: decorators of `step` by torch, schedulers and frameworks."""

CALLER_CHECKS: list[Callable[[Any, Any], None]] = []
"""Checks of the caller of `step`, called with the optimizer and the closure. `bisam.integrations.callers` adds one."""


def check_base(base: Any, perturbation: Perturbation) -> None:
    """Raise if this cannot be the base optimizer, or an option of its groups is invalid."""
    if hasattr(base, "ascend") or hasattr(base, "first_step"):
        raise TypeError(
            f"the base optimizer {type(base).__name__} is sharpness-aware already. Give a plain one, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if not isinstance(base, torch.optim.Optimizer):
        given = f"the class {base.__name__}" if isinstance(base, type) else type(base).__name__
        if isinstance(base, (list, tuple)):
            given = f"a {given} of {', '.join(sorted({type(one).__name__ for one in base}))}"
        raise TypeError(
            f"base must be a torch optimizer, or a list of them, got {given}. Build it first, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1); bisam.compat.SAM takes parameters and a class"
        )
    missing = [name for name in ("param_groups", "state", "defaults") if not hasattr(base, name)]
    missing += [] if hasattr(base, "_optimizer_state_dict_pre_hooks") else ["step hooks"]
    if missing:
        raise TypeError(
            f"{type(base).__name__} is a torch optimizer without {', '.join(missing)}, as wrappers of another one may "
            "be. Give the optimizer that it wraps as the base, and wrap the sharpness-aware one"
        )
    if perturbation.reads_base_state and any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(base).__mro__):
        raise TypeError(
            "ZeroRedundancyOptimizer keeps on each rank the state of some parameters only, and the perturbation needs "
            "that of all. Use fully_shard (FSDP2), or a variant with an ascent pass, such as SAM"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates its closure many times in a step and cannot be a base optimizer")
    if "_sharpness_aware" in base.__dict__:
        raise TypeError(
            f"this {type(base).__name__} is the base of a sharpness-aware optimizer already, whose options are in its "
            "parameter groups. Build a new one"
        )
    if not any(group["params"] for group in base.param_groups):
        raise ValueError("the base optimizer has an empty parameter list: give it the parameters to train")
    clash = sorted(perturbation.defaults.keys() & base.defaults.keys())
    if clash:
        raise ValueError(
            f"{type(base).__name__} has its own option {', '.join(clash)}, and the perturbation stores "
            f"{', '.join(clash)} in the same parameter groups: use another base optimizer"
        )
    for group in base.param_groups:
        check_group(group, base, perturbation)


def check_group(group: dict[str, Any], base: torch.optim.Optimizer, perturbation: Perturbation) -> None:
    """Raise if a parameter group cannot be trained."""
    for key in group.keys() - base.defaults.keys() - perturbation.defaults.keys():
        for name in perturbation.defaults:
            if isinstance(key, str) and is_misspelt(key, name):
                raise ValueError(f"a parameter group has the option {key!r}: did you mean {name!r}?")
    options = {**perturbation.defaults, **base.defaults, **group}
    for name in perturbation.defaults:
        if isinstance(options[name], Tensor) and options[name].dim() == 0:  # read here once, not in every step
            perturbation.check({**options, name: options[name].item()})
    perturbation.check(options)
    if options.get("maximize"):
        raise ValueError(
            "a parameter group of the base optimizer has maximize=True, so that the perturbation would "
            "lead to the best point nearby, not the worst. Minimise the negative instead"
        )
    params = group["params"] if isinstance(group.get("params"), list) else []
    if len({*map(id, params)}) < len(params):
        most, count = Counter(params).most_common(1)[0]
        raise ValueError(
            f"a parameter of shape {tuple(most.shape)} is in a parameter group {count} times, as tied weights are in "
            "the lists of two modules, and would be perturbed and updated as often. Give it once: "
            "list(dict.fromkeys(params))"
        )


def is_misspelt(key: str, name: str) -> bool:
    """Whether they differ in capitals or two neighbouring letters; longer names also in one letter.

    >>> [is_misspelt(key, "rho") for key in ("roh", "Rho", "rho_max", "who")]
    [True, True, False, False]
    >>> [is_misspelt(key, "adaptive") for key in ("adaptve", "adaptiive", "adapt")]
    [True, True, False]
    """
    key, name = key.lower(), name.lower()
    exchanged = {name[:i] + name[i : i + 2][::-1] + name[i + 2 :] for i in range(len(name) - 1)}
    if key == name or key in exchanged:
        return True
    if len(name) <= 3 or any(letter.isdigit() for letter in key):  # beta2 is not a misspelt beta1
        return False
    replaced = len(key) == len(name) and sum(a != b for a, b in zip(key, name, strict=True)) == 1
    return replaced or key in _with_one_less(name) or name in _with_one_less(key)


def _with_one_less(word: str) -> set[str]:
    """
    >>> sorted(_with_one_less("rho"))
    ['ho', 'rh', 'ro']
    """
    return {word[:i] + word[i + 1 :] for i in range(len(word))}


def refuse_unknown_options(cls: type, unknown: dict[str, Any]) -> None:
    """Name the class that was called, the nearest options, and where options of the base optimizer go."""
    known = {
        name
        for ancestor in cls.__mro__
        if "__init__" in vars(ancestor) and ancestor.__module__.startswith("bisam")
        for name, parameter in inspect.signature(ancestor).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    } - {"perturbation", "plan", "merge"}
    (name, *_) = unknown
    near = difflib.get_close_matches(name, known, n=2)
    meant = f": did you mean {' or '.join(near)}?" if near else f": choose from {', '.join(sorted(known))}."
    raise TypeError(
        f"{cls.__name__} has no option {name!r}{meant} Options of the base optimizer, such as lr, go to it: "
        f"{cls.__name__}(torch.optim.SGD(model.parameters(), lr=0.1), model)"
    )


def check_options(clip_norm: Any, scaler: Any, autocast: Any, micro_batch: Any, switches: dict[str, Any]) -> None:
    if not (clip_norm is None or (is_number(clip_norm) and clip_norm > 0)):
        raise ValueError(f"clip_norm must be a positive number or None, got {clip_norm!r}")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise TypeError(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}")
    if not (micro_batch is None or is_count(micro_batch)):
        raise ValueError(f"micro_batch must be a whole number of samples, at least 1, or None, got {micro_batch!r}")


def check_stop(stop: Any, start: Start) -> int | None:
    if stop is None:
        return None
    if not is_whole(stop, least=0):
        raise ValueError(
            f"stop must be the number of a step, from 0 on, or None, got {stop!r}. To perturb in the first half of a "
            "training, give stop=int(0.5 * steps)"
        )
    if not callable(start) and stop <= start:
        raise ValueError(f"no step would perturb: stop must come after start, got start={start} and stop={stop}")
    return int(stop)


def check_start(start: Any) -> Start:
    if callable(start):
        return start
    if not is_whole(start, least=0):
        raise ValueError(
            f"start must be the number of a step, from 0 on, or a function of that number, got {start!r}. To perturb "
            "in the last quarter of a training, give start=int(0.75 * steps)"
        )
    return int(start)


def check_ascent(perturbation: Perturbation, name: str, ascent: Any, micro_batch: Any) -> None:
    """Raise if a variant without an ascent pass has an option of that pass."""
    if perturbation.needs_ascent:
        return
    if ascent is not None:
        raise ValueError(f"{name} has no ascent pass, so ascent= has no meaning: remove it, got {ascent!r}")
    if micro_batch is not None:
        raise ValueError(f"{name} perturbs all samples alike, so micro_batch= has no meaning: use accumulate=")


def refuse_lazy(params: Sequence[Tensor], name: str) -> None:
    """Parameters without a shape, where the weights are saved before the first forward pass gives them one."""
    if any(nn.parameter.is_lazy(param) for param in params):
        raise RuntimeError(
            f"the model has lazy layers, whose parameters get their shapes in the first forward pass, and {name} saves "
            "the weights before it: run the model on a batch first, with torch.no_grad()"
        )


class Variant(Protocol):
    """What decides whether a form of the step can be used."""

    base: torch.optim.Optimizer
    criterion: Criterion
    perturbation: Perturbation
    plan: Plan
    merge: Merge
    micro_batch: int | None
    scaler: torch.amp.GradScaler | None
    same_dropout: bool

    @property
    def skips_steps(self) -> bool: ...


def check_sees_batch(variant: Variant, method: str) -> None:
    """Raise if the variant needs the samples, which `method` does not have."""
    if variant.plan.chooses or variant.micro_batch is not None:
        raise RuntimeError(
            f"{type(variant).__name__} chooses samples, or perturbs micro-batches, and cannot see them in {method}. "
            f"Use minimize(x, y); inside of a framework see {FRAMEWORKS}"
        )


def check_no_autocast(autocast: torch.dtype | None, where: str) -> None:
    """Raise if `autocast=` would have no effect: only `minimize` runs the model."""
    if autocast is not None:
        raise RuntimeError(
            f"autocast= is for minimize(x, y), which runs the model, and has no effect on {where}: remove it, and run "
            f"the model and the loss inside of `with torch.autocast(device, {autocast})`"
        )


def check_by_hand(variant: Variant) -> None:
    """Raise if the variant does something outside `ascend` and `descend`."""
    check_sees_batch(variant, "ascend()")
    merged = variant.merge.needs_gradient_at_weights or variant.skips_steps
    if variant.same_dropout or variant.perturbation.acts_before_first_pass or merged:
        reason = "same_dropout" if variant.same_dropout else type(variant).__name__
        raise RuntimeError(
            f"{reason} has something to do before the first pass, or after the second, that ascend() and descend() "
            "cannot do between them. Use step(closure) or minimize(x, y), which run the passes; inside of a framework "
            f"see {FRAMEWORKS}"
        )


def warn_of_rounding(dtypes: Iterable[torch.dtype]) -> None:
    """Warn of weights that round away small perturbations."""
    short = ", ".join(sorted(str(dtype) for dtype in dtypes if dtype.is_floating_point and dtype.itemsize < 4))
    if short:
        warn_caller(
            f"the weights are in {short} and cannot move by less than their rounding: most of a small perturbation is "
            "lost. Keep the weights in float32, and run the model under torch.autocast, as with "
            "autocast=torch.bfloat16. Hugging Face: from_pretrained(…, dtype=torch.float32)"
        )


def warn_of_label_ignored_by_one(criterion: Criterion) -> None:
    """Warn if the descent ignores another label than Q, such as that of padding, which Q would count."""
    ignored = setting(criterion.descent, "ignore_index")
    if isinstance(criterion.ascent, LowerBound) and ignored not in (None, criterion.ascent.ignore_index):
        ours = criterion.ascent.ignore_index
        remedy = f"the LowerBound too: ignore_index={ignored}"
        if ignored == -100:  # the default of both
            remedy = f"the descent too: descent=torch.nn.CrossEntropyLoss(ignore_index={ours})"
        warn_caller(f"the descent ignores the label {ignored}, and the ascent {ours}: give it to {remedy}")


def warn_of_averaged_ascent() -> None:
    warn_caller(
        "the first pass has averaged its gradients over the ranks, so all are perturbed alike. To perturb each rank by "
        'its own gradient, run the first pass inside of model.no_sync(); to perturb all alike, give sharpness="global"'
    )


def refuse_loss_without_criterion(name: str) -> None:
    """The ascent pass of a bilevel variant did not compute the ascent's objective."""
    raise RuntimeError(
        f"{name} needs two losses, and the closure did not call its criterion: inside of the closure, replace "
        "F.cross_entropy(output, target) with optimizer.criterion(output, target). A closure that computes both "
        "losses by itself, by optimizer.phase, goes with bisam.SAM, which takes any loss. With the Hugging Face "
        "Trainer compute the loss by super().compute_loss(…), in Lightning by self.sharpness_loss(…): see "
        f"{FRAMEWORKS}"
    )


def explain_graph_of_first_pass(error: RuntimeError) -> None:
    """Raise with the remedy if this is torch's error for a graph that an earlier pass has used or outdated."""
    if "backward through the graph a second time" in str(error) or "modified by an inplace operation" in str(error):
        raise RuntimeError(
            "the closure calls backward() on a graph that was built before the weights moved. A step runs the closure "
            "twice, at w and at w + ε: run the model and compute the loss inside of the closure"
        ) from error


def has_no_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether there is no `torch.utils.checkpoint` with use_reentrant=True in its graph; False if it has no graph.

    Such a segment is one node of the graph. Its parameters have gradients only if an input of it requires one.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return False
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return bool(seen)


class WatchBuffers:
    """Which modules with batch statistics run in the first step of an optimizer that has no model."""

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._handle = register_module_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, _: Any) -> None:
        may_update = module.training and not isinstance(module, _WITH_CLASS_WEIGHTS)
        if may_update and any(buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
            self._found.add(type(module).__name__)

    def warn(self, name: str) -> None:
        if self._found:
            warn_caller(
                f"{', '.join(sorted(self._found))} may update buffers (batch statistics) in both passes of a step, and "
                f"without the model {name} cannot bring them back: give it, as in {name}(base, model)"
            )

    def stop(self) -> None:
        self._handle.remove()


_WITH_CLASS_WEIGHTS = (nn.modules.loss._Loss, LowerBound)
"""Whose buffers nothing updates."""


class RefuseUnknownReplicas:
    """Raise if the first step runs a DistributedDataParallel that is not the optimizer's model: it would average."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle = register_module_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise RuntimeError(
                f"the closure runs a model that DistributedDataParallel wraps, and {self._name} was not given the "
                "wrapper: all ranks would be perturbed alike. Set optimizer.model to the wrapped model, to perturb "
                f'each rank by its own gradient, or give sharpness="global". Inside of a framework see {FRAMEWORKS}'
            )

    def stop(self) -> None:
        self._handle.remove()


def warn_caller(message: str) -> None:
    """A warning at the line outside of bisam and torch that led to it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("bisam", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def warn_unless_criterion(variant: Variant) -> None:
    """By hand, the caller may have computed both losses without the criterion."""
    called = variant.criterion.current is not Pass.NONE and variant.criterion.telemetry.used_criterion()
    if variant.criterion.bilevel and not called:
        warn_caller(
            f"ascend() uses the gradients of the first pass, which did not call {type(variant).__name__}'s criterion. "
            "With one loss in both passes this is SAM: use optimizer.criterion(output, target)"
        )


def check_vectorize(variant: Variant, model: nn.Module | None, sync: GradientSync) -> None:
    """Raise if the micro-batches cannot run as one batched computation."""
    params = {param for group in variant.base.param_groups for param in group["params"]}
    if model is not None and not params <= {*model.parameters()}:
        raise ValueError("vectorize sees the model's parameters only, and the base optimizer has others beside them")
    more = (
        variant.plan.chooses
        or variant.perturbation.acts_before_first_pass
        or variant.merge.needs_gradient_at_weights
        or variant.scaler is not None
        or variant.same_dropout
    )
    if variant.micro_batch is None or more or not sync.is_alone:
        raise ValueError(
            "vectorize runs micro-batches at once: it needs micro_batch=, and works with perturbations of the ascent "
            "gradient alone (SAM, ASAM, Fisher SAM, Friendly SAM, VaSSO and their bilevel forms), in one process, "
            "without a GradScaler and without same_dropout"
        )


def check_caller(optimizer: Any, closure: Any) -> None:
    """Raise if a caller of `step` changes how the closure is used."""
    if torch.compiler.is_compiling():
        return  # the compiler cannot trace a look at the callers
    if closure is not None and _is_called_by_scaler(optimizer):
        raise TypeError(
            "GradScaler.step() unscales the gradients that are there before the passes of the step, and not those that "
            "the passes compute. Set optimizer.scaler to the GradScaler, and call optimizer.step(closure) in place of "
            "scaler.step(optimizer, closure) and scaler.update()"
        )
    for check in CALLER_CHECKS:
        check(optimizer, closure)


def _is_called_by_scaler(optimizer: Any) -> bool:
    code, frame = getattr(torch.amp.GradScaler.step, "__code__", None), sys._getframe(2)
    for _ in range(DEPTH):
        if frame.f_code is code and frame.f_locals.get("optimizer") is optimizer:
            return bool(frame.f_locals["self"].is_enabled())
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


@contextmanager
def refusing_third_pass() -> Iterator[None]:
    """A closure after `backward` runs without gradients: explain torch's error if it computes them."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise RuntimeError(
            "backward() has run both passes already, and the closure of this step() calls backward once more. Call "
            "step() without it"
        ) from error


def as_closures(closure: Closure | Sequence[Closure] | None) -> Sequence[Closure]:
    closures = [closure] if callable(closure) else closure
    if closures is None:
        raise TypeError(
            "step() needs a closure that computes the loss, calls backward() and returns it, because a step runs it "
            "twice. Without one, use minimize(x, y), or ascend() and descend() after your own backward passes. "
            "A GradScaler goes to the optimizer, as scaler=, in place of scaler.step(optimizer). "
            f"Inside of a framework see {FRAMEWORKS}; in place of the Hugging Face Trainer use SharpnessAwareTrainer "
            "of bisam.integrations.transformers"
        )
    if isinstance(closures, Tensor):
        raise TypeError("step() was given a loss. Give it the closure itself, step(closure), which it calls twice")
    if not (isinstance(closures, Sequence) and closures and all(callable(c) for c in closures)):
        raise TypeError(f"step() takes a closure or a non-empty list of closures, got {closure!r}")
    return closures
