"""Running totals along a dimension, sorting, and order statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.arrays import (
    Values,
    axis,
    expand_to,
    full,
    is_float,
    scalar,
    select,
    zeros_like,
)
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, float_type
from etrace_bridge.frontend.ops.indexing import take_along
from etrace_bridge.frontend.ops.joining import cat
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import slice_dim

# ---- running totals


def _enter_running(name: str, scan: Callable) -> None:
    def rule(input: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        x = cast(
            input,
            dtype if dtype is not None else dtype_of(input) if is_float(input) else torch.int64,
        )
        return scan(x, axis=axis(dim, np.ndim(x))) if np.ndim(x) else x

    implements(name)(rule)


_enter_running("cumsum", lax.cumsum)
_enter_running("cumprod", lax.cumprod)


@implements("logcumsumexp")
def logcumsumexp(input: Any, dim: int) -> Any:
    """Running logarithm of the sum of exponentials."""
    x = cast(input, float_type(input))
    return lax.cumlogsumexp(x, axis=axis(dim, np.ndim(x))) if np.ndim(x) else x


def _enter_record(name: str, scan: Callable) -> None:
    def rule(input: Any, dim: int) -> Values:
        if np.ndim(input) == 0:
            return Values(input, full((), 0, torch.int64))
        d = axis(dim, np.ndim(input))
        x = lax.stop_gradient(cast(input, torch.uint8) if input.dtype == np.bool_ else input)
        here = cast(lax.broadcasted_iota(np.int32, np.shape(x), d), torch.int64)
        # The last place so far that equalled the running extremum is where the current one comes
        # from.
        record = lax.eq(x, scan(x, axis=d))
        index = lax.cummax(select(record, here, zeros_like(here)), axis=d)
        return Values(take_along(input, index, d), index)

    implements(name)(rule)


_enter_record("cummax", lax.cummax)
_enter_record("cummin", lax.cummin)


@implements("diff")
def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """n-th difference of neighbours along a dimension."""
    if n == 0:
        return input
    d = axis(dim, np.ndim(input))
    x = cat([part for part in (prepend, input, append) if part is not None], d)
    for _ in range(n):
        after, before = slice_dim(x, d, 1), slice_dim(x, d, 0, max(x.shape[d] - 1, 0))
        x = lax.ne(after, before) if x.dtype == np.bool_ else lax.sub(after, before)
    return x


# ---- sorting


def _order(x: Any, d: int, descending: bool) -> Any:
    """Indices that sort along an axis, equals keeping their order."""
    x = lax.stop_gradient(cast(x, torch.uint8) if x.dtype == np.bool_ else x)
    here = cast(lax.broadcasted_iota(np.int32, np.shape(x), d), torch.int64)
    # Sort the reversed sequence upwards and reverse: equals then keep their order too
    if descending:
        x, here = lax.rev(x, (d,)), lax.rev(here, (d,))
    _, index = lax.sort((x, here), dimension=d, num_keys=1, is_stable=True)
    return lax.rev(index, (d,)) if descending else index


@implements("sort")
def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Values:
    """Sorted values and their indices along a dimension."""
    if np.ndim(input) == 0:
        return Values(input, full((), 0, torch.int64))
    d = axis(dim, np.ndim(input))
    index = _order(input, d, descending)
    return Values(take_along(input, index, d), index)


implements("aten::sort.stable")(
    lambda input, *, stable=None, dim=-1, descending=False: sort(input, dim, descending)
)
implements("msort")(lambda input: sort(input, 0)[0])


@implements("argsort")
def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Indices that sort along a dimension."""
    return sort(input, dim, descending)[1]


@implements("topk")
def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Values:
    """The k largest or smallest entries along a dimension, in order, and their indices."""
    if np.ndim(input) == 0:
        return sort(input)
    d = axis(dim, np.ndim(input))
    index = slice_dim(_order(input, d, largest), d, 0, k)
    return Values(take_along(input, index, d), index)


