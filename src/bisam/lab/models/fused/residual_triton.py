"""Triton kernels of a residual network with batch norm: 3×3 convolutions, and what lies between two of them.

Activations are channels_last in bfloat16: rows of channels, one for each pixel of the batch. Sums and statistics are
float32. Every sum is taken in a fixed order, so that equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pixels_of_tile(pixels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """This program's pixels: number, whether it exists, row, column, image."""
    pixel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = pixel % WIDTH
    row = pixel // WIDTH % HEIGHT
    image = pixel // (WIDTH * HEIGHT)
    return pixel, pixel < pixels, row, column, image


@triton.jit
def _side_by_side(
    x, wanted, row, column, image,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The channels of COUNT pixels of x from (row, column) to the right, which lie side by side in memory.

    Zeros for pixels outside of the image, where not `wanted`, and to fill up COUNT · CHANNELS to WIDE.
    """
    k = tl.arange(0, WIDE)
    to_the_right = column[:, None] + (k // CHANNELS)[None, :]
    mask = (wanted & (row >= 0) & (row < HEIGHT))[:, None] & (to_the_right >= 0) & (to_the_right < WIDTH)
    if COUNT * CHANNELS < WIDE:
        mask = mask & (k < COUNT * CHANNELS)[None, :]
    place = (image * HEIGHT + row) * WIDTH + column
    return tl.load(x + place[:, None] * CHANNELS + k[None, :], mask=mask, other=0.0)


@triton.jit
def _place_in_weight(first, INPUTS: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr):
    """Where the weights of `_side_by_side` lie in the memory (9, INPUTS) of one output."""
    k = tl.arange(0, WIDE)
    if STORED == INPUTS:
        return first * INPUTS + k
    return (first + k // STORED) * INPUTS + k % STORED


@triton.jit
def _is_weight(INPUTS: tl.constexpr, STORED: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Which of `_side_by_side` have a weight; the others fill up."""
    k = tl.arange(0, WIDE)
    return (k < COUNT * STORED) & (k % STORED < INPUTS)


@triton.jit
def round_images(x, rounded, pixels, CHANNELS: tl.constexpr, STORED: tl.constexpr, TILE: tl.constexpr):
    """Images in the type of `rounded`, with channels of zeros up to STORED: rows of 3 are read number by number."""
    pixel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, STORED)
    exists = (pixel < pixels)[:, None]
    value = tl.load(x + pixel[:, None] * CHANNELS + c[None, :], mask=exists & (c < CHANNELS)[None, :], other=0.0)
    tl.store(rounded + pixel[:, None] * STORED + c[None, :], value.to(rounded.dtype.element_ty), mask=exists)


@triton.jit
def convolve(
    x, weight, z, means, squares, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    INPUTS: tl.constexpr, STORED: tl.constexpr, OUTPUTS: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """z = x ∗ weight, and of each tile of z the mean and the sum of squares around it, by channel.

    HEIGHT and WIDTH are z's. The weight's memory is (OUTPUTS, 9, INPUTS); a pixel of x has STORED channels, of which
    the first INPUTS count. COUNT of the weight's 9 places, 1 or 3, are multiplied at a time.
    """
    pixel, exists, row, column, image = _pixels_of_tile(pixels, HEIGHT, WIDTH, TILE)
    o = tl.arange(0, OUTPUTS)
    total = tl.zeros((TILE, OUTPUTS), tl.float32)
    for step in tl.range(9 // COUNT, num_stages=STAGES):
        first = step * COUNT
        a = _side_by_side(
            x, exists, row * STRIDE + first // 3 - 1, column * STRIDE + first % 3 - 1, image,
            HEIGHT * STRIDE, WIDTH * STRIDE, STORED, COUNT, WIDE,
        )  # fmt: skip
        places = weight + o[None, :] * (9 * INPUTS) + _place_in_weight(first, INPUTS, STORED, WIDE)[:, None]
        w = tl.load(places, mask=_is_weight(INPUTS, STORED, COUNT, WIDE)[:, None], other=0.0)
        total = tl.dot(a, w, total, input_precision="ieee")
    rounded = total.to(z.dtype.element_ty)
    tl.store(z + pixel[:, None] * OUTPUTS + o[None, :], rounded, mask=exists[:, None])
    # around the tile's own mean: a difference of large sums would lose digits
    value = rounded.to(tl.float32)
    count = tl.minimum(pixels - tl.program_id(0) * TILE, TILE).to(tl.float32)
    mean = tl.sum(tl.where(exists[:, None], value, 0.0), 0) / count
    apart = tl.where(exists[:, None], value - mean[None, :], 0.0)
    tl.store(means + tl.program_id(0) * OUTPUTS + o, mean)
    tl.store(squares + tl.program_id(0) * OUTPUTS + o, tl.sum(apart * apart, 0))


@triton.jit
def finish_statistics(
    means, squares, gamma, beta, running_mean, running_variance, counter, norm, pixels, tiles, momentum, epsilon,
    CHANNELS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Batch statistics of all tiles. `norm` gets mean, 1/σ, scale and shift; the running ones are updated."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # around the first tile's mean, which is near to that of all: a difference of large sums would lose digits
    near = tl.load(means + c)
    factor = tl.load(gamma + c)
    offset = tl.load(beta + c)
    old_mean = tl.load(running_mean + c)
    old_variance = tl.load(running_variance + c)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, STEP):
        tile = first + tl.arange(0, STEP)
        mask = (tile < tiles)[:, None]
        count = tl.minimum(pixels - tile * TILE, TILE).to(tl.float32)
        places = tile[:, None] * CHANNELS + c[None, :]
        apart = tl.where(mask, tl.load(means + places, mask=mask, other=0.0) - near[None, :], 0.0)
        within = tl.load(squares + places, mask=mask, other=0.0)
        total += tl.sum(apart * count[:, None], 0)
        square += tl.sum(within + apart * apart * count[:, None], 0)
    mean = near + total / pixels
    square -= total * total / pixels
    inverse = 1 / tl.sqrt(square / pixels + epsilon)
    scale = factor * inverse
    tl.store(norm + c, mean)
    tl.store(norm + CHANNELS + c, inverse)
    tl.store(norm + 2 * CHANNELS + c, scale)
    tl.store(norm + 3 * CHANNELS + c, offset - mean * scale)
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean))
    tl.store(running_variance + c, old_variance + momentum * (square / (pixels - 1) - old_variance))
    if tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + 1)


