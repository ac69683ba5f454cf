"""One optimizer around another: parameter groups, state, checkpoints and hooks are those of the base optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bisam.engine.checks import Start, check_group, warn_caller
from bisam.engine.combined import Combined, leaves
from bisam.engine.loading import load
from bisam.merge import Merge
from bisam.numbers import is_of_numpy
from bisam.perturbation import Perturbation
from bisam.tensors.memory import Memory
from bisam.tensors.snapshot import Snapshot


class Wrapper(torch.optim.Optimizer):
    """The torch.optim.Optimizer interface."""

    base: torch.optim.Optimizer
    perturbation: Perturbation
    merge: Merge
    every: int
    start: Start
    stop: int | None
    _weights: Snapshot
    """The weights at w, while they are perturbed."""
    _running: bool
    """Whether `step` or `minimize` is running: closures cannot begin, end or give up another one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self._steps = 0
        self._kept: list[dict[str, Any]] = []
        # not Optimizer.__init__, which makes parameter groups and a state: those are the base optimizer's
        super().__setstate__({"defaults": base.defaults})
        self._attach()
        self._complete_groups()

    @property
    def perturbed(self) -> bool:
        """Whether the weights are at w + ε now."""
        return self._weights.originals is not None

    @property
    def skips_steps(self) -> bool:
        """Whether there may be steps that do not perturb."""
        return self.every > 1 or self.start != 0 or self.stop is not None

    def _attach(self) -> None:
        """Tie the base optimizer to this one: its checkpoint hooks are shared."""
        for optimizer in leaves(self.base):
            optimizer.__dict__["_sharpness_aware"] = True
        for name in _CHECKPOINT_HOOKS:
            setattr(self, name, getattr(self.base, name))
        this = weakref.ref(self)

        def calling(method: Callable[[Wrapper], None]) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                wrapper = this()
                if wrapper is not None:
                    method(wrapper)

            return hook

        for optimizer in leaves(self.base):
            optimizer.register_load_state_dict_pre_hook(calling(Wrapper._keep_options))
            optimizer.register_load_state_dict_post_hook(calling(Wrapper._put_options_back), prepend=True)

    # One list of groups and one state, the base optimizer's, also after either optimizer replaces them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if isinstance(self.base, Combined):
            raise AttributeError(
                "param_groups of several base optimizers cannot be replaced as a whole: change the groups of each"
            )
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of the base optimizer, which schedule-free ones have."""
        if name in ("train", "eval") and hasattr(self.__dict__.get("base"), name):
            return getattr(self.base, name)
        if self._is_option_of_groups(name):
            raise AttributeError(
                f'{name} is an option of the parameter groups, like lr: read optimizer.param_groups[0]["{name}"]'
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse `optimizer.rho = 0.2`: the parameter groups would keep their own.

        A framework may put this optimizer into an object of a class derived from it, which reads attributes from here.
        Methods that run on that object set them here too: the object would hide their values from the optimizer.
        """
        inside = None if "base" in self.__dict__ else _optimizer_inside(self)
        if inside is not None and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(inside, name, value)
            return
        if name not in self.__dict__ and self._is_option_of_groups(name):
            raise AttributeError(
                f"{name} is an option of the parameter groups, like lr: set it in each of them, "
                f'for group in optimizer.param_groups: group["{name}"] = {value!r}'
            )
        super().__setattr__(name, value)

    def _is_option_of_groups(self, name: str) -> bool:
        """Whether the perturbation reads this name from the groups, and the class has no attribute of that name."""
        if "defaults" not in self.__dict__:  # it is being built: attributes get their first values
            return False
        perturbation = self.__dict__.get("perturbation")
        return perturbation is not None and name in perturbation.defaults and not hasattr(type(self), name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_inside_step("add_param_group()")
        if isinstance(param_group, dict):  # else torch refuses it
            check_group(param_group, self.base, self.perturbation)
        self.base.add_param_group(param_group)
        self._complete_groups()

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, ρ and the like in its groups, and the variant's memory if it has one."""
        self._refuse_while_perturbed("state_dict()")
        self._complete_groups()
        state = self.base.state_dict()
        for group in state["param_groups"]:  # a copy. torch.load refuses NumPy's numbers, as np.linspace gives for ρ
            group.update({name: value.item() for name, value in group.items() if is_of_numpy(value)})
        memories = self._memories()
        if memories or self.skips_steps:
            params = self._parameters()
            memory = {name: memory.state_dict(params) for name, memory in memories.items()}
            state["sharpness"] = {"steps": self._steps, "memory": memory}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a state dict of the base optimizer alone: then ρ and the like stay."""
        self._refuse_inside_step("load_state_dict()")
        self._refuse_while_perturbed("load_state_dict()")
        refuse_other_dicts(state_dict)
        self._refuse_two_step_class(state_dict)
        self._refuse_memory_of_another(state_dict)
        self._refuse_ball_of_another(state_dict)
        self._warn_without_steps(state_dict)
        sharpness = state_dict.get("sharpness", {"steps": 0, "memory": {}})
        steps, params = int(sharpness["steps"]), self._parameters()
        memories = {name: Memory.from_state_dict(entry, params) for name, entry in sharpness["memory"].items()}
        self._keep_options()
        of_base = {key: value for key, value in state_dict.items() if key != "sharpness"}
        if isinstance(self.base, Combined):
            self.base.load_state_dict(of_base)
        else:
            load(self.base, of_base)
        self._put_options_back()  # again, for a base with a way of its own to load runs no hooks
        self._steps = steps
        for name, part in self._parts_with_memory().items():
            part.memory = memories.get(name, Memory())

    # What a variant adds to it.

    def _keep_options(self) -> None:
        """Before the base optimizer loads a checkpoint, which may be one of its own: then ρ and the like stay."""
        self._complete_groups()
        self._kept = [{name: group[name] for name in self.perturbation.defaults} for group in self.param_groups]

    def _put_options_back(self) -> None:
        for group, kept in zip(self.param_groups, self._kept, strict=True):
            for name, value in kept.items():
                group.setdefault(name, value)

    def _complete_groups(self) -> None:
        """Give each group the options that it does not set: it may come from the base optimizer or its checkpoint."""
        for group in self.base.param_groups:
            for name, value in self.perturbation.defaults.items():
                group.setdefault(name, value)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.base.param_groups for param in group["params"]]

    def _parts_with_memory(self) -> dict[str, Any]:
        """The parts of this variant that remember, by name."""
        parts: list[Any] = [self.merge, *parts_of(self.perturbation)]
        return {type(part).__name__: part for part in parts if part.memory is not None}

    def _memories(self) -> dict[str, Memory]:
        return {name: part.memory for name, part in self._parts_with_memory().items()}

    def _refuse_memory_of_another(self, state_dict: dict[str, Any]) -> None:
        """A checkpoint of the base optimizer alone has no memory and no ρ; any other must have this variant's."""
        ours = set(self._memories())
        sharpness = state_dict.get("sharpness")
        if sharpness is not None and not (isinstance(sharpness, dict) and {"steps", "memory"} <= sharpness.keys()):
            raise ValueError(f"the checkpoint's memory is damaged: {str(sharpness)[:80]}")
        theirs = None if sharpness is None else set(sharpness["memory"])
        of_base_alone = theirs is None and all("rho" not in group for group in state_dict["param_groups"])
        if not of_base_alone and (theirs or set()) != ours:
            raise ValueError(
                f"this checkpoint is of another variant: it has {_memory_of(theirs or set())}, and "
                f"{type(self).__name__} has {_memory_of(ours)}. Load it into the variant that wrote it, or, for the "
                "base optimizer's state alone, call optimizer.base.load_state_dict(checkpoint)"
            )

    def _refuse_ball_of_another(self, state_dict: dict[str, Any]) -> None:
        """SAM must not become ASAM by a checkpoint, nor the reverse; groups may differ among themselves."""
        self._complete_groups()
        theirs, ours = (
            {bool(group["adaptive"]) if "adaptive" in group else None for group in groups if "rho" in group}
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        if theirs and ours and not theirs & ours:
            kind = {True: "adaptive (ASAM)", False: "round (SAM)", None: "neither round nor adaptive"}
            there, here = (" or ".join(sorted(kind[one] for one in balls)) for balls in (theirs, ours))
            raise ValueError(
                f"this checkpoint is of another variant: its ball is {there}, and that of "
                f"{type(self).__name__} is {here} here. Load it into the variant that wrote it"
            )

    def _warn_without_steps(self, state_dict: dict[str, Any]) -> None:
        is_ours = any("rho" in group for group in state_dict["param_groups"])
        if self.skips_steps and is_ours and "sharpness" not in state_dict:
            warn_caller(
                "the checkpoint is of an optimizer without start=, stop= and every=, and has no number of steps: they "
                "count from 0 here, so that start= and stop= are counted from this checkpoint on"
            )

    def _refuse_two_step_class(self, state_dict: dict[str, Any]) -> None:
        """Its state is copies of weights, not what the base optimizer keeps."""
        if any(TWO_STEP_KEYS & entry.keys() for entry in state_dict["state"].values()):
            raise ValueError(
                "this checkpoint is of the widely copied two-step SAM class: it holds copies of weights instead of the "
                "base optimizer's state. Load it into bisam.compat.SAM, which reads the base optimizer's part"
            )

    def _refuse_inside_step(self, method: str) -> None:
        if self._running:
            raise RuntimeError(
                f"{method} called by a closure, inside of a running step. The step runs both passes and the update: a "
                "closure computes the loss, calls backward() and returns it"
            )

    def _refuse_while_perturbed(self, method: str) -> None:
        if self.perturbed:
            self._refuse_inside_step(method)
            raise RuntimeError(
                f"{method} called between ascend() and descend(): the weights are perturbed now. Call descend() first, "
                "or restore() to give the step up."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()


def _optimizer_inside(holder: Wrapper) -> Wrapper | None:
    """The optimizer in an object that has none of its attributes, as frameworks derive from its class."""
    return next((value for value in vars(holder).values() if isinstance(value, Wrapper)), None)


def parts_of(perturbation: Perturbation) -> list[Any]:
    """The perturbation, and those that it goes around."""
    parts: list[Any] = [perturbation]
    while hasattr(parts[-1], "inner"):
        parts.append(parts[-1].inner)
    return parts


def refuse_other_dicts(state_dict: Any) -> None:
    """A model's state dict, or a whole checkpoint that has the optimizer's in it."""
    if isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys():
        return
    keys = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
    raise ValueError(
        f"an optimizer's state dict has the keys state and param_groups, got {keys[:80] or 'an empty dict'}. Of a "
        'checkpoint with several parts give the optimizer\'s, such as checkpoint["optimizer"]'
    )


def _memory_of(parts: set[str]) -> str:
    """
    >>> _memory_of({"Reuse"}), _memory_of(set())
    ('the memory of Reuse', 'none')
    """
    return f"the memory of {', '.join(sorted(parts))}" if parts else "none"


TWO_STEP_KEYS = frozenset({"old_p", "e_w"})
"""What the two-step SAM class keeps for each parameter."""

_CHECKPOINT_HOOKS = [
    f"_optimizer_{action}state_dict_{moment}_hooks" for action in ("", "load_") for moment in ("pre", "post")
]
