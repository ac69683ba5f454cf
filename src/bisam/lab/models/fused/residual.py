"""Forward and backward pass of a residual network on the kernels beside this: what its modules compute, in bfloat16.

A layer is a 3×3 convolution, a batch norm with the statistics of the batch, and a ReLU. Forward it is three kernels:
the convolution, which also sums up statistics; their end; normalisation with ReLU and shortcut. Backward it is five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from bisam.lab.models.fused import kernels

TILES = {16: 128, 32: 128, 64: 64}
"""Pixels of a program, by the number of channels that it writes."""
PARTS = {16: 128, 32: 64, 64: 32}
"""Parts of the sum of a weight's gradient, by its outputs."""
WEIGHT_TILES = {16: 128, 32: 64, 64: 64}
"""Pixels that a program of a weight's gradient adds up at a time."""
STAGES = 3
"""Reads in flight in the loop over the 3×3 places of a convolution."""
AT_ONCE = {3: 3, 16: 3, 32: 1, 64: 1}
"""Of the 9 places of a convolution's weight, how many are multiplied at a time, by the channels of each."""
AT_ONCE_OF_SUM = {3: 3, 16: 3, 32: 3, 64: 1}
"""The same for the weight's gradient."""
LEAST = 16
"""Numbers that tensor cores multiply and add up at least."""


@dataclass(frozen=True)
class Layer:
    """A convolution and its norm, and where its input and its shortcut come from: numbers of layers, −1 for x."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    input: int
    shortcut: int | None = None

    @property
    def stride(self) -> int:
        return self.convolution.stride[0]


@dataclass
class Values:
    """What a layer computed: the convolution z, statistics and scale of its norm, and y after the ReLU."""

    z: Tensor
    norm: Tensor
    y: Tensor


@dataclass(eq=False)
class Network:
    """Layers in the order of their computation. The last one's y is averaged over its pixels."""

    layers: list[Layer]
    dtype: torch.dtype = torch.bfloat16
    """Of the activations, and of the weights in convolutions."""

    def parameters(self) -> list[Tensor]:
        return [p for layer in self.layers for p in (layer.convolution.weight, layer.norm.weight, layer.norm.bias)]

    def __call__(self, x: Tensor) -> Tensor:
        """The means (N, C), in bfloat16."""
        return Pass.apply(self, self.dtype, x, *self.parameters())  # type: ignore[no-any-return, no-untyped-call]


class Pass(torch.autograd.Function):
    """The whole network as one function: autograd keeps nothing in between."""

    @staticmethod
    def forward(ctx: Any, network: Network, dtype: torch.dtype, x: Tensor, *params: Tensor) -> Tensor:
        weights = _rounded(params[::3], dtype)
        found: list[Values] = []
        for layer, weight, gamma, beta in zip(network.layers, weights, params[1::3], params[2::3], strict=True):
            given = x if layer.input < 0 else found[layer.input].y
            shortcut = None if layer.shortcut is None else found[layer.shortcut].y
            found.append(_forward(layer, given, weight, gamma, beta, shortcut))
        ctx.network = network
        tensors = [tensor for values in found for tensor in (values.z, values.norm, values.y)]
        ctx.save_for_backward(x, *weights, *tensors)
        return found[-1].y.mean((2, 3))

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> Any:
        network: Network = ctx.network
        x, *saved = ctx.saved_tensors
        count = len(network.layers)
        weights, rest = saved[:count], saved[count:]
        found = [Values(*rest[k : k + 3]) for k in range(0, 3 * count, 3)]
        gradients: list[Tensor] = []
        gradient, sums = _spread(of_outputs[0], found[-1])
        shortcuts: dict[int, Tensor] = {}
        """By layer, the gradient that reaches its y over a shortcut."""
        for number in reversed(range(count)):
            layer, values = network.layers[number], found[number]
            if layer.shortcut is not None:
                shortcuts[layer.shortcut] = gradient
            of_z, of_gamma, of_beta = _of_norm(values, gradient, sums)
            given = x if layer.input < 0 else found[layer.input].y
            gradients = [_of_weight(layer, given, of_z), of_gamma, of_beta, *gradients]
            if layer.input >= 0:
                gradient, sums = _of_input(
                    layer, of_z, weights[number], found[layer.input], shortcuts.get(layer.input)
                )
        return None, None, None, *gradients


def _rounded(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(w, dtype=dtype, memory_format=torch.channels_last) for w in weights]
    torch._foreach_copy_(copies, list(weights))
    return copies


