"""Several base optimizers as one, each with parameters of its own: Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bisam.engine.loading import load, unchanged_on_error

Base = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""What a sharpness-aware optimizer goes around: an optimizer, or several that have no parameter in common."""


def combine(base: Any) -> Any:
    """One optimizer for a list of them; anything else as it is."""
    if not isinstance(base, (list, tuple)) or not all(isinstance(one, torch.optim.Optimizer) for one in base):
        return base
    optimizers = [part for one in base for part in leaves(one)]
    return optimizers[0] if len(optimizers) == 1 else Combined(optimizers)


def leaves(base: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that hold parameters: those of a combination, or the one itself."""
    return base.optimizers if isinstance(base, Combined) else [base]


class Combined(torch.optim.Optimizer):
    """Optimizers that step together. Parameter groups and state are theirs, in their order, and so is a checkpoint's.

    Examples:
        >>> a, b = torch.nn.Linear(2, 2).parameters()
        >>> both = Combined([torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=1e-3)])
        >>> [group["lr"] for group in both.param_groups]
        [0.1, 0.001]
    """

    optimizers: list[torch.optim.Optimizer]

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers:
            raise ValueError("base is an empty list: give an optimizer, or several")
        for number, one in enumerate(optimizers):
            _refuse_shared(one, _params(one), optimizers[:number])
        # not Optimizer.__init__, which makes parameter groups and a state
        self.__setstate__({"optimizers": [*optimizers], "defaults": _in_common([one.defaults for one in optimizers])})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:
        return _States(self.optimizers)

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        owned = [(self.state.owner(param), param, value) for param, value in state.items()]
        for one in self.optimizers:
            one.state = defaultdict(dict)
        for owner, param, value in owned:
            owner.state[param] = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for one in self.optimizers:
            vars(one)["add_param_group"] = partial(_add_param_group, weakref.ref(one), weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of those that have them, as schedule-free ones do."""
        optimizers = self.__dict__.get("optimizers", []) if name in ("train", "eval") else []
        methods = [getattr(one, name) for one in optimizers if hasattr(one, name)]
        if not methods:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(_call_all, methods)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        names = ", ".join(type(one).__name__ for one in self.optimizers)
        raise ValueError(
            f"there are several base optimizers ({names}): add the group to one of them, "
            "optimizer.base.optimizers[0].add_param_group(...)"
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("several optimizers cannot share a closure: step the sharpness-aware one with it")
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """In the form of one optimizer's: parameters are numbered through.

        What an optimizer saves beside the state of its parameters is an entry of the list "optimizers".
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        beside: list[dict[str, Any]] = []
        first = 0
        for one in self.optimizers:
            part = one.state_dict()
            count = len(_params(one))
            numbers = {number: first + number for number in range(count)}
            state.update({numbers[key]: value for key, value in part["state"].items() if key in numbers})
            groups += [{**group, "params": [numbers[n] for n in group["params"]]} for group in part["param_groups"]]
            beside.append(_without_parameters(part, numbers))
            first += count
        state_dict: dict[str, Any] = {"state": state, "param_groups": groups}
        if any(beside):
            state_dict["optimizers"] = beside
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()  # hooks may change it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"the checkpoint has {_sizes(groups)}, and the base optimizers have {_sizes(self.param_groups)}: "
                "build them as they were when it was saved"
            )
        beside = state_dict.get("optimizers", [{}] * len(self.optimizers))
        if len(beside) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint is of {len(beside)} optimizers, got {len(self.optimizers)}: build the same list"
            )
        with unchanged_on_error(self.optimizers):
            for one, more in zip(self.optimizers, beside, strict=True):
                own, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
                names = {name for group in own for name in group["params"]}  # numbers, or what a sharded checkpoint has
                state = {name: value for name, value in state_dict["state"].items() if name in names}
                load(one, {**more, "state": {**state, **more.get("state", {})}, "param_groups": own})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": self.defaults}


class _States(MutableMapping[Tensor, Any]):
    """What several optimizers keep for their parameters, as one mapping."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, param: Tensor) -> Any:
        """As of any optimizer: a parameter without a state gets an empty one."""
        return self.owner(param).state[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self.owner(param).state[param] = value

    def __contains__(self, param: object) -> bool:
        return any(param in one.state for one in self._optimizers)

    def get(self, param: Tensor, default: Any = None) -> Any:
        return next((one.state[param] for one in self._optimizers if param in one.state), default)

    def owner(self, param: Tensor) -> torch.optim.Optimizer:
        for one in self._optimizers:
            if param in one.state or any(param is owned for group in one.param_groups for owned in group["params"]):
                return one
        raise KeyError(f"no optimizer has this parameter, of shape {tuple(param.shape)}")

    def __delitem__(self, param: Tensor) -> None:
        del self.owner(param).state[param]

    def __iter__(self) -> Iterator[Tensor]:
        return (param for one in self._optimizers for param in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)


def _in_common(defaults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The options that all have, with the first's values: schedulers look for momentum among them.

    >>> _in_common([{"lr": 0.1, "momentum": 0.9}, {"lr": 0.001, "betas": (0.9, 0.999)}])
    {'lr': 0.1}
    """
    first, *others = defaults
    return {name: value for name, value in first.items() if all(name in other for other in others)}


def _call_all(methods: Sequence[Callable[[], Any]]) -> None:
    for method in methods:
        method()


def _without_parameters(state_dict: dict[str, Any], numbers: Container[Any]) -> dict[str, Any]:
    """What a state dict has beside parameter groups and the state of their parameters.

    >>> _without_parameters({"state": {0: {}, "updates": 3}, "param_groups": [], "seen": 1}, {0})
    {'seen': 1, 'state': {'updates': 3}}
    """
    more = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    state = {key: value for key, value in state_dict["state"].items() if key not in numbers}
    return {**more, "state": state} if state else more


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _add_param_group(
    optimizer: weakref.ref[torch.optim.Optimizer], combined: weakref.ref[Combined], param_group: dict[str, Any]
) -> None:
    """The method of an optimizer in a list, which refuses parameters of the others as it does its own."""
    one, whole = optimizer(), combined()
    assert one is not None  # its own method is running
    type(one).add_param_group(one, param_group)
    if whole is None:
        return
    try:
        _refuse_shared(one, one.param_groups[-1]["params"], [other for other in whole.optimizers if other is not one])
    except ValueError:
        one.param_groups.pop()
        raise


def _refuse_shared(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], others: Sequence[torch.optim.Optimizer]
) -> None:
    for other in others:
        shared = {*params} & {*_params(other)}
        if shared:
            raise ValueError(
                f"two of the base optimizers, {type(optimizer).__name__} and {type(other).__name__}, have a parameter "
                f"in common, of shape {tuple(shared.pop().shape)}: give each its own"
            )


def _sizes(groups: Sequence[dict[str, Any]]) -> str:
    """
    >>> _sizes([{"params": [0, 1]}, {"params": [2]}])
    'parameter groups of 2 and 1 tensors'
    """
    return f"parameter groups of {' and '.join(str(len(group['params'])) for group in groups)} tensors"
