"""Joining, repeating and reversing tensors. Purely structural, so they also run on integer index
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.arrays import axis, ints
from etrace_bridge.frontend.ops.dtypes import cast, result_type
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import (
    atleast_1d,
    atleast_2d,
    ravel,
    reshape,
    slice_dim,
    transpose,
)


@implements("cat", "concat", "concatenate")
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate; vectors of length 0 are skipped whatever the other shapes, as torch does."""
    dtype = result_type(*tensors)
    kept = [cast(x, dtype) for x in tensors if np.shape(x) != (0,)] or [cast(tensors[0], dtype)]
    return kept[0] if len(kept) == 1 else lax.concatenate(kept, axis(dim, np.ndim(kept[0])))


@implements("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate along a new dimension."""
    d = axis(dim, np.ndim(tensors[0]) + 1)
    return cat([lax.expand_dims(x, (d,)) for x in tensors], d)


@implements("vstack", "row_stack")
def vstack(tensors: Sequence[Any]) -> Any:
    """Stack rows."""
    return cat([atleast_2d(x) for x in tensors], 0)


@implements("column_stack")
def column_stack(tensors: Sequence[Any]) -> Any:
    """Put vectors side by side as columns."""
    return cat([reshape(x, (np.size(x), 1)) if np.ndim(x) < 2 else x for x in tensors], 1)


@implements("hstack")
def hstack(tensors: Sequence[Any]) -> Any:
    """Stack columns."""
    tensors = [atleast_1d(x) for x in tensors]
    return cat(tensors, 0 if np.ndim(tensors[0]) == 1 else 1)


@implements("repeat", "tile")
def repeat(input: Any, *repeats: Any) -> Any:
    """Repeat the whole tensor along each dimension."""
    times = ints(repeats)
    ndim = max(len(times), np.ndim(input))
    times = (1,) * (ndim - len(times)) + times
    shape = (1,) * (ndim - np.ndim(input)) + np.shape(input)
    if all(n == 1 for n in times):
        return reshape(input, shape)
    # (a, b) repeated (m, n) times is a broadcast to (m, a, n, b) that is then merged.
    wide = [s for pair in zip(times, shape, strict=True) for s in pair]
    places = [2 * d + 1 for d in range(ndim)]
    return reshape(
        lax.broadcast_in_dim(reshape(input, shape), wide, places),
        [n * s for n, s in zip(times, shape, strict=True)],
    )


@implements("repeat_interleave")
def repeat_interleave(
    input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeat each entry along one dimension."""
    if not isinstance(repeats, int):
        repeats = np.asarray(repeats)
        repeats = int(repeats) if repeats.size == 1 else repeats
    x = ravel(input) if dim is None else input
    d = axis(dim or 0, np.ndim(x))
    if isinstance(repeats, int):
        wide = lax.broadcast_in_dim(
            x, (*x.shape[: d + 1], repeats, *x.shape[d + 1 :]), [i + (i > d) for i in range(x.ndim)]
        )
        return reshape(wide, (*x.shape[:d], x.shape[d] * repeats, *x.shape[d + 1 :]))
    parts = [slice_dim(x, d, i, i + 1) for i in np.repeat(np.arange(x.shape[d]), repeats)]
    return lax.concatenate(parts, d)


@implements("aten::repeat_interleave.Tensor")
def repeated_indices(repeats: Any, *, output_size: int | None = None) -> Any:
    """Each index as often as told; the counts must be constants."""
    return jnp.asarray(np.repeat(np.arange(np.size(repeats)), np.asarray(repeats)))


@implements("flip")
def flip(input: Any, *dims: Any) -> Any:
    """Reverse along dimensions."""
    return (
        lax.rev(input, [axis(d, np.ndim(input)) for d in ints(dims)]) if np.ndim(input) else input
    )


implements("fliplr")(lambda input: flip(input, 1))
implements("flipud")(lambda input: flip(input, 0))


@implements("roll")
def roll(input: Any, shifts: Any, dims: Any = ()) -> Any:
    """Shift entries along dimensions, the end coming back at the start."""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if not dims:
        return reshape(roll(ravel(input), shifts, 0), np.shape(input))
    for shift, dim in zip(shifts, dims, strict=True):
        d = axis(dim, np.ndim(input))
        cut = -shift % max(np.shape(input)[d], 1) if np.ndim(input) else 0
        if cut:
            input = lax.concatenate([slice_dim(input, d, cut), slice_dim(input, d, 0, cut)], d)
    return input


@implements("rot90")
def rot90(input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Rotate by 90 degrees in the plane of two dimensions."""
    a, b = dims
    turns = {
        0: lambda x: x,
        1: lambda x: transpose(flip(x, b), a, b),
        2: lambda x: flip(x, a, b),
        3: lambda x: flip(transpose(x, a, b), b),
    }
    return turns[k % 4](input)
