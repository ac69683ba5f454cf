"""The two-step class that much code already uses, on this engine: change the import and nothing else.

    from bisam.compat import SAM

    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    loss_fn(model(x), y).backward()
    optimizer.first_step(zero_grad=True)
    loss_fn(model(x), y).backward()
    optimizer.second_step(zero_grad=True)

What this fixes:

- The state dict is the base optimizer's and holds no weights of an unfinished step.
- Schedulers and checkpoints reach the base optimizer.
- The weights are restored even if a parameter has a gradient in only one pass.
- Gradients of the first pass never leak into the second.
- Calls out of order raise an error.

Set `optimizer.scaler` to a GradScaler, so that updates after an overflow are skipped, and `optimizer.model` to the
model, so that batch-norm statistics are updated once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bisam.engine.checks import check_caller
from bisam.engine.optimizer import SharpnessAware
from bisam.engine.wrapper import TWO_STEP_KEYS, refuse_other_dicts
from bisam.perturbation import Ball


class SAM(SharpnessAware):
    """SAM(params, base_optimizer_class, rho=0.05, adaptive=False, **arguments_of_the_class).

    Examples:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.first_step(zero_grad=True)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.second_step(zero_grad=True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: Callable[..., torch.optim.Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(params, torch.optim.Optimizer):
            raise TypeError(
                f"params must be parameters, got {type(params).__name__}. bisam.SAM takes (base, model); this class "
                "takes (model.parameters(), torch.optim.SGD, lr=0.1)"
            )
        if isinstance(base_optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"base_optimizer must be a class such as torch.optim.SGD, got an instance of "
                f"{type(base_optimizer).__name__}. bisam.SAM takes an instance"
            )
        super().__init__(base_optimizer(params, **kwargs), perturbation=Ball(rho, adaptive=adaptive))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of the one it replaces, without the old weights that that one carries."""
        refuse_other_dicts(state_dict)
        state = {
            index: {name: value for name, value in entry.items() if name not in TWO_STEP_KEYS}
            for index, entry in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": {index: entry for index, entry in state.items() if entry}})

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        return self.base

    def first_step(self, zero_grad: bool = False) -> None:
        """To w + ε, after the first backward pass. The gradients are cleared in any case: they belong to w."""
        self.ascend()

    def second_step(self, zero_grad: bool = False) -> None:
        """Back to w and update, after the second backward pass."""
        self.descend(zero_grad=zero_grad)

    def step(self, closure: Any = None) -> Any:
        """The form of that class: the first backward pass is done already, the closure does the second."""
        self._notice_skipped_update()
        if self._awaits_update:
            return self._update_after_backward(closure)  # not super().step(), whose hooks would run twice
        check_caller(self, closure)
        if closure is None:
            raise TypeError(
                "step() needs a closure that runs the second forward and backward pass and returns the loss"
            )
        self.first_step()
        try:
            with torch.enable_grad():
                loss = closure()
            self.second_step()
        finally:
            self.restore()
        return loss
