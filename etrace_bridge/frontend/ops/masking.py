"""Masks, triangles, diagonals, partial writes to a copy, embedding and one-hot codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import NotSupportedError
from etrace_bridge._jax_compat import is_concrete
from etrace_bridge.frontend.ops.arrays import axis, expand_to, full, scalar, select, zeros_like
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, result_type, to_jax_dtype
from etrace_bridge.frontend.ops.indexing import data_dependent_shape, setitem
from etrace_bridge.frontend.ops.ranges import require_range
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import diagonal, reshape, transpose_to

# ---- masks


@implements("masked_fill")
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    """Put one value wherever the mask is true."""
    return select(mask, cast(value, dtype_of(input)), input)


@implements("masked_scatter")
def masked_scatter(input: Any, mask: Any, source: Any) -> Any:
    """Put the entries of `source`, in order, where the mask is true."""
    shape = np.broadcast_shapes(np.shape(input), np.shape(mask))
    mask, x = expand_to(mask, shape), expand_to(input, shape)
    place = lax.cumsum(cast(reshape(mask, (np.size(mask),)), torch.int32), axis=0)
    place = lax.max(lax.sub(place, np.int32(1)), np.int32(0))
    picked = reshape(source, (np.size(source),)).at[place].get(mode=lax.GatherScatterMode.CLIP)
    return select(mask, reshape(picked, shape), x)


def _refuse(what: str, instead: str) -> Callable:
    def rule(*args: Any, **kwargs: Any) -> Any:
        raise data_dependent_shape(what, instead)

    return rule


implements("masked_select")(
    _refuse("torch.masked_select", "`torch.where(mask, x, other)` or a product with the mask")
)
implements("nonzero", "argwhere")(_refuse("torch.nonzero", "a mask with `torch.where(mask, a, b)`"))
implements("unique", "unique_consecutive", "_unique2")(
    _refuse("torch.unique", "a fixed set of values")
)
implements("bincount")(_refuse("torch.bincount", "`torch.nn.functional.one_hot(x, n).sum(0)`"))


@implements("isin")
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Return which entries are among others."""
    a, b = (cast(x, result_type(elements, test_elements)) for x in (elements, test_elements))
    a, b = lax.expand_dims(a, (np.ndim(a),)), reshape(b, (1,) * np.ndim(a) + (np.size(b),))
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    found = lax.reduce_or(lax.eq(expand_to(a, shape), expand_to(b, shape)), (len(shape) - 1,))
    return lax.bitwise_not(found) if invert else found


# ---- triangles and diagonals


def _band(shape: Sequence[int], keep: Callable, offset: int) -> Any:
    """Compare column minus row with an offset."""
    row, column = (lax.broadcasted_iota(np.int32, tuple(shape), len(shape) - k) for k in (2, 1))
    return keep(lax.sub(column, row), np.int32(offset))


@implements("tril")
def tril(input: Any, diagonal: int = 0) -> Any:
    """Keep the lower triangle."""
    return select(_band(np.shape(input), lax.le, diagonal), input, zeros_like(input))


@implements("triu")
def triu(input: Any, diagonal: int = 0) -> Any:
    """Keep the upper triangle."""
    return select(_band(np.shape(input), lax.ge, diagonal), input, zeros_like(input))


@implements("fill_diagonal_")
def fill_diagonal_(input: Any, fill_value: float, wrap: bool = False) -> Any:
    """Put one value on the main diagonal; with `wrap`, again after each square of a tall matrix."""
    shape = np.shape(input)
    place = lax.broadcasted_iota(np.int32, shape, 0)
    if wrap and len(shape) == 2:
        place = lax.rem(place, np.int32(shape[1] + 1))
    mask = full(shape, True, torch.bool)
    for k in range(1, len(shape)):
        mask = lax.bitwise_and(mask, lax.eq(place, lax.broadcasted_iota(np.int32, shape, k)))
    return select(mask, scalar(fill_value, input), input)


