"""Small array helpers that the rules share: explicit broadcasting, selection, axes. All emit plain
lax primitives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.dtypes import cast, result_type, to_jax_dtype

Array = jax.Array


class Values(NamedTuple):
    """What `max(dim)`, `sort`, `topk` and their like return: fields named as torch names them."""

    values: Any
    indices: Any


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an array, or () for a number."""
    return np.shape(x)


def expand_to(x: Any, shape: Sequence[int]) -> Any:
    """Broadcast with torch's rule (align at the end), as one `broadcast_in_dim` or none."""
    shape = tuple(shape)
    own = np.shape(x)
    if own == shape:
        return x
    return lax.broadcast_in_dim(x, shape, tuple(range(len(shape) - len(own), len(shape))))


def together(*operands: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """Convert operands to one dtype and one shape; numbers stay scalar literals, which lax
    broadcasts itself.
    """
    dtype = result_type(*operands) if dtype is None else dtype
    shape = np.broadcast_shapes(*[np.shape(x) for x in operands])
    numbers = [isinstance(x, (bool, int, float, complex)) for x in operands]
    if all(numbers):
        return [expand_to(cast(x, dtype), shape) for x in operands]
    return [
        cast(x, dtype) if number else expand_to(cast(x, dtype), shape)
        for x, number in zip(operands, numbers, strict=True)
    ]


def same_shape(a: Any, b: Any) -> tuple[Any, Any]:
    """Make scalar literals full arrays, for primitives that do not broadcast them."""
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    return expand_to(a, shape), expand_to(b, shape)


def select(condition: Any, yes: Any, no: Any) -> Array:
    """Choose element-wise; unlike `jnp.where` this emits a bare `select_n`. Dtypes of the branches
    must agree.
    """
    shape = np.broadcast_shapes(np.shape(condition), np.shape(yes), np.shape(no))
    return lax.select_n(expand_to(condition, shape), expand_to(no, shape), expand_to(yes, shape))


def scalar(value: float | int | bool, like: Any) -> np.ndarray:
    """Make a literal of the same dtype as an array."""
    return np.asarray(value).astype(like.dtype)


def full(shape: Sequence[int], value: Any, dtype: torch.dtype) -> Array:
    """Make a constant array."""
    return lax.full(tuple(shape), cast(value, dtype), to_jax_dtype(dtype))


def zeros_like(x: Any) -> Array:
    """Make zeros with the shape and dtype of an array."""
    return lax.full(np.shape(x), np.zeros((), x.dtype), x.dtype)


def axis(dim: int, ndim: int) -> int:
    """Turn a torch dim into a non-negative axis; a 0-dim tensor counts as one with one dimension."""
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got "
            f"{dim})"
        )
    return dim % limit


def axes(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Turn a torch dim argument (None or empty: all dimensions) into sorted non-negative axes."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return (
        tuple(sorted(axis(d, ndim) for d in dims)) if ndim else tuple(axis(d, 0) for d in dims)[:0]
    )


def ints(values: tuple) -> tuple[int, ...]:
    """Accept sizes given one by one (`x.view(2, 3)`) or as one sequence (`x.view((2, 3))`)."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        values = tuple(values[0])
    return tuple(int(v) for v in values)


def is_float(x: Any) -> bool:
    """Return whether an array has a real or complex floating dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
