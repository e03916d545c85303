"""Read and write the elements that a view shows, with primitives that keep positions visible
(slice, concatenate).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._errors import TracingError
from etrace_bridge.frontend import locate


def read_positions(array: Any, positions: np.ndarray) -> Any:
    """Return the elements at flat positions, as slices and transposes where they form a box, else
    as a gather.
    """
    if array.size == positions.size and np.array_equal(positions.ravel(), np.arange(array.size)):
        return lax.reshape(array, positions.shape) if array.shape != positions.shape else array
    flat = lax.reshape(array, (array.size,)) if array.ndim != 1 else array
    first, count = int(positions.flat[0]) if positions.size else 0, positions.size
    if np.array_equal(positions.ravel(), np.arange(first, first + count)):
        return lax.reshape(lax.slice(flat, (first,), (first + count,)), positions.shape)
    return flat[positions]


def write_positions(array: Any, positions: np.ndarray, value: Any) -> Any:
    """Return `array` with `value` at flat positions (one for each element of `value`, none twice)."""
    if positions.size == 0:
        return array
    if positions.size == array.size and np.array_equal(positions.ravel(), np.arange(array.size)):
        return lax.reshape(value, array.shape)
    box = _box(array.shape, positions)
    if box is None:
        flat = lax.reshape(array, (array.size,))
        return (
            flat.at[positions.ravel()].set(value.ravel(), unique_indices=True).reshape(array.shape)
        )
    starts, stops, axes = box
    value = lax.transpose(value, _order(axes)) if _order(axes) != tuple(range(len(axes))) else value
    value = lax.reshape(value, tuple(b - a for a, b in zip(starts, stops, strict=True)))
    return _write_box(array, starts, stops, value, 0)


def distinct(positions: np.ndarray) -> np.ndarray:
    """Raise if a position appears twice among those that a view writes to."""
    if np.unique(positions).size != positions.size:
        raise TracingError(
            "A tensor is written in place through a view in which one element of memory appears "
            f"several times (`expand`), at {locate.user_line()}. Which write would win is "
            "undefined, and torch refuses it as well. Call `.clone()` before the write."
        )
    return positions


def needs_copy(
    strides: Sequence[int], shape: tuple[int, ...], new_shape: tuple[int, ...] | None
) -> bool:
    """Return whether elements in memory must be copied to have a new shape, or without one to lie
    one after the other.
    """
    if 0 in shape:
        return False
    laid_out = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), shape, strides)
    if new_shape is None:
        return not laid_out.flags.c_contiguous
    try:
        laid_out.reshape(new_shape, copy=False)
    except ValueError:
        return True
    return False


def write_numbers(array: Any, view: Callable[[Any], Any], value: Any) -> Any:
    """Return `array` after a write of `value` to its view, where one of them or both are complex
    (`z.real`, `z.conj()`).

    The view is followed on the numbers 1, 2, 3, … in place of the real values in memory, so that a
    conjugate shows as a minus sign.
    """
    memory, complex_memory = _as_real(array), jnp.iscomplexobj(array)
    with jax.ensure_compile_time_eval():
        if memory.size >= 2 ** np.finfo(memory.dtype).nmant:
            raise TracingError(
                f"A view of {memory.size} real numbers is too large to be written in place, at "
                f"{locate.user_line()}."
            )
        numbers = jnp.arange(1, memory.size + 1, dtype=memory.dtype).reshape(memory.shape)
        shown = np.asarray(
            _as_real(
                view(lax.complex(numbers[..., 0], numbers[..., 1]) if complex_memory else numbers)
            )
        )
    value = (
        lax.mul(_as_real(value), jnp.asarray(np.sign(shown), memory.dtype))
        if (shown < 0).any()
        else _as_real(value)
    )
    memory = write_positions(memory, distinct(np.abs(shown).astype(np.int64) - 1), value)
    return lax.complex(memory[..., 0], memory[..., 1]) if complex_memory else memory


def _as_real(array: Any) -> Any:
    return jnp.stack([lax.real(array), lax.imag(array)], -1) if jnp.iscomplexobj(array) else array


def _order(axes: list[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(axes, kind="stable"))


def _box(
    shape: tuple[int, ...], positions: np.ndarray
) -> tuple[list[int], list[int], list[int]] | None:
    """Describe positions as a box `starts:stops` of the array, with the array's axis that each axis
    of the view runs along.
    """
    coordinates = (
        np.stack(np.unravel_index(positions, shape))
        if shape
        else np.zeros((0, *positions.shape), int)
    )
    flat = coordinates.reshape(len(shape), -1)
    starts, stops = flat.min(axis=1), flat.max(axis=1) + 1
    if np.prod(stops - starts) != positions.size:
        return None
    axes = []
    for axis in range(positions.ndim):
        if positions.shape[axis] == 1:
            axes.append(-1)
            continue
        moved = np.flatnonzero([np.any(np.diff(c, axis=axis)) for c in coordinates])
        steps = np.diff(coordinates[moved[0]], axis=axis) if len(moved) == 1 else None
        if steps is None or np.any(steps != 1) or int(moved[0]) in axes:
            return None
        axes.append(int(moved[0]))
    return [int(s) for s in starts], [int(s) for s in stops], axes


def _write_box(array: Any, starts: list[int], stops: list[int], value: Any, axis: int) -> Any:
    """Replace a box, axis by axis, by concatenating what is before it, the box and what is after."""
    while axis < array.ndim and (starts[axis], stops[axis]) == (0, array.shape[axis]):
        axis += 1
    if axis == array.ndim:
        return value
    start, stop, size = starts[axis], stops[axis], array.shape[axis]
    inside = _write_box(
        lax.slice_in_dim(array, start, stop, axis=axis),
        [*starts[:axis], 0, *starts[axis + 1 :]],
        [*stops[:axis], stop - start, *stops[axis + 1 :]],
        value,
        axis + 1,
    )
    parts = [inside]
    if start > 0:
        parts.insert(0, lax.slice_in_dim(array, 0, start, axis=axis))
    if stop < size:
        parts.append(lax.slice_in_dim(array, stop, size, axis=axis))
    return lax.concatenate(parts, axis)