@implements("diag_embed")
def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Put the last dimension on a diagonal of a new plane."""
    n = np.shape(input)[-1] + abs(offset)
    before = max(0, -offset), max(0, offset)
    no_padding = [(0, 0, 0)] * (np.ndim(input) - 1)
    rows = lax.pad(
        input, scalar(0, input), [*no_padding, (before[0], n - np.shape(input)[-1] - before[0], 0)]
    )
    wide = lax.broadcast_in_dim(rows, (*np.shape(rows), n), tuple(range(np.ndim(rows))))
    plane = select(_band(np.shape(wide), lax.eq, offset), wide, zeros_like(wide))
    a, b = axis(dim1, plane.ndim), axis(dim2, plane.ndim)
    rest = iter(range(plane.ndim - 2))
    order = [
        plane.ndim - 2 if d == a else plane.ndim - 1 if d == b else next(rest)
        for d in range(plane.ndim)
    ]
    return transpose_to(plane, order)


@implements("diag")
def diag(input: Any, diagonal: int = 0) -> Any:
    """The diagonal of a matrix, or the matrix of a diagonal."""
    return diag_embed(input, diagonal) if np.ndim(input) == 1 else _diagonal(input, diagonal)


_diagonal = diagonal
implements("diagflat")(
    lambda input, offset=0: diag_embed(reshape(input, (np.size(input),)), offset)
)


@implements("trace")
def trace(input: Any) -> Any:
    """Sum of the diagonal."""
    entries = _diagonal(input)
    return lax.reduce_sum(
        entries if dtype_of(input).is_floating_point else cast(entries, torch.int64), (0,)
    )


# ---- partial writes to a copy


@implements("select_scatter")
def select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    """Copy with one slice replaced."""
    return setitem(input, (slice(None),) * axis(dim, np.ndim(input)) + (int(index),), src)


@implements("slice_scatter")
def slice_scatter(
    input: Any,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Copy with a range of slices replaced."""
    return setitem(
        input, (slice(None),) * axis(dim, np.ndim(input)) + (slice(start, end, step),), src
    )


@implements("diagonal_scatter")
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Copy with a diagonal replaced."""
    a, b = axis(dim1, np.ndim(input)), axis(dim2, np.ndim(input))
    order = [d for d in range(np.ndim(input)) if d not in (a, b)] + [a, b]
    back = np.argsort(order).tolist()
    x = transpose_to(input, order)
    rows, columns = np.shape(x)[-2:]
    n = np.shape(src)[-1]
    first = max(0, -offset), max(0, offset)
    plane = lax.broadcast_in_dim(src, (*np.shape(src), n), tuple(range(np.ndim(src))))
    space = [(0, 0, 0)] * (np.ndim(x) - 2) + [
        (first[0], rows - n - first[0], 0),
        (first[1], columns - n - first[1], 0),
    ]
    on_diagonal = _band(np.shape(x), lax.eq, offset)
    return transpose_to(select(on_diagonal, lax.pad(plane, scalar(0, plane), space), x), back)


# ---- codes


@implements("embedding")
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows. Row `padding_idx` is made constant in the weight, so that the lookup stays one
    gather.
    """
    if scale_grad_by_freq:
        raise NotSupportedError(
            "`embedding(scale_grad_by_freq=True)` divides gradients by word counts of a "
            "mini-batch, which a per-step rule does not have. Set `scale_grad_by_freq=False`."
        )
    require_range(indices, "embedding", 0, np.shape(weight)[0])
    if padding_idx >= 0:
        row = lax.eq(lax.broadcasted_iota(np.int32, np.shape(weight), 0), np.int32(padding_idx))
        weight = select(row, lax.stop_gradient(weight), weight)
    return weight.at[indices].get(
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS, wrap_negative_indices=False
    )


@implements("F.embedding")
def functional_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`embedding` with the arguments of `torch.nn.functional`."""
    if max_norm is not None:
        raise NotSupportedError(
            "`embedding(max_norm=...)` rescales the weight in place during the forward pass, "
            "outside of autograd. Normalise the weight after the optimizer step instead."
        )
    padding = -1 if padding_idx is None else padding_idx % np.shape(weight)[0]
    return embedding(weight, input, padding, scale_grad_by_freq)


@implements("one_hot")
def one_hot(input: Any, num_classes: int = -1) -> Any:
    """Code integers as unit vectors."""
    if num_classes == -1:
        if not is_concrete(input):
            raise data_dependent_shape("one_hot(x)", "`one_hot(x, num_classes)`")
        num_classes = int(np.max(np.asarray(input))) + 1
    require_range(input, "one_hot", 0, num_classes)
    shape = (*np.shape(input), num_classes)
    classes = lax.broadcasted_iota(input.dtype, shape, len(shape) - 1)
    same = lax.eq(classes, lax.broadcast_in_dim(input, shape, tuple(range(len(shape) - 1))))
    return lax.convert_element_type(same, to_jax_dtype(torch.int64))
