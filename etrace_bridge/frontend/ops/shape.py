"""Views: other shapes of the same entries. Purely structural, so they also run on integer index
arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.arrays import axes, axis, expand_to, ints
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype
from etrace_bridge.frontend.ops.registry import implements


def _resolve(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Fill in the one -1 of a target shape."""
    known = math.prod(s for s in shape if s != -1)
    return tuple(size // known if s == -1 else s for s in shape)


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """Reshape, or return the array itself where nothing changes."""
    shape = tuple(shape)
    return x if np.shape(x) == shape else lax.reshape(x, shape)


@implements("view", "reshape", "_unsafe_view", view=True, may_copy="reshape")
def view(input: Any, *shape: Any) -> Any:
    """Reinterpret the shape, or (with a dtype) the bits."""
    if shape and isinstance(shape[0], torch.dtype):
        return _bitcast(input, shape[0])
    return reshape(input, _resolve(ints(shape), np.size(input)))


implements("_reshape_alias", view=True)(lambda input, size, stride: view(input, size))


def _bitcast(x: Any, dtype: torch.dtype) -> Any:
    target = to_jax_dtype(dtype)
    if target.itemsize > x.dtype.itemsize:
        ratio = target.itemsize // x.dtype.itemsize
        return lax.bitcast_convert_type(
            lax.reshape(x, (*x.shape[:-1], x.shape[-1] // ratio, ratio)), target
        )
    y = lax.bitcast_convert_type(x, target)
    return y if y.ndim == x.ndim else lax.reshape(y, (*x.shape[:-1], x.shape[-1] * y.shape[-1]))


@implements("view_as", "reshape_as", view=True, may_copy="reshape")
def view_as(input: Any, other: Any) -> Any:
    """Reshape one tensor to the shape of another."""
    return reshape(input, np.shape(other))


@implements("flatten", view=True, may_copy="reshape")
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge the dimensions from `start_dim` to `end_dim`."""
    shape = np.shape(input)
    if not shape:
        return reshape(input, (1,))
    start, end = axis(start_dim, len(shape)), axis(end_dim, len(shape))
    return reshape(input, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@implements("ravel", view=True, may_copy="reshape")
def ravel(input: Any) -> Any:
    """Flatten all dimensions."""
    return reshape(input, (np.size(input),))


@implements("unflatten", view=True)
def unflatten(input: Any, dim: int, sizes: Sequence[int]) -> Any:
    """Split one dimension into several."""
    shape = np.shape(input)
    d = axis(dim, len(shape))
    return reshape(input, (*shape[:d], *_resolve(tuple(sizes), shape[d]), *shape[d + 1 :]))


@implements("squeeze", view=True)
def squeeze(input: Any, dim: int | Sequence[int] | None = None) -> Any:
    """Drop dimensions of size 1."""
    shape = np.shape(input)
    if dim is not None and not isinstance(dim, int) and len(dim) == 0:
        return input
    drop = [d for d in axes(dim, len(shape)) if shape[d] == 1]
    return lax.squeeze(input, drop) if drop else input


@implements("unsqueeze", view=True)
def unsqueeze(input: Any, dim: int) -> Any:
    """Insert a dimension of size 1."""
    return lax.expand_dims(input, (axis(dim, np.ndim(input) + 1),))


def transpose_to(x: Any, order: Sequence[int]) -> Any:
    """Permute, or return the array itself where the order is the identity."""
    return x if tuple(order) == tuple(range(np.ndim(x))) else lax.transpose(x, tuple(order))


@implements("permute", view=True)
def permute(input: Any, *dims: Any) -> Any:
    """Reorder the dimensions."""
    return transpose_to(input, [axis(d, np.ndim(input)) for d in ints(dims)])


@implements("transpose", "swapaxes", "swapdims", view=True)
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    """Exchange two dimensions."""
    order = list(range(np.ndim(input)))
    if order:
        a, b = axis(dim0, len(order)), axis(dim1, len(order))
        order[a], order[b] = order[b], order[a]
    return transpose_to(input, order)


@implements("t", view=True)
def t(input: Any) -> Any:
    """Transpose a matrix."""
    return transpose(input, 0, 1) if np.ndim(input) == 2 else input


implements("T", "numpy_T", view=True)(
    lambda input: transpose_to(input, range(np.ndim(input))[::-1])
)
implements("mT", view=True)(lambda input: transpose(input, -2, -1))
implements("adjoint", "mH", "H", "matrix_H", view=True)(
    lambda input: conj(transpose(input, -2, -1))
)


# A traced value has no lazy conjugate or sign that could be resolved.
implements("resolve_conj", "resolve_neg", view=True)(lambda input: input)


@implements("conj", "conj_physical", "_conj", "_conj_physical", view=True)
def conj(input: Any) -> Any:
    """Complex conjugate; a real tensor is its own."""
    return lax.conj(input) if np.iscomplexobj(input) else input


@implements("movedim", "moveaxis", view=True)
def movedim(input: Any, source: Any, destination: Any) -> Any:
    """Move dimensions to new places, the others keeping their order."""
    ndim = np.ndim(input)
    sources = [axis(d, ndim) for d in ((source,) if isinstance(source, int) else source)]
    targets = [
        axis(d, ndim) for d in ((destination,) if isinstance(destination, int) else destination)
    ]
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(d for d in range(ndim) if d not in sources)
    return transpose_to(input, [placed[d] if d in placed else next(rest) for d in range(ndim)])


@implements("expand", view=True)
def expand(input: Any, *size: Any) -> Any:
    """Broadcast to a shape in which -1 keeps the tensor's own size."""
    sizes = ints(size)
    own = np.shape(input)
    padded = (1,) * (len(sizes) - len(own)) + own
    return expand_to(
        input, [have if want == -1 else want for want, have in zip(sizes, padded, strict=True)]
    )


implements("expand_as", view=True)(lambda input, other: expand_to(input, np.shape(other)))


@implements("broadcast_to", view=True)
def broadcast_to(input: Any, size: Sequence[int]) -> Any:
    """Broadcast to a shape."""
    return expand(input, tuple(size))


@implements("broadcast_tensors", view=True)
def broadcast_tensors(*tensors: Any) -> tuple:
    """Broadcast all tensors to their common shape."""
    tensors = (
        tuple(tensors[0])
        if len(tensors) == 1 and isinstance(tensors[0], (tuple, list))
        else tensors
    )
    shape = np.broadcast_shapes(*[np.shape(x) for x in tensors])
    return tuple(expand_to(x, shape) for x in tensors)


@implements("atleast_1d", view=True)
def atleast_1d(*tensors: Any) -> Any:
    """Make 0-dim tensors vectors."""
    if len(tensors) == 1 and not isinstance(tensors[0], (tuple, list)):
        return tensors[0] if np.ndim(tensors[0]) else reshape(tensors[0], (1,))
    return tuple(map(atleast_1d, tensors[0] if len(tensors) == 1 else tensors))


@implements("atleast_2d", view=True)
def atleast_2d(*tensors: Any) -> Any:
    """Make tensors with fewer dimensions rows."""
    if len(tensors) == 1 and not isinstance(tensors[0], (tuple, list)):
        return (
            tensors[0] if np.ndim(tensors[0]) > 1 else reshape(tensors[0], (1, np.size(tensors[0])))
        )
    return tuple(map(atleast_2d, tensors[0] if len(tensors) == 1 else tensors))


@implements("slice", view=True)
def slice_dim(
    input: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """`input[start:end:step]` along one dimension, with Python's clipping."""
    d = axis(dim, np.ndim(input))
    begin, stop, _ = slice(start, end).indices(np.shape(input)[d])
    return (
        input
        if (begin, stop, step) == (0, np.shape(input)[d], 1)
        else lax.slice_in_dim(input, begin, max(begin, stop), step, d)
    )


@implements("narrow", view=True)
def narrow(input: Any, dim: int, start: int, length: int) -> Any:
    """Take `length` entries from `start` along one dimension."""
    d = axis(dim, np.ndim(input))
    start = int(start)
    begin = start % max(np.shape(input)[d], 1) if start < 0 else start
    return slice_dim(input, d, begin, begin + length)


@implements("select", view=True)
def select_dim(input: Any, dim: int, index: int) -> Any:
    """Take one entry along a dimension and drop the dimension."""
    d = axis(dim, np.ndim(input))
    size = np.shape(input)[d]
    if not -size <= index < size:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(np.shape(input))} at "
            f"dimension {dim}"
        )
    return lax.index_in_dim(input, int(index) % size, d, keepdims=False)


@implements("unbind", view=True)
def unbind(input: Any, dim: int = 0) -> tuple:
    """Return the slices along one dimension, without it."""
    return tuple(
        select_dim(input, dim, i) for i in range(np.shape(input)[axis(dim, np.ndim(input))])
    )


@implements("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", view=True)
def split(
    input: Any, split_size_or_sections: int | Sequence[int] = 1, dim: int = 0, **named: Any
) -> tuple:
    """Cut along one dimension into pieces of one size (the last may be smaller) or of the sizes
    given.
    """
    sections = next(iter(named.values()), split_size_or_sections)
    d = axis(dim, np.ndim(input))
    size = np.shape(input)[d]
    if isinstance(sections, int):
        full, rest = divmod(size, sections) if sections else (1, 0)
        sections = [sections] * full + [rest] * (rest > 0) or [0]
    ends = np.cumsum(sections)
    return tuple(
        slice_dim(input, d, int(end) - n, int(end)) for end, n in zip(ends, sections, strict=True)
    )


@implements("chunk", "unsafe_chunk", view=True)
def chunk(input: Any, chunks: int, dim: int = 0) -> tuple:
    """Cut along one dimension into at most `chunks` pieces of equal size."""
    size = np.shape(input)[axis(dim, np.ndim(input))]
    return split(input, -(-size // chunks), dim) if size else split(input, [0] * chunks, dim)


@implements("tensor_split", view=True)
def tensor_split(input: Any, indices_or_sections: Any, dim: int = 0, **named: Any) -> tuple:
    """Cut along one dimension at given places, or into a number of nearly equal pieces."""
    places = next(iter(named.values()), indices_or_sections)
    d = axis(dim, np.ndim(input))
    size = np.shape(input)[d]
    places = places if isinstance(places, (tuple, list)) else np.asarray(places).tolist()
    if isinstance(places, int):
        small, larger = divmod(size, places)
        places = np.cumsum([small + 1] * larger + [small] * (places - larger))[:-1].tolist()
    edges = [0, *places, size]
    return tuple(slice_dim(input, d, a, b) for a, b in zip(edges[:-1], edges[1:], strict=True))


@implements("diagonal", view=True)
def diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return the diagonal over two dimensions as the last dimension."""
    a, b = axis(dim1, np.ndim(input)), axis(dim2, np.ndim(input))
    rest = [d for d in range(np.ndim(input)) if d not in (a, b)]
    x = transpose_to(input, [*rest, a, b])
    rows, columns = np.shape(x)[-2:]
    x = slice_dim(slice_dim(x, -2, max(0, -offset), rows), -1, max(0, offset), columns)
    n = min(np.shape(x)[-2:])
    outer = np.shape(x)[:-2]
    if n == 0:
        return reshape(slice_dim(slice_dim(x, -1, 0, 0), -2, 0, 0), (*outer, 0))
    # In a row-major (n, n) block the diagonal is every (n + 1)-th entry: a reshape and a strided
    # slice.
    flat = reshape(slice_dim(slice_dim(x, -2, 0, n), -1, 0, n), (*outer, n * n))
    return slice_dim(flat, -1, 0, n * n, n + 1)


implements("linalg_diagonal", view=True)(
    lambda input, *, offset=0, dim1=-2, dim2=-1: diagonal(input, offset, dim1, dim2)
)


@implements("unfold", view=True)
def unfold(input: Any, dimension: int, size: int, step: int) -> Any:
    """Return all windows of one dimension, the window itself as the last dimension."""
    if not np.ndim(input):
        return slice_dim(reshape(input, (1,)), 0, 0, size)
    d = axis(dimension, np.ndim(input))
    starts = range(0, np.shape(input)[d] - size + 1, step)
    windows = [slice_dim(input, d, s, s + size) for s in starts]
    stacked = lax.concatenate([lax.expand_dims(w, (d,)) for w in windows], d)
    return transpose_to(stacked, [i for i in range(stacked.ndim) if i != d + 1] + [d + 1])


implements("detach", view=True)(lambda input: lax.stop_gradient(input))
implements("alias", view=True)(lambda input: input)
implements("contiguous", view=True, may_copy="contiguous", may_return_input=True)(
    lambda input: input
)
implements("positive", may_return_input=True)(lambda input: input)
implements("clone", "lift_fresh_copy", "lift_fresh")(lambda input: input)
