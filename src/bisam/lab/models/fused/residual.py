"""Forward and backward pass of a residual network on the kernels beside this: what its modules compute, in bfloat16.

A layer is a 3×3 convolution, a batch norm with the statistics of the batch, and a ReLU. Forward it is three kernels:
the convolution, which also sums up statistics; the end of these sums; normalisation with ReLU and shortcut. Backward it
is four: the end of the norm's sums, the gradients of the norm, of the weight, and of the input, which also sums up for
the norm below.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bisam.lab.models.fused import residual_triton as kernels

STORED_IMAGE = 4
"""Channels of an image in memory: rows of 3 numbers would be read one by one."""
LEAST = 16
"""Numbers that tensor cores multiply and add up at least."""
BLOCK = 8
"""Channels whose sums one program ends."""


class Launch(NamedTuple):
    """How a convolution is cut into programs; what was fastest for six trainings at a time on an H200."""

    tile: int
    """Pixels of a program, or that it adds up at a time."""
    at_once: int
    """Of the 9 places of a weight, how many are multiplied at a time."""
    stages: int
    """Reads in flight."""
    warps: int = 4
    parts: int = 1
    """Of a sum over all pixels."""

    def wide(self, channels: int) -> int:
        """Channels of the places that are multiplied at a time, filled up to a power of two."""
        return max(LEAST, int(triton.next_power_of_2(self.at_once * channels)))


CONVOLVE = {16: Launch(256, 1, 4), 32: Launch(128, 1, 3), 64: Launch(128, 1, 3)}
"""By the channels of the output."""
OF_INPUT = {16: Launch(256, 1, 4), 32: Launch(128, 1, 3), 64: Launch(128, 1, 3)}
"""By the channels of the input."""
OF_WEIGHT = {16: Launch(128, 3, 3, parts=64), 32: Launch(64, 3, 3, parts=32), 64: Launch(64, 1, 3, parts=16)}
"""By the channels of the output."""
ELEMENTS = 2048
"""Numbers that a program of an elementwise kernel reads of each tensor."""
MOST_NUMBERS = 2**31
"""Of an activation: the kernels count them in 32 bits."""


@dataclass(frozen=True)
class FusedLayer:
    """A convolution and its norm, and where its input and its shortcut come from: numbers of layers, −1 for x."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    input: int
    shortcut: int | None = None

    @property
    def stride(self) -> int:
        return self.convolution.stride[0]

    @property
    def size(self) -> tuple[int, int]:
        return self.convolution.in_channels, self.convolution.out_channels

    @property
    def is_usual(self) -> bool:
        """Whether the kernels compute this kind of layer; not SyncBatchNorm, nor parametrized weights."""
        norm = self.norm
        return (
            type(self.convolution) is nn.Conv2d
            and type(norm) is nn.BatchNorm2d
            and norm.training
            and norm.track_running_stats
            and norm.momentum is not None
            and not any(tensor is None for tensor in (norm.weight, norm.running_mean, norm.num_batches_tracked))
        )


@dataclass
class Values:
    """What a layer computed: the convolution z; mean, 1/σ, scale and shift of its norm; y after the ReLU."""

    z: Tensor
    norm: Tensor
    y: Tensor

    @property
    def pixels(self) -> int:
        return self.z.numel() // self.z.shape[1]


class Gradient(NamedTuple):
    """What reaches a norm, and its sums over tiles of pixels."""

    values: Tensor
    sums: Tensor


@dataclass(eq=False)
class Network:
    """Layers in the order of their computation. The last one's y is averaged over its pixels."""

    layers: list[FusedLayer]
    modules: Sequence[nn.Module] = ()
    """All modules that are not called: hooks on them would not run."""
    dtype: torch.dtype = torch.bfloat16
    """Of the activations, and of the weights in convolutions."""

    def fits(self, x: Tensor) -> bool:
        """Whether the kernels compute what the modules would: in training, on a GPU, under autocast to this type."""
        return (
            x.is_cuda
            and x.dtype in (torch.float32, self.dtype)
            and x.dim() == 4
            and self._fits_shape(*x.shape)
            and not x.requires_grad
            and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") == self.dtype
            and all(layer.is_usual for layer in self.layers)
            and not any(map(_has_hooks, self.modules))
        )

    def _fits_shape(self, count: int, channels: int, height: int, width: int) -> bool:
        inputs, outputs = self.layers[0].size
        stride, pixels = math.prod(layer.stride for layer in self.layers), count * height * width
        return (
            channels == inputs < STORED_IMAGE
            and height % stride == 0
            and width % stride == 0
            and pixels > stride**2  # batch norm refuses a single pixel of the last layer: it has no variance
            and pixels * outputs < MOST_NUMBERS
        )

    def parameters(self) -> list[Tensor]:
        return [p for layer in self.layers for p in (layer.convolution.weight, layer.norm.weight, layer.norm.bias)]

    def __call__(self, x: Tensor) -> Tensor:
        """The means (N, C) of the last layer, for images (N, 3, H, W)."""
        return NetworkFunction.apply(self, x, *self.parameters())  # type: ignore[no-untyped-call]


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


