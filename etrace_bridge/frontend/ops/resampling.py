"""Padding, interpolation, and unfolding of images into patches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend.ops.arrays import is_float, scalar
from etrace_bridge.frontend.ops.convolution import Sizes, each
from etrace_bridge.frontend.ops.indexing import index_select
from etrace_bridge.frontend.ops.joining import flip
from etrace_bridge.frontend.ops.pooling import average_axis, weigh_axis
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import reshape, slice_dim

# ---- padding


def _pairs(pad: Sequence[int], ndim: int) -> list[tuple[int, int, int]]:
    """Read torch's padding, last dimension first, as (axis, before, after)."""
    return [(ndim - 1 - k, pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2)]


@implements("constant_pad_nd")
def constant_pad(input: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Pad with one value; negative padding cuts."""
    config = [(0, 0, 0)] * np.ndim(input)
    for d, before, after in _pairs(tuple(pad), np.ndim(input)):
        config[d] = (before, after, 0)
    return lax.pad(input, scalar(value or 0, input), config)


def _edges(x: Any, d: int, before: int, after: int, mode: str) -> tuple[Any, Any]:
    """What to put before and after one axis."""
    n = np.shape(x)[d]
    if mode == "reflect":
        return flip(slice_dim(x, d, 1, before + 1), d), flip(
            slice_dim(x, d, n - after - 1, n - 1), d
        )
    if mode == "circular":
        return slice_dim(x, d, n - before, n), slice_dim(x, d, 0, after)
    first, last = slice_dim(x, d, 0, 1), slice_dim(x, d, n - 1, n)
    wide = lambda edge, k: lax.concatenate([edge] * k, d) if k > 0 else slice_dim(edge, d, 0, 0)
    return wide(first, before), wide(last, after)


def _pad_by_edges(x: Any, pad: Sequence[int], mode: str) -> Any:
    for d, before, after in _pairs(tuple(pad), np.ndim(x)):
        cut = slice_dim(x, d, max(-before, 0), np.shape(x)[d] - max(-after, 0))
        head, tail = _edges(
            x if mode != "circular" else cut, d, max(before, 0), max(after, 0), mode
        )
        x = lax.concatenate([part for part in (head, cut, tail) if np.shape(part)[d]], d)
    return x


@implements("pad")
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """Pad the last dimensions with a value, a reflection, the border, or the other end."""
    return (
        constant_pad(input, pad, value or 0)
        if mode == "constant"
        else _pad_by_edges(input, pad, mode)
    )


for _n in (1, 2, 3):
    implements(f"reflection_pad{_n}d")(
        lambda input, padding: _pad_by_edges(input, padding, "reflect")
    )
    implements(f"replication_pad{_n}d")(
        lambda input, padding: _pad_by_edges(input, padding, "replicate")
    )


# ---- interpolation


def _sources(n: int, count: int, scale: float | None, align_corners: bool) -> np.ndarray:
    """Position in the input of each output, for the linear and cubic modes; may lie outside."""
    if align_corners:
        return np.arange(count) * ((n - 1) / (count - 1) if count > 1 else 0.0)
    ratio = n / count if scale is None else 1 / scale
    return (np.arange(count) + 0.5) * ratio - 0.5


def _cubic_weights(n: int, count: int, scale: float | None, align_corners: bool) -> np.ndarray:
    """Keys' cubic convolution with a = -3/4, the border repeated."""
    place = _sources(n, count, scale, align_corners)
    base = np.floor(place).astype(int)
    weights = np.zeros((count, n))
    for neighbour in (-1, 0, 1, 2):
        t = np.abs(place - base - neighbour)
        near = (1.25 * t - 2.25) * t * t + 1
        far = ((-0.75 * t + 3.75) * t - 6) * t + 3
        np.add.at(
            weights,
            (np.arange(count), np.clip(base + neighbour, 0, n - 1)),
            np.where(t <= 1, near, far),
        )
    return weights


def _linear_weights(n: int, count: int, scale: float | None, align_corners: bool) -> np.ndarray:
    place = np.maximum(_sources(n, count, scale, align_corners), 0.0)
    low = np.minimum(np.floor(place).astype(int), n - 1)
    high = np.minimum(low + 1, n - 1)
    weights = np.zeros((count, n))
    np.add.at(weights, (np.arange(count), low), 1 - (place - low))
    np.add.at(weights, (np.arange(count), high), place - low)
    return weights


def _nearest(n: int, count: int, scale: float | None, exact: bool) -> np.ndarray:
    # torch computes these positions in single precision.
    ratio = np.float32(n / count if scale is None else 1 / scale)
    place = (np.arange(count, dtype=np.float32) + np.float32(0.5 if exact else 0.0)) * ratio
    return np.minimum(np.floor(place).astype(int), n - 1)


def _resize_axis(
    x: Any, d: int, count: int, scale: float | None, mode: str, align_corners: bool
) -> Any:
    n = np.shape(x)[d]
    if mode == "area":
        return average_axis(x, d, count)
    if mode in ("nearest", "nearest-exact"):
        return index_select(x, d, _nearest(n, count, scale, mode == "nearest-exact"))
    weights = _cubic_weights if mode == "bicubic" else _linear_weights
    return (
        x
        if n == count and scale is None
        else weigh_axis(x, d, weights(n, count, scale, align_corners).astype(x.dtype))
    )


@implements("interpolate", "upsample")
def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Resize space by the nearest entry, linearly, or by area."""
    if antialias or (not is_float(input) and not mode.startswith("nearest")):
        raise NotSupportedError(
            f"`interpolate(mode={mode!r}, antialias={antialias})` on `{input.dtype}` has no rule. "
            "Use a floating tensor without antialiasing, or give "
            "`torch.nn.functional.interpolate` a rule with `eb.register_op`."
        )
    n = np.ndim(input) - 2
    space = np.shape(input)[2:]
    scales: list[float | None] = [None] * n
    if size is not None:
        counts = (size,) * n if isinstance(size, int) else tuple(size)
    else:
        factors = (
            (scale_factor,) * n if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
        )
        counts = tuple(math.floor(s * f) for s, f in zip(space, factors, strict=True))
        scales = [None] * n if recompute_scale_factor else list(factors)
    x = input
    for d, (count, scale) in enumerate(zip(counts, scales, strict=True), 2):
        x = _resize_axis(x, d, count, scale, mode, bool(align_corners))
    return x


# ---- patches


@implements("F.unfold", "im2col")
def image_to_columns(
    input: Any, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Any:
    """Lay the patches of an image out as columns `(N, C * k * k, patches)`."""
    x = input if np.ndim(input) == 4 else reshape(input, (1, *np.shape(input)))
    kernel, spread, space, step = (each(v, 2) for v in (kernel_size, dilation, padding, stride))
    x = lax.pad(x, scalar(0, x), [(0, 0, 0)] * 2 + [(p, p, 0) for p in space])
    counts = [(np.shape(x)[2 + k] - spread[k] * (kernel[k] - 1) - 1) // step[k] + 1 for k in (0, 1)]
    copies = []
    for offset in itertools.product(*map(range, kernel)):
        copy = x
        for k in (0, 1):
            begin = offset[k] * spread[k]
            copy = slice_dim(copy, 2 + k, begin, begin + (counts[k] - 1) * step[k] + 1, step[k])
        copies.append(lax.expand_dims(copy, (2,)))
    stacked = lax.concatenate(copies, 2)
    batch, channels = np.shape(x)[:2]
    columns = reshape(stacked, (batch, channels * math.prod(kernel), math.prod(counts)))
    return columns if np.ndim(input) == 4 else lax.squeeze(columns, (0,))


@implements("F.fold", "col2im")
def columns_to_image(
    input: Any,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Any:
    """Add patches laid out as columns back into an image."""
    x = input if np.ndim(input) == 3 else reshape(input, (1, *np.shape(input)))
    size, kernel, spread, space, step = (
        each(v, 2) for v in (output_size, kernel_size, dilation, padding, stride)
    )
    counts = [
        (size[k] + 2 * space[k] - spread[k] * (kernel[k] - 1) - 1) // step[k] + 1 for k in (0, 1)
    ]
    batch, channels = np.shape(x)[0], np.shape(x)[1] // math.prod(kernel)
    patches = reshape(x, (batch, channels, math.prod(kernel), *counts))
    image = scalar(0, x)
    for which, offset in enumerate(itertools.product(*map(range, kernel))):
        config = [(0, 0, 0)] * 2
        for k in (0, 1):
            begin, reach = offset[k] * spread[k], (counts[k] - 1) * step[k] + 1
            before = begin - space[k]
            config.append((before, size[k] - reach - before, step[k] - 1))
        part = lax.pad(lax.index_in_dim(patches, which, 2, keepdims=False), scalar(0, x), config)
        image = part if which == 0 else lax.add(image, part)
    return image if np.ndim(input) == 3 else lax.squeeze(image, (0,))