@implements("kthvalue")
def kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Values:
    """The k-th smallest entry along a dimension and its index."""
    if np.ndim(input) == 0:
        return sort(input)
    d = axis(dim, np.ndim(input))
    index = slice_dim(_order(input, d, False), d, k - 1, k)
    value = take_along(input, index, d)
    return (
        Values(value, index)
        if keepdim
        else Values(lax.squeeze(value, (d,)), lax.squeeze(index, (d,)))
    )


def _quantile(name: str, skip_nan: bool) -> None:
    def rule(
        input: Any,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Any:
        function = jnp.nanquantile if skip_nan else jnp.quantile
        q = q if isinstance(q, (int, float)) else lax.stop_gradient(q)
        if np.ndim(input) == 0:
            input, dim, keepdim = lax.reshape(input, (1,)), 0, False
        return function(
            input, cast(q, dtype_of(input)), axis=dim, keepdims=keepdim, method=interpolation
        )

    implements(name)(rule)


_quantile("quantile", skip_nan=False)
_quantile("nanquantile", skip_nan=True)


@implements("median")
def median(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower of the middle entries; nan where there is a nan. Along a dimension, its index too."""
    x = lax.reshape(input, (np.size(input),)) if dim is None else input
    if np.ndim(x) == 0:
        return sort(x)
    d = axis(dim or 0, np.ndim(x))
    middle = (x.shape[d] - 1) // 2
    index = _order(x, d, False)
    chosen = slice_dim(index, d, middle, middle + 1)
    if is_float(x):  # nan sorts last: the first of them is the answer where there is one
        bad = lax.ne(x, x)
        first_bad = lax.expand_dims(cast(lax.argmax(bad, d, np.int32), torch.int64), (d,))
        chosen = select(lax.expand_dims(lax.reduce_or(bad, (d,)), (d,)), first_bad, chosen)
    value = take_along(x, chosen, d)
    if dim is None:
        return _shared_by_equals(x, lax.reshape(value, ()))
    return (
        Values(value, chosen)
        if keepdim
        else Values(lax.squeeze(value, (d,)), lax.squeeze(chosen, (d,)))
    )


def _shared_by_equals(x: Any, value: Any) -> Any:
    """Return `value`, its gradient shared evenly among the entries equal to it, as torch does for a
    full median.
    """
    if not is_float(x):
        return value
    fixed = lax.stop_gradient(value)
    same = lax.eq(lax.stop_gradient(x), expand_to(fixed, np.shape(x)))
    count = lax.reduce_sum(lax.convert_element_type(same, x.dtype), (0,))
    part = lax.reduce_sum(select(same, lax.sub(x, lax.stop_gradient(x)), zeros_like(x)), (0,))
    return lax.add(fixed, lax.div(part, lax.max(count, scalar(1, count))))


# ---- finding places in a sorted sequence


def _places(sorted_sequence: Any, values: Any, right: bool) -> Any:
    """Count, for each value, the entries of the sequence (last axis) that lie before it."""
    dtype = torch.promote_types(dtype_of(sorted_sequence), dtype_of(values))
    edges, values = cast(sorted_sequence, dtype), cast(values, dtype)
    outer = np.shape(edges)[:-1] if np.ndim(edges) > 1 else ()
    shape = (*np.shape(values), np.shape(edges)[-1])
    edges = lax.broadcast_in_dim(edges, shape, (*range(len(outer)), len(shape) - 1))
    values = expand_to(lax.expand_dims(values, (len(shape) - 1,)), shape)
    before = lax.le(edges, values) if right else lax.lt(edges, values)
    return lax.reduce_sum(cast(before, torch.int64), (len(shape) - 1,))


@implements("searchsorted")
def searchsorted(
    sorted_sequence: Any,
    input: Any = None,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Where each value belongs in a sorted sequence."""
    values = lax.full((), input) if isinstance(input, (int, float)) else input
    if sorter is not None:
        sorted_sequence = take_along(sorted_sequence, sorter, np.ndim(sorted_sequence) - 1)
    found = _places(sorted_sequence, values, right or side == "right")
    return cast(found, torch.int32) if out_int32 else found


@implements("bucketize")
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """The index of the bucket that each value falls into."""
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)
