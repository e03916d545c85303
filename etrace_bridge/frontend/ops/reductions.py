"""Reductions: sums, moments, norms, extrema, scans along a dimension, sorting."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import NotSupportedError
from etrace_bridge._jax_compat import is_concrete
from etrace_bridge.frontend.ops.arrays import (
    Values,
    axes,
    axis,
    expand_to,
    full,
    ints,
    is_float,
    same_shape,
    scalar,
    select,
    together,
    zeros_like,
)
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, float_type
from etrace_bridge.frontend.ops.elementwise import power
from etrace_bridge.frontend.ops.indexing import take_along
from etrace_bridge.frontend.ops.mathematics import absolute
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.lowering import as_call

Dim = int | Sequence[int] | None


def _keep(x: Any, over: tuple[int, ...], keepdim: bool) -> Any:
    return lax.expand_dims(x, over) if keepdim and over else x


def _sum_type(x: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Integers and booleans add up in int64."""
    return dtype if dtype is not None else dtype_of(x) if is_float(x) else torch.int64


# ---- sums and moments


@implements("sum")
def sum_(
    input: Any, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Sum over dimensions."""
    over = axes(dim, np.ndim(input))
    reduce = lax.reduce_or if dtype == torch.bool else lax.reduce_sum
    return _keep(reduce(cast(input, _sum_type(input, dtype)), over), over, keepdim)


@implements("sum_to_size", may_return_input=True)
def sum_to_size(input: Any, *size: Any) -> Any:
    """Sum over the dimensions along which a tensor of the given size would be broadcast."""
    target = ints(size)
    extra = np.ndim(input) - len(target)
    x = sum_(input, tuple(range(extra))) if extra else input
    over = tuple(d for d, n in enumerate(target) if n == 1 and np.shape(x)[d] != 1)
    # torch sums a single number too, which makes a bool an int
    return sum_(x, over, True) if over or not np.ndim(input) else x


@implements("nansum")
def nansum(
    input: Any, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Sum over dimensions, nan counting as 0."""
    known = select(lax.ne(input, input), zeros_like(input), input) if is_float(input) else input
    return sum_(known, dim, keepdim, dtype=dtype)


@implements("mean")
def mean(
    input: Any, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Mean over dimensions."""
    x = cast(input, dtype) if dtype is not None else input
    over = axes(dim, np.ndim(x))
    count = math.prod(np.shape(x)[d] for d in over)
    return _keep(lax.div(lax.reduce_sum(x, over), scalar(count, x)), over, keepdim)


@implements("nanmean")
def nanmean(
    input: Any, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Mean over dimensions of the entries that are not nan."""
    count = sum_(lax.eq(input, input), dim, keepdim)
    total = nansum(input, dim, keepdim, dtype=dtype)
    return lax.div(total, cast(count, dtype_of(total)))


@implements("count_nonzero")
def count_nonzero(input: Any, dim: Dim = None) -> Any:
    """Count the entries that are not 0."""
    return sum_(cast(input, torch.bool), dim)


def _moments(x: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Variance with divisor `n - correction`, and the mean."""
    over = axes(dim, np.ndim(x))
    count = math.prod(np.shape(x)[d] for d in over)
    centre = mean(x, over, True) if over else x
    distance = lax.sub(x, expand_to(centre, np.shape(x)))
    parts = (lax.real(distance), lax.imag(distance)) if np.iscomplexobj(x) else (distance,)
    spread = functools.reduce(lax.add, [lax.reduce_sum(lax.square(part), over) for part in parts])
    variance = lax.div(spread, scalar(max(count - correction, 0), spread))
    return _keep(variance, over, keepdim), centre if keepdim or not over else lax.squeeze(
        centre, over
    )


def _moment_arguments(args: tuple, kwargs: dict) -> tuple[Any, Any, bool]:
    """Read the overloads `(unbiased)`, `(dim, unbiased, keepdim)` and `(dim, *, correction,
    keepdim)`.
    """
    rest = list(args)
    dim = kwargs.get("dim", rest.pop(0) if rest and not isinstance(rest[0], bool) else None)
    unbiased = kwargs.get("unbiased", rest.pop(0) if rest else True)
    keepdim = kwargs.get("keepdim", rest.pop(0) if rest else False)
    correction = kwargs.get("correction")
    return dim, (int(unbiased) if correction is None else correction), keepdim


def _enter_moments(name: str, of: Callable[[Any, Any], Any]) -> None:
    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        return of(*_moments(input, *_moment_arguments(args, kwargs)))

    implements(name)(rule)


_enter_moments("var", lambda variance, _: variance)
_enter_moments("std", lambda variance, _: safe_root(variance))
_enter_moments("var_mean", lambda variance, centre: (variance, centre))
_enter_moments("std_mean", lambda variance, centre: (safe_root(variance), centre))


def safe_root(x: Any) -> Any:
    """Square root whose derivative at 0 is 0, as torch has it for `std` and the norms."""
    at_zero = lax.eq(x, scalar(0, x))
    return select(at_zero, zeros_like(x), lax.sqrt(select(at_zero, scalar(1, x), x)))


@implements("prod")
def prod(
    input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Product over one dimension or all."""
    over = axes(dim, np.ndim(input))
    reduce = lax.reduce_and if dtype == torch.bool else lax.reduce_prod
    return _keep(reduce(cast(input, _sum_type(input, dtype)), over), over, keepdim)


# ---- truth


def _enter_truth(name: str, reduce: Callable) -> None:
    def rule(input: Any, dim: Dim = None, keepdim: bool = False) -> Any:
        over = axes(dim, np.ndim(input))
        result = _keep(reduce(cast(input, torch.bool), over), over, keepdim)
        return cast(result, torch.uint8) if input.dtype == np.uint8 else result

    implements(name)(rule)


_enter_truth("any", lax.reduce_or)
_enter_truth("all", lax.reduce_and)


# ---- extrema


@implements("amax")
def amax(input: Any, dim: Dim = (), keepdim: bool = False) -> Any:
    """Largest entry over dimensions; the gradient is shared evenly among equals."""
    over = axes(dim, np.ndim(input))
    return _keep(lax.reduce_max(input, over), over, keepdim)


@implements("amin")
def amin(input: Any, dim: Dim = (), keepdim: bool = False) -> Any:
    """Smallest entry over dimensions; the gradient is shared evenly among equals."""
    over = axes(dim, np.ndim(input))
    return _keep(lax.reduce_min(input, over), over, keepdim)


class MinMax(NamedTuple):
    """What `aminmax` returns."""

    min: Any
    max: Any


@implements("aminmax")
def aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False) -> MinMax:
    """Smallest and largest entry."""
    return MinMax(amin(input, dim, keepdim), amax(input, dim, keepdim))


def _arg_extremum(x: Any, dim: int | None, keepdim: bool, find: Callable) -> Any:
    if dim is None:
        index = find(lax.reshape(x, (np.size(x),)), 0, np.int32)
        return cast(lax.reshape(index, (1,) * np.ndim(x)) if keepdim else index, torch.int64)
    if np.ndim(x) == 0:
        return full((), 0, torch.int64)
    d = axis(dim, np.ndim(x))
    index = cast(find(x, d, np.int32), torch.int64)
    return lax.expand_dims(index, (d,)) if keepdim else index


@implements("argmax")
def argmax(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Index of the first largest entry."""
    return _arg_extremum(input, dim, keepdim, lax.argmax)


@implements("argmin")
def argmin(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Index of the first smallest entry."""
    return _arg_extremum(input, dim, keepdim, lax.argmin)


def pick_extremum(name: str, find: Callable, d: int) -> Callable[[Any], tuple[Any, Any]]:
    """Make the function that gives the extremum along an axis, and its index; the gradient goes to
    the entry picked.

    It is one call of that name in the traced program, where `frontend.time` looks for it.
    """

    def pick(x: Any) -> tuple[Any, Any]:
        index = find(x, d, True)
        return take_along(x, index, d), index

    pick.__name__ = name
    return pick


def _extremum_along(x: Any, dim: int, keepdim: bool, name: str, find: Callable) -> Values:
    if np.ndim(x) == 0:
        return Values(x, full((), 0, torch.int64))
    d = axis(dim, np.ndim(x))
    pick = pick_extremum(name, find, d)
    value, index = pick(x) if is_concrete(x) else as_call(pick)(x)
    return (
        Values(value, index)
        if keepdim
        else Values(lax.squeeze(value, (d,)), lax.squeeze(index, (d,)))
    )


def _enter_extremum(name: str, pairwise: Callable, overall: Callable, find: Callable) -> None:
    """Enter `max` or `min`, each three functions in one: of all entries, along a dimension, of two
    tensors.
    """

    def rule(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        second = (
            other if other is not None else dim if np.ndim(dim) or hasattr(dim, "dtype") else None
        )
        if second is not None:
            return pairwise(*same_shape(*together(input, second)))
        if dim is None:
            return overall(input)
        return _extremum_along(input, dim, keepdim, f"{name}_along", find)

    implements(name)(rule)


_enter_extremum("max", lax.max, amax, argmax)
_enter_extremum("min", lax.min, amin, argmin)


# ---- norms


def vector_norm(x: Any, order: float, over: tuple[int, ...], keepdim: bool = False) -> Any:
    """p-norm over axes, with derivative 0 where the norm is 0."""
    size = absolute(x)
    if order == math.inf:
        value = lax.reduce_max(size, over)
    elif order == -math.inf:
        value = lax.reduce_min(size, over)
    elif order == 0:
        value = lax.reduce_sum(
            lax.convert_element_type(lax.ne(size, scalar(0, size)), size.dtype), over
        )
    elif order == 1:
        value = lax.reduce_sum(size, over)
    elif order == 2:
        value = safe_root(lax.reduce_sum(lax.square(size), over))
    else:
        at_zero = lax.eq(size, scalar(0, size))
        safe = select(at_zero, scalar(1, size), size)
        zero = zeros_like(size) if order > 0 else lax.full(np.shape(size), scalar(math.inf, size))
        total = lax.reduce_sum(select(at_zero, zero, power(safe, order)), over)
        empty = lax.eq(total, scalar(0, total))
        root = power(select(empty, scalar(1, total), total), 1 / order)
        value = select(empty, zeros_like(total), root)
    return _keep(value, over, keepdim)


@implements("linalg_vector_norm")
def linalg_vector_norm(
    input: Any,
    ord: float = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """p-norm of the vectors along dimensions."""
    x = cast(input, float_type(input) if dtype is None else dtype)
    return vector_norm(x, float(ord), axes(dim, np.ndim(x)), keepdim)


@implements("norm")
def norm(
    input: Any,
    p: Any = "fro",
    dim: Dim = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """p-norm, the Frobenius norm by default."""
    if p == "nuc":
        return linalg_matrix_norm(input, p, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)
    order = 2.0 if p in ("fro", None) else float(p)
    return linalg_vector_norm(input, order, dim, keepdim, dtype=dtype)


@implements("linalg_norm")
def linalg_norm(
    input: Any,
    ord: Any = None,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Vector norm, or a matrix norm where two dimensions and an order are given."""
    dims = axes(dim, np.ndim(input))
    if ord is None or len(dims) == 1:
        return linalg_vector_norm(input, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return linalg_matrix_norm(input, ord, dims if dim is None else dim, keepdim, dtype=dtype)


@implements("linalg_matrix_norm")
def linalg_matrix_norm(
    input: Any,
    ord: Any = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Frobenius norm, or the largest or smallest absolute row or column sum."""
    x = cast(input, float_type(input) if dtype is None else dtype)
    rows, columns = (axis(d, np.ndim(x)) for d in dim)
    if ord == "fro" or np.size(x) == 0:
        return vector_norm(x, 2.0, tuple(sorted((rows, columns))), keepdim)
    if ord in (1, -1, math.inf, -math.inf):
        summed, rest = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = lax.expand_dims(lax.reduce_sum(absolute(x), (summed,)), (summed,))
        value = (lax.reduce_max if ord > 0 else lax.reduce_min)(sums, (rest,))
        return _keep(
            lax.squeeze(lax.expand_dims(value, (rest,)), (rows, columns)),
            tuple(sorted((rows, columns))),
            keepdim,
        )
    raise NotSupportedError(
        f"`torch.linalg.matrix_norm(ord={ord!r})` needs singular values, which this bridge does "
        "not compute. Use the Frobenius norm, or register a rule with `etrace_bridge.register_op`."
    )
