"""Passes over data at moved weights: the model is run, differentiated and restored."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bisam.diagnostics.arguments import Data, Progress, batches_of, kind, plain, to_device
from bisam.diagnostics.tally import CountedPredictions, Mean, scalar
from bisam.engine.criterion import Criterion
from bisam.objectives import CrossEntropy, LowerBound, Objective, logits_of
from bisam.plan import Batch
from bisam.tensors.buckets import is_sharded, widest
from bisam.tensors.snapshot import BufferSnapshot, RandomState, Snapshot, forget_derived


@dataclass
class PassResult:
    """What one pass over the data saw."""

    loss: float
    ascended: float
    """The ascent's objective."""
    bound: float | None
    gradient: Tensor
    """Of the ascent's objective; empty unless requested."""
    right: Tensor | None
    """Which samples are classified correctly."""
    labels: Tensor | None

    @property
    def error(self) -> float | None:
        return None if self.right is None else 1 - self.right.double().mean().item()


class Probe:
    """Moves, runs and differentiates a model. Leaving the `with` restores it, also after an error.

    Vectors are flat, of all parameters that require gradients in their order, in float32 or wider, on the device of the
    first. The weights are written to behind autograd's back: they will be the same bits again when a graph that waits
    for its backward pass needs them.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        objective: Objective | None,
        ascent: Objective | None,
        train_mode: bool,
        progress: Progress | None,
        passes: int,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model comes first and must be a torch.nn.Module, got {type(model).__name__}")
        self.model = plain(model)
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        if not self.params:
            raise ValueError(
                "the model has no parameters that require gradients, so none can be moved. Call "
                "model.requires_grad_(), or pass the model before it was frozen"
            )
        if any(param.is_complex() for param in self.params):
            raise TypeError("the model has complex parameters, which are not supported")
        if any(map(is_sharded, self.params)):
            raise TypeError(
                "the model's parameters are divided among processes (FSDP2 or tensor parallelism), and a diagnostic "
                "moves whole ones. Gather the weights into an undivided copy of the model: "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "StateDictOptions(full_state_dict=True) gives them"
            )
        self.batches, length = batches_of(data)
        # an optimizer's criterion would put what it sees here into the optimizer's telemetry
        objective = objective.descent if isinstance(objective, Criterion) else objective
        ascent = ascent.ascent if isinstance(ascent, Criterion) else ascent
        self.objective: Objective = CrossEntropy() if objective is None else objective
        self.ascent: Objective = self.objective if ascent is None else ascent
        self.train_mode = train_mode
        self.size = sum(param.numel() for param in self.params)
        self.device = self.params[0].device
        self.dtype = torch.float32
        for param in self.params:
            self.dtype = torch.promote_types(self.dtype, param.dtype)
        if any(param.dtype.itemsize < 4 for param in self.params):
            kinds = ", ".join(sorted({str(param.dtype) for param in self.params if param.dtype.itemsize < 4}))
            warnings.warn(
                f"the model has weights in {kinds}, which cannot be moved by less than their rounding: small "
                "perturbations are lost. Pass a copy in float32, as in copy.deepcopy(model).float()",
                stacklevel=3,
            )
        self._values = [param.data for param in self.params]
        self._weights, self._buffers = Snapshot(), BufferSnapshot(self.model)
        self._progress, self._done, self._total = progress, 0, passes * (length or 1)
        self._ticks_per_batch = length is not None

    def __enter__(self) -> Probe:
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._random = RandomState({param.device for param in self.params})
        self._weights.save(self._values)
        self._buffers.save()
        try:
            self.model.train(self.train_mode)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._weights.restore()
        forget_derived()
        self._buffers.restore()
        self._random.restore()
        for module, training in self._modes:
            module.training = training

    def look(self, offset: Tensor | None = None, *, gradient: bool = False) -> PassResult:
        """The loss and what goes with it at w + offset."""
        self._move(offset)
        loss, ascended, bound = Mean(self.objective), Mean(self.ascent), Mean(self.ascent)
        predicted = CountedPredictions([self.objective, self.ascent])
        lower = self.ascent if isinstance(self.ascent, LowerBound) else None
        slope = torch.zeros(self.size if gradient else 0, dtype=self.dtype, device=self.device)
        for batch in self._pass():
            with torch.set_grad_enabled(gradient), self._differentiable(gradient):
                output = logits_of(batch.run(self.model))
                value = scalar(self.ascent(output, batch.y))
                weight = ascended.add(value, batch.y)
                if gradient and weight:
                    slope += weight * self._gradient(value)
            output = output.detach()
            with torch.no_grad():
                same = self.ascent is self.objective
                loss.add(value if same else scalar(self.objective(output, batch.y)), batch.y)
                lower = None if batch.y.is_floating_point() else lower
                if lower is not None:
                    bound.add(scalar(lower.bound(output, batch.y)), batch.y)
                predicted.add(output, batch.y)
        if gradient:
            slope /= ascended.divisor
        return PassResult(
            loss=loss.value,
            ascended=ascended.value,
            bound=None if lower is None else bound.value,
            gradient=slope,
            right=predicted.right,
            labels=predicted.labels,
        )

    def hessian_times(self, vector: Tensor) -> Tensor:
        """H v = ∇(∇L · v) at w."""
        product, loss = torch.zeros_like(vector), Mean(self.objective)
        directions = self._parts(vector)
        for batch in self._pass():
            with torch.enable_grad(), self._differentiable(twice=True):
                value = scalar(self.objective(logits_of(batch.run(self.model)), batch.y))
                weight = loss.add(value, batch.y)
                if not weight:
                    continue
                slopes = torch.autograd.grad(value, self.params, create_graph=True, allow_unused=True)
                pairs = [(g, d) for g, d in zip(slopes, directions, strict=True) if g is not None and g.requires_grad]
                if pairs:  # otherwise L is linear in w
                    along = torch.stack([(g * d).sum().to(self.device) for g, d in pairs]).sum()
                    product += weight * self._gradient(along)
        return product / loss.divisor

    def scale(self, adaptive: bool, eta: float) -> Tensor | float:
        """T."""
        return self._flat([copy.abs() + eta for copy in self._weights.copies]) if adaptive else 1.0

    def normal(self, random: torch.Generator) -> Tensor:
        # drawn on the CPU: the same directions on every device
        return torch.randn(self.size, generator=random, dtype=self.dtype, device="cpu").to(self.device)

    def signs(self, random: torch.Generator) -> Tensor:
        return (2 * torch.randint(2, (self.size,), generator=random, device="cpu") - 1).to(self.device, self.dtype)

    def filter_normalised(self, random: torch.Generator) -> Tensor:
        if all(param.dim() < 2 for param in self.params):
            raise ValueError(
                "a surface needs a parameter with two or more dimensions that requires gradients: this model has none"
            )
        directions = []
        for part, weight in zip(self._parts(self.normal(random)), self._weights.copies, strict=True):
            if weight.dim() < 2:
                directions.append(torch.zeros_like(part))
                continue
            rows = tuple(range(1, weight.dim()))
            length = torch.linalg.vector_norm(part, dim=rows, keepdim=True)
            wanted = torch.linalg.vector_norm(weight.to(part.dtype), dim=rows, keepdim=True)
            directions.append(part * torch.where(length > 0, wanted / length, 0.0))
        return self._flat(directions)

    def finish(self) -> None:
        """Report what turned out not to be needed as done."""
        if self._progress is not None and self._done < self._total:
            self._progress(self._total, self._total)

    def _pass(self) -> Iterator[Batch]:
        """The batches, on the model's device, from the same buffers and random numbers every time."""
        self._random.restore()
        self._buffers.restore()
        self._buffers.save()
        empty = True
        for pair in self.batches:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Tensor)):
                raise TypeError(f"data must be (x, y) or an iterable of such pairs, got a batch of {kind(pair)}")
            yield Batch(to_device(pair[0], self.device), pair[1].to(self.device))
            empty = False
            if self._ticks_per_batch:
                self._tick()
        if empty:
            raise ValueError("the data is empty: it has no batches")
        if not self._ticks_per_batch:
            self._tick()

    def _tick(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _move(self, offset: Tensor | None) -> None:
        if offset is None:
            offset = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for value, weight, part in zip(self._values, self._weights.copies, self._parts(offset), strict=True):
            value.copy_(weight + part)
        forget_derived()

    def _gradient(self, value: Tensor) -> Tensor:
        slopes = torch.autograd.grad(value, self.params, allow_unused=True)
        found = [torch.zeros_like(p.data) if g is None else g for g, p in zip(slopes, self.params, strict=True)]
        return self._flat([g if g.layout is torch.strided else g.to_dense() for g in found])

    def _differentiable(self, once: bool = False, *, twice: bool = False) -> AbstractContextManager[Any]:
        """Without kernels that lack a derivative: cuDNN's recurrent ones in evaluation, fused attention's second, and
        for the second those of torch.compile, also of a layer.
        """
        if (once or twice) and torch.is_inference_mode_enabled():
            raise RuntimeError("this needs gradients, which torch.inference_mode() rules out: call it outside of that")
        stack = ExitStack()
        if (once or twice) and any(isinstance(module, nn.RNNBase) for module in self.model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if twice:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        return stack

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1).to(self.device, self.dtype) for tensor in tensors])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        pieces = torch.split_with_sizes(vector, [param.numel() for param in self.params])
        return [piece.view(p.shape).to(p.device) for piece, p in zip(pieces, self.params, strict=True)]


def unit(vector: Tensor) -> Tensor:
    """v/‖v‖, or 0 for 0."""
    norm = length(vector)
    return vector / torch.where(norm == 0, 1.0, norm)


def length(vector: Tensor) -> Tensor:
    """‖v‖, in float64: float32 holds no square of a number above 1e19 or below 1e-23."""
    return vector.norm(dtype=widest(vector.device))
