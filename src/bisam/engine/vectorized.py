"""All micro-batches of an mSAM step as one batched computation, with `torch.func`.

One vmap gives the ascent gradient of each micro-batch at the shared weights, another the descent gradient of each at
its own perturbed weights. It takes the steps that the loop takes and holds a copy of the weights for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from bisam.engine.criterion import Criterion, Pass, check_loss
from bisam.objectives import Objective, logits_of
from bisam.plan import Batch, stack
from bisam.tensors.snapshot import BufferSnapshot

PerMicroBatch = dict[str, Tensor]
"""A tensor for each parameter, by name, with the micro-batches along its first dimension."""


class Vectorized:
    """A model on equal micro-batches at once. `perturb` turns one micro-batch's gradients into ε, in place."""

    def __init__(self, model: nn.Module, criterion: Criterion, micro_batches: Sequence[Batch]) -> None:
        self.model, self.criterion, self.parts = model, criterion, len(micro_batches)
        self.x, self.axes = stack([part.x for part in micro_batches], micro_batches[0].per_sample)
        self.y = torch.stack([part.y for part in micro_batches])
        self.params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def gradients(
        self, perturb: Callable[[dict[str, Tensor]], None], shares: Sequence[float | Tensor]
    ) -> dict[str, Tensor]:
        """The descent gradients, each at its own perturbed weights, added up by the shares of the micro-batches."""
        self.criterion.current = Pass.ASCENT
        epsilon = self._gradients(self.criterion.ascent, self.params, dict.fromkeys(self.params))
        for part in range(self.parts):
            perturb({name: gradient[part] for name, gradient in epsilon.items()})
        names = list(epsilon)
        torch._foreach_add_([epsilon[name] for name in names], [self.params[name] for name in names])
        self.criterion.current = Pass.DESCENT
        axes = {name: 0 if name in epsilon else None for name in self.params}
        descent = self._gradients(self.criterion.descent, {**self.params, **epsilon}, axes)
        with torch.autocast(self.y.device.type, enabled=False):  # which would sum them up in low precision
            kinds = {each.dtype for each in descent.values()}
            weights = {dtype: _stacked(shares, dtype, self.y.device) for dtype in kinds}
            return {name: torch.tensordot(weights[each.dtype], each, 1) for name, each in descent.items()}

    def _gradients(self, objective: Objective, params: PerMicroBatch, axes: dict[str, int | None]) -> PerMicroBatch:
        """The gradient of each micro-batch. The parameters with axis 0 are its own, the others are shared."""

        def loss(weights: dict[str, Tensor], x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
            output = Batch(x, y, per_sample=False).run(partial(_call, self.model, weights))
            logits = logits_of(output)
            value = objective(logits, y)
            check_loss(value, objective)
            return value, logits

        # fresh dropout masks for each micro-batch, as the loop has them
        run = vmap(grad_and_value(loss, has_aux=True), (axes, self.axes, 0), randomness="different")
        buffers = BufferSnapshot(self.model)
        buffers.save()
        try:
            gradients, (_, logits) = run(params, self.x, self.y)
            if buffers.are_replaced():
                raise RuntimeError("the forward pass puts another tensor in the place of a buffer")
        except BaseException as error:
            buffers.restore()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"the micro-batches cannot run as one batched computation: {error}. Use vectorize=False, which runs "
                "them one after the other (batch norm, for one, needs that)"
            ) from error
        everything, target = logits.detach().flatten(0, 1), self.y.flatten(0, 1)
        self.criterion.record(everything, target, objective(everything, target))
        # a shared parameter that the loss does not use has one zero, expanded; the loop has no gradient there
        return {name: gradient.contiguous() for name, gradient in gradients.items() if gradient.stride(0) != 0}


def _stacked(shares: Sequence[float | Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.stack([torch.as_tensor(share, dtype=dtype, device=device) for share in shares])


def _call(model: nn.Module, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(model, weights, args, kwargs)