class NetworkFunction(torch.autograd.Function):
    """The whole network as one function: autograd keeps nothing in between."""

    @staticmethod
    def forward(ctx: Any, network: Network, x: Tensor, *params: Tensor) -> Tensor:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            return _forward(ctx, network, x, params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_means: Tensor) -> Any:
        with torch.cuda.device_of(of_means):  # type: ignore[no-untyped-call]
            return _backward(ctx, of_means)


def _forward(ctx: Any, network: Network, x: Tensor, params: Sequence[Tensor]) -> Tensor:
    weights = _rounded(params[::3], network.dtype)
    images = _images(x, network.dtype)
    found: list[Values] = []
    for layer, weight, gamma, beta in zip(network.layers, weights, params[1::3], params[2::3], strict=True):
        given = images if layer.input < 0 else found[layer.input].y
        shortcut = None if layer.shortcut is None else found[layer.shortcut].y
        found.append(_layer(layer, given, weight, gamma, beta, shortcut))
    ctx.network = network
    ctx.save_for_backward(images, *weights, *(t for values in found for t in (values.z, values.norm, values.y)))
    return found[-1].y.mean((2, 3))


def _backward(ctx: Any, of_means: Tensor) -> Any:
    layers: list[FusedLayer] = ctx.network.layers
    images, *saved = ctx.saved_tensors
    weights, rest = saved[: len(layers)], saved[len(layers) :]
    found = [Values(*rest[3 * number : 3 * number + 3]) for number in range(len(layers))]
    of_weights = WeightSums(layers)
    of_norms: list[Tensor] = []
    over_shortcut: dict[int, Tensor] = {}  # by the layer whose y it is of
    gradient = _of_means(of_means, found[-1], has_shortcut=layers[-1].shortcut is not None)
    for number in reversed(range(len(layers))):
        layer = layers[number]
        if layer.shortcut is not None:
            over_shortcut[layer.shortcut] = gradient.values
        of_z, of_gamma, of_beta = _of_norm(found[number], gradient)
        of_norms = [of_gamma, of_beta, *of_norms]
        of_weights.add(number, images if layer.input < 0 else found[layer.input].y, of_z)
        if layer.input >= 0:
            below = found[layer.input]
            has_shortcut = layers[layer.input].shortcut is not None
            other = over_shortcut.get(layer.input)
            gradient = _of_input(layer, of_z, weights[number], below, other, has_shortcut=has_shortcut)
    ends = zip(of_weights.ended(), of_norms[::2], of_norms[1::2], strict=True)
    return None, None, *(one for three in ends for one in three)


def _rounded(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(weight, dtype=dtype, memory_format=torch.channels_last) for weight in weights]
    torch._foreach_copy_(copies, list(weights))
    return copies


def _images(x: Tensor, dtype: torch.dtype) -> Tensor:
    count, channels, height, width = x.shape
    images = _empty(x, (count, STORED_IMAGE, height, width), dtype)
    pixels = count * height * width
    kernels.round_images[(triton.cdiv(pixels, 1024),)](
        x.contiguous(memory_format=torch.channels_last), images, pixels, channels, STORED_IMAGE, 1024
    )
    return images


