"""Indexing: `x[...]` and its assignment, gather and scatter, masks, embeddings, triangles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import TracingError
from etrace_bridge._jax_compat import is_concrete
from etrace_bridge.frontend.ops.arrays import axis, expand_to, select
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of
from etrace_bridge.frontend.ops.elementwise import add, mul, remainder
from etrace_bridge.frontend.ops.ranges import require_range
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import reshape, select_dim, slice_dim, unsqueeze

_IN_BOUNDS = "promise_in_bounds"


def data_dependent_shape(what: str, instead: str) -> TracingError:
    """Make the error for results whose size depends on values."""
    return TracingError(
        f"`{what}` gives a result whose size depends on the values in a tensor. A traced step has "
        f"fixed shapes. Use {instead} instead."
    )


# ---- x[index]


def _consumed(item: Any) -> int:
    """How many dimensions of the tensor one index entry uses up."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return np.ndim(item) if getattr(item, "dtype", None) == np.bool_ else 1


def _items(index: Any, ndim: int) -> list[Any]:
    """Write an index as one entry for each dimension (and None for new ones), `...` filled in."""
    items = [
        np.asarray(i) if isinstance(i, (list, tuple, range)) else i
        for i in (index if isinstance(index, tuple) else (index,))
    ]
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    missing = ndim - sum(map(_consumed, items))
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


def _split_index(x: Any, items: list[Any]) -> tuple[Any, list[Any]]:
    """Apply the basic entries; return the block and, for each of its dimensions, an array index, a
    mask, or None.

    A mask over k dimensions stands once, followed by k - 1 entries `Ellipsis`.
    """
    rest: list[Any] = []
    d = 0
    for item in items:
        if type(item) is int:
            x = select_dim(x, d, item)
            continue
        if isinstance(item, slice):
            x = slice_dim(x, d, item.start, item.stop, item.step or 1)
        elif item is None or isinstance(item, bool) or _consumed(item) == 0:
            x = unsqueeze(x, d)
        entries: list[Any] = [item]
        if item is None or isinstance(item, slice):
            entries = [None]
        elif isinstance(item, bool):
            entries = [np.asarray([item])]
        elif _consumed(item) == 0:  # a 0-dim mask: a mask over a new dimension of size 1
            entries = [lax.reshape(item, (1,))]
        entries += [Ellipsis] * (_consumed(item) - 1)
        rest += entries
        d += len(entries)
    return x, rest


def _is_mask(entry: Any) -> bool:
    return getattr(entry, "dtype", None) == np.bool_


def _as_places(rest: list[Any]) -> list[Any]:
    """Turn masks into the integer indices of their true entries; that needs their values."""
    places: list[Any] = []
    for entry in rest:
        if not is_concrete(entry) and _is_mask(entry):
            raise data_dependent_shape(
                "x[mask]", "`torch.where(mask, x, other)` or `x.masked_fill(mask, value)`"
            )
        if entry is not Ellipsis:
            places += list(np.asarray(entry).nonzero()) if _is_mask(entry) else [entry]
    return places


def _numpy_index(x: Any, rest: list[Any]) -> tuple:
    """Return array indices and None, one for each dimension, as NumPy takes them; a negative one
    counts from the end.
    """
    for size, entry in zip(np.shape(x), rest, strict=False):
        if entry is not None:
            require_range(entry, "index", -size, size)
    return tuple(slice(None) if r is None else r for r in rest)


def _gathers(input: Any, index: Any) -> bool:
    """Return whether an index has a list, a mask or an array of places, so that the result is a
    copy.
    """
    items = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(i, (bool, list, tuple, range))
        or (hasattr(i, "dtype") and (np.ndim(i) > 0 or i.dtype == np.bool_))
        for i in items
    )


@implements("getitem", view=True, copies=_gathers)
def getitem(input: Any, index: Any) -> Any:
    """`input[index]`; a boolean mask must be a constant, because the size of the result depends on
    it.
    """
    block, rest = _split_index(input, _items(index, np.ndim(input)))
    return block if all(r is None for r in rest) else index_with(block, _as_places(rest))


@implements("index", "_unsafe_index")
def index_with(input: Any, indices: Sequence[Any]) -> Any:
    """Index with arrays in some dimensions and None in the others, as torch and NumPy do."""
    places = _as_places(list(indices))
    if not places:
        return input
    return jnp.asarray(input).at[_numpy_index(input, places)].get(mode=_IN_BOUNDS)


# ---- x[index] = values


