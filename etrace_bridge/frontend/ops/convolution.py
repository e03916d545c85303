"""Convolutions, as bare `conv_general_dilated` equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import reshape

Sizes = int | Sequence[int]


def each(value: Sizes, n: int) -> tuple[int, ...]:
    """Repeat a size for every spatial dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _run(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    spread: Any,
    dilation: Any,
    groups: int,
) -> Any:
    """Convolve `(N, C, *space)`, then add the bias of each channel; `spread` puts zeros between
    entries of x.
    """
    n = np.ndim(weight) - 2
    y = lax.conv_general_dilated(
        x, weight, stride, padding, spread, dilation, _LAYOUT[n], feature_group_count=groups
    )
    if bias is None:
        return y
    return lax.add(y, lax.broadcast_in_dim(bias, np.shape(y), (1,)))


_LAYOUT = {n: lax.ConvDimensionNumbers(*[tuple(range(n + 2))] * 3) for n in (1, 2, 3)}


def _batched(x: Any, ndim: int) -> tuple[Any, bool]:
    """Give an input without a batch dimension one, and tell whether it lacked it."""
    missing = np.ndim(x) == ndim - 1
    return (reshape(x, (1, *np.shape(x))) if missing else x), missing


def convolve(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """Cross-correlation in 1, 2 or 3 dimensions; "same" padding puts the odd entry at the end."""
    n = np.ndim(weight) - 2
    x, missing = _batched(input, n + 2)
    stride, dilation = each(stride, n), each(dilation, n)
    if isinstance(padding, str):
        total = [
            d * (k - 1) if padding == "same" else 0
            for d, k in zip(dilation, np.shape(weight)[2:], strict=True)
        ]
        space = [(t // 2, t - t // 2) for t in total]
    else:
        space = [(p, p) for p in each(padding, n)]
    y = _run(x, weight, bias, stride, space, (1,) * n, dilation, groups)
    return lax.squeeze(y, (0,)) if missing else y


def convolve_transposed(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    """The transpose of `convolve`: the input spread by the stride, met by the flipped kernel."""
    n = np.ndim(weight) - 2
    x, missing = _batched(input, n + 2)
    stride, padding, extra, dilation = (
        each(v, n) for v in (stride, padding, output_padding, dilation)
    )
    channels_in, channels_out, *kernel = np.shape(weight)
    space = []
    for k, p, e, d in zip(kernel, padding, extra, dilation, strict=True):
        space.append((d * (k - 1) - p, d * (k - 1) - p + e))
    # (in, out/g, *k) -> (out, in/g, *k), each group on its own.
    w = reshape(weight, (groups, channels_in // groups, channels_out, *kernel))
    w = lax.transpose(w, (0, 2, 1, *range(3, 3 + n)))
    w = lax.rev(
        reshape(w, (groups * channels_out, channels_in // groups, *kernel)), tuple(range(2, 2 + n))
    )
    y = _run(x, w, bias, (1,) * n, space, stride, dilation, groups)
    return lax.squeeze(y, (0,)) if missing else y


for _n in (1, 2, 3):
    implements(f"conv{_n}d")(convolve)
    implements(f"conv_transpose{_n}d")(convolve_transposed)


@implements("convolution", "_convolution")
def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *backend: bool,
) -> Any:
    """Both kinds of convolution with the arguments of aten."""
    if transposed:
        return convolve_transposed(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return convolve(input, weight, bias, stride, padding, dilation, groups)


implements("mkldnn_convolution")(
    lambda input, weight, bias, padding, stride, dilation, groups: convolve(
        input, weight, bias, stride, padding, dilation, groups
    )
)


# ---- channels and space exchanged


@implements("pixel_shuffle")
def pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    """Spread blocks of channels over space."""
    r = upscale_factor
    *outer, c, h, w = np.shape(input)
    x = reshape(input, (*outer, c // r**2, r, r, h, w))
    k = len(outer)
    x = lax.transpose(x, (*range(k), k, k + 3, k + 1, k + 4, k + 2))
    return reshape(x, (*outer, c // r**2, h * r, w * r))


@implements("pixel_unshuffle")
def pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    """Gather blocks of space into channels."""
    r = downscale_factor
    *outer, c, h, w = np.shape(input)
    x = reshape(input, (*outer, c, h // r, r, w // r, r))
    k = len(outer)
    x = lax.transpose(x, (*range(k), k, k + 2, k + 4, k + 1, k + 3))
    return reshape(x, (*outer, c * r**2, h // r, w // r))


@implements("channel_shuffle")
def channel_shuffle(input: Any, groups: int) -> Any:
    """Interleave groups of channels."""
    n, c, *space = np.shape(input)
    x = reshape(input, (n, groups, c // groups, *space))
    return reshape(lax.transpose(x, (0, 2, 1, *range(3, x.ndim))), (n, c, *space))