def _layer(
    layer: FusedLayer, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None
) -> Values:
    inputs, outputs = layer.size
    height, width = x.shape[2] // layer.stride, x.shape[3] // layer.stride
    z = _empty(x, (x.shape[0], outputs, height, width), x.dtype)
    values = Values(z, _sums(x, 4, outputs), torch.empty_like(z))
    launch, pixels, norm = CONVOLVE[outputs], values.pixels, layer.norm
    tiles = triton.cdiv(pixels, launch.tile)
    means, squares = _sums(x, 2, tiles, outputs)
    kernels.convolve[(tiles,)](
        x, weight, z, means, squares, pixels, height, width, layer.stride, inputs, x.shape[1], outputs,
        launch.at_once, launch.wide(x.shape[1]), launch.tile, launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    kernels.finish_statistics[(outputs // BLOCK,)](
        means, squares, gamma, beta, norm.running_mean, norm.running_var, norm.num_batches_tracked, values.norm,
        pixels, tiles, norm.momentum, norm.eps, outputs, launch.tile, BLOCK, _step(tiles), num_warps=8,
    )  # fmt: skip
    tile = ELEMENTS // outputs
    kernels.normalize[(triton.cdiv(pixels, tile),)](
        z, values.norm, z if shortcut is None else shortcut, values.y,
        pixels, height, width, outputs, _kind(shortcut, z), tile,
    )  # fmt: skip
    return values


def _of_means(of_means: Tensor, last: Values, *, has_shortcut: bool) -> Gradient:
    channels, height, width = last.y.shape[1:]
    tile = ELEMENTS // channels
    tiles = triton.cdiv(last.pixels, tile)
    gradient = Gradient(torch.empty_like(last.z), _sums(last.z, tiles, 2, channels))
    kernels.spread[(tiles,)](
        of_means.contiguous(), last.y, last.z, last.norm, *gradient,
        last.pixels, height * width, channels, has_shortcut, tile,
    )  # fmt: skip
    return gradient


def _of_norm(values: Values, gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, γ and β."""
    channels, tiles, tile = values.z.shape[1], len(gradient.sums), ELEMENTS // values.z.shape[1]
    of_gamma, of_beta = _sums(values.z, 2, channels)
    linear, of_z = _sums(values.z, 3, channels), torch.empty_like(values.z)
    kernels.finish_sums[(channels // BLOCK,)](
        gradient.sums, values.norm, of_gamma, of_beta, linear,
        values.pixels, tiles, channels, BLOCK, _step(tiles), num_warps=8,
    )  # fmt: skip
    kernels.gradient_of_norm[(triton.cdiv(values.pixels, tile),)](
        gradient.values, values.z, linear, of_z, values.pixels, channels, tile
    )
    return of_z, of_gamma, of_beta


def _of_input(
    layer: FusedLayer, of_z: Tensor, weight: Tensor, below: Values, other: Tensor | None, *, has_shortcut: bool
) -> Gradient:
    """What reaches the norm below; `other` is the gradient of its y over a shortcut."""
    inputs, outputs = layer.size
    height, width = below.y.shape[2:]
    launch = OF_INPUT[inputs]
    if layer.stride == 2:  # what reaches a pixel does not lie side by side
        launch = launch._replace(at_once=1)
    tiles = triton.cdiv(below.pixels, launch.tile)
    gradient = Gradient(torch.empty_like(below.z), _sums(below.z, tiles, 2, inputs))
    kernels.gradient_of_input[(tiles,)](
        of_z, weight, of_z if other is None else other, below.y, below.z, below.norm, *gradient, below.pixels,
        height, width, layer.stride, inputs, outputs, _kind(other, below.y), has_shortcut,
        launch.at_once, launch.wide(outputs), launch.tile, launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    return gradient


class WeightSums:
    """The gradients of the weights: parts of sums over all pixels, which are added up for all weights of a size."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = layers
        self._numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, layer in enumerate(layers):
            self._numbers[layer.size].append(number)
        self._parts: dict[tuple[int, int], Tensor] = {}

    def add(self, number: int, x: Tensor, of_z: Tensor) -> None:
        layer = self._layers[number]
        inputs, outputs = layer.size
        launch, (height, width) = OF_WEIGHT[outputs], of_z.shape[2:]
        pixels = of_z.numel() // outputs
        tiles = triton.cdiv(pixels, launch.tile)
        parts = min(launch.parts, tiles)
        if layer.size not in self._parts:
            self._parts[layer.size] = _sums(x, len(self._numbers[layer.size]), parts, outputs, 3, 3, inputs)
        kernels.gradient_of_weight[(parts, 9 // launch.at_once)](
            x, of_z, self._parts[layer.size][self._place(number)], pixels, triton.cdiv(tiles, parts),
            height, width, layer.stride, inputs, x.shape[1], outputs,
            launch.at_once, launch.wide(x.shape[1]), launch.tile, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    def ended(self) -> list[Tensor]:
        """One for each layer, channels_last as its weight."""
        found = {size: parts.sum(1).permute(0, 1, 4, 2, 3) for size, parts in self._parts.items()}
        return [found[layer.size][self._place(number)] for number, layer in enumerate(self._layers)]

    def _place(self, number: int) -> int:
        return self._numbers[self._layers[number].size].index(number)


def _kind(shortcut: Tensor | None, to: Tensor) -> str:
    """What the kernels call a shortcut between tensors of these shapes."""
    if shortcut is None:
        return ""
    return "same" if shortcut.shape == to.shape else "half"


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _sums(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _step(tiles: int) -> int:
    """Tiles whose sums are read at a time."""
    return min(1024, int(triton.next_power_of_2(tiles)))