@implements("setitem_")
def setitem(input: Any, index: Any, value: Any) -> Any:
    """Return `input` with `input[index] = value` done; a block is set by concatenation, which keeps
    positions plain.
    """
    items = _items(index, np.ndim(input))
    block, rest = _split_index(input, items)
    value = cast(value, dtype_of(input))
    if all(r is None for r in rest):
        new = expand_to(
            reshape(value, np.shape(value)[_extra_ones(value, block) :]), np.shape(block)
        )
    else:
        new = _put(block, rest, value, accumulate=False)
    return _write_block(input, [i for i in items if _consumed(i)], new)


def _extra_ones(value: Any, block: Any) -> int:
    return max(np.ndim(value) - np.ndim(block), 0)


def _write_block(x: Any, items: list[Any], new: Any) -> Any:
    """Put a block back where the basic entries of an index took it from."""
    spans: list[tuple[int, int, int]] = []
    for item in items:
        size = np.shape(x)[len(spans)]
        if type(item) is int:
            spans.append((item % size, item % size + 1, 1))
        elif isinstance(item, slice):
            start, stop, _ = slice(item.start, item.stop).indices(size)
            spans.append((start, max(start, stop), item.step or 1))
        else:
            spans += [(0, n, 1) for n in np.shape(x)[len(spans) : len(spans) + _consumed(item)]]
    if any(step != 1 for _, _, step in spans):
        shape = [-(-(stop - start) // step) for start, stop, step in spans]
        return x.at[tuple(slice(*span) for span in spans)].set(reshape(new, shape), mode=_IN_BOUNDS)
    new = reshape(new, [stop - start for start, stop, _ in spans])
    return _nest(x, [(start, stop) for start, stop, _ in spans], new, 0)


def _nest(x: Any, spans: list[tuple[int, int]], new: Any, d: int) -> Any:
    """Surround `new`, a block of `x`, by what lies before and after it, dimension by dimension."""
    if d == len(spans):
        return new
    start, stop = spans[d]
    inner = _nest(slice_dim(x, d, start, stop), spans, new, d + 1)
    parts = [slice_dim(x, d, 0, start), inner, slice_dim(x, d, stop)]
    parts = [p for p in parts if np.shape(p)[d]]
    return inner if len(parts) <= 1 else lax.concatenate(parts, d)


def _put(x: Any, rest: list[Any], value: Any, accumulate: bool) -> Any:
    """Write values at array indices, or everywhere a mask is true."""
    masks = [k for k, r in enumerate(rest) if _is_mask(r)]
    arrays = [r for r in rest if r is not None and r is not Ellipsis and not _is_mask(r)]
    if len(masks) == 1 and not arrays:
        at, mask = masks[0], rest[masks[0]]
        after = np.ndim(x) - at - np.ndim(mask)
        if at == 0 and np.ndim(value) <= after or np.size(value) == 1:
            value = reshape(value, ()) if np.size(value) == 1 else value
            wide = lax.broadcast_in_dim(mask, np.shape(x), tuple(range(at, at + np.ndim(mask))))
            return select(wide, add(x, value) if accumulate else value, x)
    place = jnp.asarray(x).at[_numpy_index(x, _as_places(rest))]
    return _WRITES["add" if accumulate else None](place)(value, mode=_IN_BOUNDS)


@implements("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(
    input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """Write or add values at array indices."""
    rest = [
        entry
        for i in indices
        for entry in ([i] + [Ellipsis] * (_consumed(i) - 1) if i is not None else [None])
    ]
    rest += [None] * (np.ndim(input) - len(rest))
    return _put(input, rest, cast(values, dtype_of(input)), accumulate)


# ---- gather and scatter along one dimension


def _places_along(index: Any, d: int) -> tuple:
    index = cast(index, torch.int64)
    shape = np.shape(index)
    return tuple(
        index if k == d else lax.broadcasted_iota(index.dtype, shape, k) for k in range(len(shape))
    )


def take_along(x: Any, index: Any, d: int) -> Any:
    """Pick entries along one axis; along the others index may be shorter than x."""
    return x.at[_places_along(index, d)].get(mode=_IN_BOUNDS, wrap_negative_indices=False)


@implements("gather")
def gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """`out[i][j] = input[index[i][j]][j]` for dim 0, and so on."""
    if np.ndim(input) == 0 or np.size(index) == 0:
        return (
            expand_to(reshape(input, ()), np.shape(index))
            if np.size(index)
            else jnp.zeros(np.shape(index), input.dtype)
        )
    d = axis(dim, np.ndim(input))
    require_range(index, "gather", 0, np.shape(input)[d])
    if np.ndim(index) == 0:
        return reshape(take_along(input, reshape(index, (1,)), 0), ())
    return take_along(input, index, d)


@implements("take_along_dim")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    """`gather` with broadcasting, where torch counts indices round and round; without a dimension,
    on the flattened tensor.
    """
    if dim is None:
        return gather(reshape(input, (np.size(input),)), 0, reshape(indices, (np.size(indices),)))
    d = axis(dim, np.ndim(input))
    outer = np.broadcast_shapes(
        *[tuple(1 if k == d else n for k, n in enumerate(np.shape(a))) for a in (input, indices)]
    )
    wide = [
        expand_to(a, [np.shape(a)[d] if k == d else n for k, n in enumerate(outer)])
        for a in (input, indices)
    ]
    return take_along(wide[0], remainder(wide[1], np.shape(input)[d]), d)


@implements("take")
def take(input: Any, index: Any) -> Any:
    """Pick entries of the flattened tensor."""
    return index_with(reshape(input, (np.size(input),)), [index])


def _crop(src: Any, shape: Sequence[int]) -> Any:
    for d, n in enumerate(shape):
        src = slice_dim(src, d, 0, n)
    return src


def _scatter(x: Any, dim: int, index: Any, src: Any, write: Callable) -> Any:
    """Write along one dimension at given indices; numbers and longer sources are fitted to the
    index.
    """
    if np.ndim(x) == 0:
        return reshape(
            _scatter(reshape(x, (1,)), 0, reshape(index, (np.size(index),)), src, write), ()
        )
    if np.ndim(index) == 0:
        index = reshape(index, (1,))
    d = axis(dim, np.ndim(x))
    require_range(index, "scatter", 0, np.shape(x)[d])
    src = cast(src, dtype_of(x))
    src = (
        _crop(src, np.shape(index))
        if np.ndim(src) == np.ndim(index)
        else expand_to(src, np.shape(index))
    )
    return write(x.at[_places_along(index, d)])(src, mode=_IN_BOUNDS) if np.size(index) else x


def _adding(place: Any) -> Callable:
    # The sum of booleans is their union
    return place.max if place.array.dtype == np.bool_ else place.add


_WRITES: dict[str | None, Callable] = {
    None: lambda place: place.set, "add": _adding,
    "multiply": lambda place: place.multiply,
}  # fmt: skip


@implements("scatter")
def scatter(
    input: Any,
    dim: int,
    index: Any,
    src: Any = None,
    *,
    value: Any = None,
    reduce: str | None = None,
) -> Any:
    """Write entries along a dimension at given indices."""
    return _scatter(input, dim, index, value if src is None else src, _WRITES[reduce])


@implements("scatter_add")
def scatter_add(input: Any, dim: int, index: Any, src: Any) -> Any:
    """Add entries along a dimension at given indices."""
    return _scatter(input, dim, index, src, _WRITES["add"])


@implements("index_select")
def index_select(input: Any, dim: int, index: Any) -> Any:
    """Pick slices along one dimension."""
    if np.ndim(input) == 0:
        return input
    d = axis(dim, np.ndim(input))
    require_range(index, "index_select", 0, np.shape(input)[d])
    return index_with(input, [None] * d + [reshape(index, (np.size(index),))])


def _write_slices(
    x: Any, dim: int, index: Any, source: Any, write: Callable, op: str, wrap: bool = False
) -> Any:
    if np.ndim(x) == 0:
        return reshape(
            _write_slices(reshape(x, (1,)), 0, index, reshape(source, (1,)), write, op, wrap), ()
        )
    d = axis(dim, np.ndim(x))
    require_range(index, op, -np.shape(x)[d] if wrap else 0, np.shape(x)[d])
    return write(x.at[(slice(None),) * d + (reshape(index, (np.size(index),)),)])(
        source, mode=_IN_BOUNDS
    )


@implements("index_add")
def index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """Add slices at given indices of one dimension."""
    source = source if alpha == 1 else mul(source, cast(alpha, dtype_of(source)))
    return _write_slices(
        input, dim, index, cast(source, dtype_of(input)), _WRITES["add"], "index_add"
    )


@implements("index_copy")
def index_copy(input: Any, dim: int, index: Any, source: Any) -> Any:
    """Write slices at given indices of one dimension."""
    return _write_slices(input, dim, index, source, _WRITES[None], "index_copy")


@implements("index_fill")
def index_fill(input: Any, dim: int, index: Any, value: Any) -> Any:
    """Write one value at given indices of one dimension."""
    source = cast(value, dtype_of(input))
    return _write_slices(input, dim, index, source, _WRITES[None], "index_fill", wrap=True)