@triton.jit
def normalize(
    z, norm, shortcut, y, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SHORTCUT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y = relu(scale z + shift + shortcut).

    SHORTCUT: "" for none, "same" for one of z's shape, "half" for one of twice the sides and half the channels, whose
    every second pixel goes to the middle channels.
    """
    pixel, exists, row, column, image = _pixels_of_tile(pixels, HEIGHT, WIDTH, TILE)
    c = tl.arange(0, CHANNELS)
    mask = exists[:, None]
    places = pixel[:, None] * CHANNELS + c[None, :]
    scale = tl.load(norm + 2 * CHANNELS + c)
    shift = tl.load(norm + 3 * CHANNELS + c)
    value = tl.load(z + places, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if SHORTCUT == "same":
        value += tl.load(shortcut + places, mask=mask, other=0.0).to(tl.float32)
    if SHORTCUT == "half":
        from_channel = c - CHANNELS // 4
        has = (from_channel >= 0) & (from_channel < CHANNELS // 2)
        place = (image * (2 * HEIGHT) + 2 * row) * (2 * WIDTH) + 2 * column
        values = tl.load(
            shortcut + place[:, None] * (CHANNELS // 2) + from_channel[None, :], mask=mask & has[None, :], other=0.0
        )
        value += values.to(tl.float32)
    # NaN stays NaN, as in torch's ReLU: a training that has diverged must not look like one of zeros
    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + places, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _store_gradient(
    value, y, z, norm, gradient, sums, places, mask,
    CHANNELS: tl.constexpr, HAS_SHORTCUT: tl.constexpr,
):  # fmt: skip
    """Store what of `value`, the gradient of y = relu(norm(z) + shortcut), reaches the norm; and sums over the tile."""
    c = tl.arange(0, CHANNELS)
    before = tl.load(z + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHORTCUT:
        is_off = tl.load(y + places, mask=mask, other=0.0) <= 0
    else:  # without reading y
        is_off = before * tl.load(norm + 2 * CHANNELS + c)[None, :] + tl.load(norm + 3 * CHANNELS + c)[None, :] <= 0
    rounded = tl.where(mask & ~is_off, value, 0.0).to(gradient.dtype.element_ty)  # NaN is not off, as in torch
    tl.store(gradient + places, rounded, mask=mask)
    value = rounded.to(tl.float32)
    mean = tl.load(norm + c)
    apart = before - mean[None, :]
    tl.store(sums + tl.program_id(0) * (2 * CHANNELS) + c, tl.sum(value, 0))
    tl.store(sums + tl.program_id(0) * (2 * CHANNELS) + CHANNELS + c, tl.sum(value * apart, 0))


@triton.jit
def spread(
    pooled, y, z, norm, gradient, sums, pixels,
    AREA: tl.constexpr, CHANNELS: tl.constexpr, HAS_SHORTCUT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of the mean over the AREA pixels of each image, through the last ReLU: see `_store_gradient`."""
    pixel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (pixel < pixels)[:, None]
    c = tl.arange(0, CHANNELS)
    value = tl.load(pooled + (pixel // AREA)[:, None] * CHANNELS + c[None, :], mask=mask, other=0.0).to(tl.float32)
    places = pixel[:, None] * CHANNELS + c[None, :]
    _store_gradient(value / AREA, y, z, norm, gradient, sums, places, mask, CHANNELS, HAS_SHORTCUT)


@triton.jit
def finish_sums(
    sums, norm, of_gamma, of_beta, linear, pixels, tiles,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The gradients of γ and β. `linear` gets a, b, c: the gradient of z is a·gradient + b·z + c."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.load(norm + c)
    inverse = tl.load(norm + CHANNELS + c)
    scale = tl.load(norm + 2 * CHANNELS + c)
    plain = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, STEP):
        tile = first + tl.arange(0, STEP)
        mask = (tile < tiles)[:, None]
        places = tile[:, None] * (2 * CHANNELS) + c[None, :]
        plain += tl.sum(tl.load(sums + places, mask=mask, other=0.0), 0)
        weighted += tl.sum(tl.load(sums + places + CHANNELS, mask=mask, other=0.0), 0)
    tl.store(of_gamma + c, weighted * inverse)
    tl.store(of_beta + c, plain)
    slope = -scale * inverse * inverse * weighted / pixels
    tl.store(linear + c, scale)
    tl.store(linear + CHANNELS + c, slope)
    tl.store(linear + 2 * CHANNELS + c, -scale * plain / pixels - slope * mean)


@triton.jit
def gradient_of_norm(gradient, z, linear, of_z, pixels, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """The gradient of z = a·gradient + b·z + c: see `finish_sums`."""
    pixel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (pixel < pixels)[:, None]
    channel = tl.arange(0, CHANNELS)
    places = pixel[:, None] * CHANNELS + channel[None, :]
    a = tl.load(linear + channel)
    b = tl.load(linear + CHANNELS + channel)
    c = tl.load(linear + 2 * CHANNELS + channel)
    g = tl.load(gradient + places, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(z + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(of_z + places, (a[None, :] * g + b[None, :] * value + c[None, :]).to(of_z.dtype.element_ty), mask=mask)


@triton.jit
def gradient_of_input(
    of_z, weight, residual, y, z, norm, gradient, sums, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, RESIDUAL: tl.constexpr, HAS_SHORTCUT: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's input y, with that of a shortcut from y, through y's own ReLU.

    HEIGHT, WIDTH and `pixels` are y's. RESIDUAL is as SHORTCUT of `normalize`: the gradient of the shortcut's sum.
    """
    pixel, exists, row, column, image = _pixels_of_tile(pixels, HEIGHT, WIDTH, TILE)
    i = tl.arange(0, INPUTS)
    k = tl.arange(0, WIDE)
    mask = exists[:, None]
    total = tl.zeros((TILE, INPUTS), tl.float32)
    for step in tl.range(9 // COUNT, num_stages=STAGES):
        first = step * COUNT
        r = row + first // 3 - 1
        c = column + first % 3 - 1
        reaches = exists
        if STRIDE == 2:
            reaches = exists & (r % 2 == 0) & (c % 2 == 0)
        g = _side_by_side(
            of_z, reaches, r // STRIDE, c // STRIDE, image, HEIGHT // STRIDE, WIDTH // STRIDE, OUTPUTS, COUNT, WIDE
        )
        # what lies to the right of a pixel was reached by the weight on the left
        place = 8 - first - k // OUTPUTS
        places = weight + (k % OUTPUTS * 9 + place)[:, None] * INPUTS + i[None, :]
        w = tl.load(places, mask=(k < COUNT * OUTPUTS)[:, None], other=0.0)
        total = tl.dot(g, w, total, input_precision="ieee")
    places = pixel[:, None] * INPUTS + i[None, :]
    if RESIDUAL == "same":
        total += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL == "half":
        place = (image * (HEIGHT // 2) + row // 2) * (WIDTH // 2) + column // 2
        has = exists & (row % 2 == 0) & (column % 2 == 0)
        total += tl.load(
            residual + place[:, None] * (2 * INPUTS) + (i + INPUTS // 2)[None, :], mask=has[:, None], other=0.0
        ).to(tl.float32)
    _store_gradient(total, y, z, norm, gradient, sums, places, mask, INPUTS, HAS_SHORTCUT)


@triton.jit
def gradient_of_weight(
    x, of_z, parts, pixels, tiles_of_part,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    INPUTS: tl.constexpr, STORED: tl.constexpr, OUTPUTS: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A part of the sum over all pixels; program (part, n) has the n-th COUNT of the weight's 9 places."""
    part = tl.program_id(0)
    first = tl.program_id(1) * COUNT
    o = tl.arange(0, OUTPUTS)
    total = tl.zeros((WIDE, OUTPUTS), tl.float32)
    for number in range(tiles_of_part):
        pixel = (part * tiles_of_part + number) * TILE + tl.arange(0, TILE)
        exists = pixel < pixels
        a = _side_by_side(
            x, exists, pixel // WIDTH % HEIGHT * STRIDE + first // 3 - 1, pixel % WIDTH * STRIDE + first % 3 - 1,
            pixel // (WIDTH * HEIGHT), HEIGHT * STRIDE, WIDTH * STRIDE, STORED, COUNT, WIDE,
        )  # fmt: skip
        g = tl.load(of_z + pixel[:, None] * OUTPUTS + o[None, :], mask=exists[:, None], other=0.0)
        total = tl.dot(tl.trans(a), g, total, input_precision="ieee")
    row = parts + (part * OUTPUTS + o) * (9 * INPUTS)
    places = row[None, :] + _place_in_weight(first, INPUTS, STORED, WIDE)[:, None]
    tl.store(places, total, mask=_is_weight(INPUTS, STORED, COUNT, WIDE)[:, None] & (o < OUTPUTS)[None, :])
