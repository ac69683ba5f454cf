"""skorch: `SharpnessAwareClassifier` is a `NeuralNetClassifier` that takes a sharpness-aware optimizer.

    net = SharpnessAwareClassifier(
        Module, criterion=torch.nn.CrossEntropyLoss, lr=0.1,
        optimizer=bisam.BiSAM, optimizer__rho=0.05,
        optimizer__base=torch.optim.SGD, optimizer__momentum=0.9,
    )
    net.fit(x, y)

`SharpnessAwareNet` is the mixin, for other nets of skorch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from skorch import NeuralNetClassifier
from skorch.dataset import unpack_data
from skorch.utils import TeeGenerator, to_tensor
from torch import Tensor

from bisam.compat import SAM
from bisam.engine.criterion import Criterion
from bisam.engine.optimizer import Options, SharpnessAware
from bisam.integrations.micro_batches import MicroBatch, loss_of_pass
from bisam.objectives import CrossEntropy
from bisam.plan import Batch


class SharpnessAwareNet:
    """A net whose optimizer is sharpness-aware. Put it before the class of the net.

    `optimizer` is one of the family (`bisam.BiSAM`), `optimizer__base` the class of its base optimizer (SGD);
    `optimizer__<name>` are the options of both. A name that both have, such as `alpha` of RMSprop, is the variant's;
    set the base optimizer's by `functools.partial(torch.optim.RMSprop, alpha=0.9)`. The net's criterion is the
    descent's objective.
    `accumulate` cuts each batch into this many parts that run one after the other, for the gradient of the whole.

    The history has the loss at w. Callbacks get `on_grad_computed` once a step, with the gradient of the update.
    """

    def __init__(self, *args: Any, accumulate: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accumulate = accumulate

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        net: Any = self
        if not (isinstance(net.optimizer, type) and issubclass(net.optimizer, SharpnessAware)):
            super().initialize_optimizer(*args, **kwargs)  # type: ignore[misc]
            if isinstance(net.optimizer_, SharpnessAware):
                self._connect(net.optimizer_)
            else:
                warnings.warn(
                    f"{type(self).__name__} trains with {type(net.optimizer_).__name__}, which does not perturb: give "
                    "a sharpness-aware optimizer, such as optimizer=bisam.BiSAM",
                    stacklevel=2,
                )
            return self
        groups, options = net.get_params_for_optimizer("optimizer", net.get_all_learnable_params())
        if issubclass(net.optimizer, SAM):  # takes parameters and a class by itself
            net.optimizer_ = net.optimizer(*groups, **options)
            self._connect(net.optimizer_)
            return self
        for name in ("autocast", "scaler"):
            if options.get(name) is not None:
                raise ValueError(
                    f"optimizer__{name} is for minimize(), and skorch runs the passes by itself: remove it. For "
                    "bfloat16, use torch.autocast in the forward() of the module"
                )
        base = options.pop("base", torch.optim.SGD)
        own = _options_of(net.optimizer)
        base_options = {name: value for name, value in options.items() if name not in own}
        options = {name: value for name, value in options.items() if name in own}
        net.optimizer_ = net.optimizer(
            base(*groups, **base_options), net.module_, **{"descent": net.criterion_, **options}
        )
        return self

    def set_params(self, **kwargs: Any) -> Any:
        """Options that are not of the parameter groups, such as `optimizer__every`, take a new optimizer."""
        net: Any = self
        optimizer = getattr(net, "optimizer_", None)
        if not isinstance(optimizer, SharpnessAware):
            return super().set_params(**kwargs)  # type: ignore[misc]
        own = {f"optimizer__{name}" for name in _options_of(net.optimizer)} & kwargs.keys()
        for name in own:
            setattr(net, name, kwargs[name])  # skorch sets those of an optimizer that is there in its groups alone
        fixed = {name for name in own if name.removeprefix("optimizer__") not in optimizer.param_groups[0]}
        super().set_params(  # type: ignore[misc]
            **{name: value for name, value in kwargs.items() if name not in fixed}
        )
        if fixed:
            net._initialize_optimizer(reason=net._format_reinit_msg("optimizer", fixed))
        return self

    def train_step(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        net: Any = self
        optimizer = net.optimizer_
        if not isinstance(optimizer, SharpnessAware):
            return super().train_step(batch, **fit_params)  # type: ignore[misc]
        if len(net._optimizers) > 1:
            raise RuntimeError(f"a step of two passes has one optimizer, and this net has {net._optimizers}")
        outputs: list[Any] = []
        parts = self._parts(batch)
        closures = [partial(self._run, MicroBatch(part), fit_params, outputs, len(parts)) for part in parts]
        loss = optimizer.backward(closures if self.accumulate > 1 else closures[0])
        net.notify(
            "on_grad_computed",
            named_parameters=TeeGenerator(net.get_all_learnable_params()),
            batch=batch,
            training=True,
        )
        optimizer.step()
        return {"loss": loss, "y_pred": _joined(outputs)}

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, training: bool = False, **kwargs: Any) -> Tensor:
        net: Any = self
        optimizer = getattr(net, "optimizer_", None)
        if not (training and isinstance(optimizer, SharpnessAware)):
            return super().get_loss(y_pred, y_true, *args, training=training, **kwargs)  # type: ignore[misc]
        if isinstance(net.criterion_, torch.nn.NLLLoss) and isinstance(net, NeuralNetClassifier):
            # the module returns probabilities, as skorch's classifier has it; their logarithms are logits
            y_pred = torch.log(y_pred + torch.finfo(y_pred.dtype).eps)
        return loss_of_pass(optimizer.criterion, y_pred, to_tensor(y_true, device=net.device))

    def _connect(self, optimizer: SharpnessAware) -> None:
        """Give an optimizer that was made elsewhere the module and, unless it has a loss of its own, the criterion."""
        net: Any = self
        if optimizer.model is None:
            optimizer.model = net.module_
        criterion = optimizer.criterion
        if type(criterion.descent) is CrossEntropy and not criterion.descent.extra_repr():  # none was given
            optimizer.criterion = Criterion(criterion.ascent if criterion.bilevel else None, net.criterion_)

    def _run(self, part: MicroBatch, fit_params: dict[str, Any], outputs: list[Any], parts: int) -> Tensor:
        """Forward and backward of one part. Keeps what the first pass predicts."""
        net: Any = self
        step = net.train_step_single(*part.arguments(), **fit_params)
        if len(outputs) < parts:
            outputs.append(step["y_pred"])
        return step["loss"].detach()

    def _parts(self, batch: Any) -> list[Any]:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")
        if self.accumulate == 1:
            return [batch]
        return [(part.x, part.y) for part in Batch(*unpack_data(batch)).split(self.accumulate)]


class SharpnessAwareClassifier(SharpnessAwareNet, NeuralNetClassifier):
    """`NeuralNetClassifier` with a sharpness-aware optimizer."""


def _joined(outputs: list[Any]) -> Any:
    """What the module returned for the parts of a batch, a tensor or several, as for the whole."""
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs) if isinstance(outputs[0], Tensor) else tuple(map(torch.cat, zip(*outputs, strict=True)))


def _options_of(variant: Callable[..., Any]) -> set[str]:
    """The names of the options of a variant: its own, and those of all."""
    own = {name for name, p in inspect.signature(variant).parameters.items() if p.kind is not p.VAR_KEYWORD}
    return own | set(Options.__annotations__)