def _forward(
    layer: Layer, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None
) -> Values:
    outputs, inputs = weight.shape[:2]
    count, height, width = x.shape[0], x.shape[2] // layer.stride, x.shape[3] // layer.stride
    shape = (count, outputs, height, width)
    z = torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
    pixels, tile = count * height * width, TILES[outputs]
    tiles = triton.cdiv(pixels, tile)
    means, squares = x.new_empty((2, tiles, outputs), dtype=torch.float32)
    kernels.convolve[(tiles,)](
        x, weight, z, means, squares, pixels, height, width, layer.stride,
        inputs, outputs, *_at_once(inputs), tile, STAGES,
    )  # fmt: skip
    norm = x.new_empty((4, outputs), dtype=torch.float32)
    own = layer.norm
    kernels.finish_statistics[(outputs // 8,)](
        means, squares, gamma, beta, own.running_mean, own.running_var, own.num_batches_tracked, norm, pixels, tiles,
        own.momentum, own.eps, outputs, tile, 8, _step(tiles), num_warps=8,
    )  # fmt: skip
    y = torch.empty_like(z)
    kind = "" if shortcut is None else "same" if shortcut.shape == z.shape else "half"
    kernels.normalize[(tiles,)](z, norm, z if shortcut is None else shortcut, y, pixels, height, width, outputs, kind, tile)
    return Values(z, norm, y)


def _spread(of_means: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    count, channels, height, width = values.y.shape
    pixels, tile = count * height * width, TILES[channels]
    tiles = triton.cdiv(pixels, tile)
    gradient, sums = torch.empty_like(values.z), values.norm.new_empty((tiles, 2, channels))
    kernels.spread[(tiles,)](
        of_means.contiguous(), values.y, values.z, values.norm, gradient, sums, pixels, height * width, channels, tile
    )
    return gradient, sums


def _of_norm(values: Values, gradient: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, γ and β."""
    count, channels, height, width = values.z.shape
    pixels, tile = count * height * width, TILES[channels]
    of_gamma, of_beta = sums.new_empty((2, channels))
    linear, of_z = sums.new_empty((3, channels)), torch.empty_like(values.z)
    kernels.finish_sums[(channels // 8,)](
        sums, values.norm, of_gamma, of_beta, linear, pixels, len(sums), channels, 8, _step(len(sums)), num_warps=8
    )
    kernels.gradient_of_norm[(triton.cdiv(pixels, tile),)](gradient, values.z, linear, of_z, pixels, channels, tile)
    return of_z, of_gamma, of_beta


def _of_weight(layer: Layer, x: Tensor, of_z: Tensor) -> Tensor:
    count, outputs, height, width = of_z.shape
    inputs = x.shape[1]
    at_once, wide = _at_once(inputs, AT_ONCE_OF_SUM)
    pixels, tile = count * height * width, WEIGHT_TILES[outputs]
    tiles = triton.cdiv(pixels, tile)
    parts = min(PARTS[outputs], tiles)
    sums = x.new_empty((parts, outputs, 3, 3, inputs), dtype=torch.float32)
    kernels.gradient_of_weight[(parts, 9 // at_once)](
        x, of_z, sums, pixels, triton.cdiv(tiles, parts), height, width, layer.stride,
        inputs, outputs, at_once, wide, tile,
    )  # fmt: skip
    return sums.sum(0).permute(0, 3, 1, 2)  # channels_last, as the weight


def _of_input(
    layer: Layer, of_z: Tensor, weight: Tensor, below: Values, over_shortcut: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient that reaches the norm below, and its sums over tiles."""
    count, inputs, height, width = below.y.shape
    outputs = len(weight)
    pixels, tile = count * height * width, TILES[inputs]
    tiles = triton.cdiv(pixels, tile)
    gradient, sums = torch.empty_like(below.z), below.norm.new_empty((tiles, 2, inputs))
    kind = "" if over_shortcut is None else "same" if over_shortcut.shape == below.y.shape else "half"
    kernels.gradient_of_input[(tiles,)](
        of_z, weight, of_z if over_shortcut is None else over_shortcut, below.y, below.z, below.norm, gradient, sums,
        pixels, height, width, layer.stride, inputs, outputs, kind, *(_at_once(outputs) if layer.stride == 1 else (1, outputs)), tile, STAGES,
    )  # fmt: skip
    return gradient, sums



def _at_once(channels: int, table: dict[int, int] = AT_ONCE) -> tuple[int, int]:
    """Places of a weight that are multiplied at a time, and their channels, filled up to a power of two."""
    count = table[channels]
    return count, max(LEAST, int(triton.next_power_of_2(count * channels)))


def _step(tiles: int) -> int:
    """Tiles whose sums are read at a time."""
    return min(1024, int(triton.next_power_of_2(tiles)))
