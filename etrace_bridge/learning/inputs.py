"""Arrays on their way in: private copies, checked once for each shape."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import to_jax
from etrace_bridge.learning.losses import jax_dtype


def as_inputs(x: Any) -> tuple:
    """The inputs of a model as a tuple."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def as_targets(targets: Any) -> Any:
    """Targets as a tree of arrays; numbers and lists of numbers become arrays."""
    if isinstance(targets, (int, float)) or (isinstance(targets, list) and not any(map(_is_array, targets))):
        return np.asarray(targets)
    if isinstance(targets, dict):
        return {key: as_targets(value) for key, value in targets.items()}
    return type(targets)(map(as_targets, targets)) if type(targets) in (list, tuple) else targets


def _is_array(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, np.ndarray, jax.Array, dict, tuple))


def as_array(x: Any, float_dtype: Any = None) -> Any:
    """A private copy of a torch tensor or NumPy array, in the dtype that JAX will use; JAX arrays as they are.

    Args:
        x: the array.
        float_dtype: dtype of NumPy's float64 arrays, which are its default rather than a choice.
    """
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, torch.Tensor):
        if x.dtype == torch.bfloat16 or x.is_complex():
            return to_jax(x)
        return x.detach().numpy(force=True).astype(jax_dtype(x))
    try:
        array = np.asarray(x)
    except Exception as error:
        raise InputError(f"A `{type(x).__name__}` is no array. Pass a torch tensor, a NumPy or a JAX array.") from error
    if array.dtype == object or array.dtype.kind in "US":
        raise InputError(f"A `{type(x).__name__}` of {array.dtype} is no array of numbers. Pass a torch tensor, a NumPy or a JAX array.")
    if array.dtype == np.float64 and float_dtype is not None:
        return array.astype(float_dtype)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def signature(arrays: Sequence[Any]) -> tuple:
    """Shapes and dtypes."""
    return tuple((tuple(np.shape(a)), str(a.dtype)) for a in arrays)


def check_float_dtypes(args: Sequence[Any], float_dtype: Any) -> None:
    """Raises if a floating input has another precision than the model."""
    for n, a in enumerate(args):
        if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype != float_dtype:
            raise InputError(
                f"Input {n} is {a.dtype}, but the model's parameters are {float_dtype}. Convert one of them: `x.to(torch.{float_dtype})`."
            )


def check_finite(named: dict[str, Any]) -> None:
    """Raises if an array has NaN or infinity, and says where."""
    for name, array in named.items():
        array = np.asarray(array)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))
            raise InputError(
                f"The {name} has {len(where)} values that are NaN or infinite, the first at index {tuple(int(i) for i in where[0])}. "
                "Clean the data, or leave `check_inputs` off."
            )


def sequence_length(args: Sequence[Any], targets: Any, mask: Any, batch_first: bool) -> int:
    """The number of time steps that inputs, targets and mask agree on; arrays are time-major here."""
    for n, a in enumerate(args):
        if np.ndim(a) < 2:
            raise InputError(f"Input {n} has shape {tuple(np.shape(a))}; a sequence needs a time and a batch axis.")
    lengths = {f"input {n}": np.shape(a)[0] for n, a in enumerate(args)}
    for n, t in enumerate(jax.tree.leaves(targets)):
        lengths[f"target {n}" if n else "the target"] = np.shape(t)[0] if np.ndim(t) else "no time axis"
    if mask is not None:
        if np.ndim(mask) != 1:
            raise InputError(f"`mask` has shape {tuple(np.shape(mask))}; it must be (T,), one weight a time step.")
        lengths["`mask`"] = np.shape(mask)[0]
    found = set(lengths.values())
    if len(found) != 1:
        layout = "(batch, T, …), since the model is batch_first" if batch_first else "(T, batch, …)"
        raise InputError(
            f"The number of time steps differs: {', '.join(f'{name} has {n}' for name, n in lengths.items())}. Sequences are {layout}. "
            "For one target a sequence, repeat it for every step and choose the steps that count with `mask`."
        )
    length = found.pop()
    if not length:
        raise InputError("The sequence has no time steps.")
    return length


class FastReader:
    """Reads a step's arrays of one known kind; gives None for anything else, which then takes the checked way.

    `Tensor.numpy()` and a copy take 13 µs when the caches are cold from the step before. So torch tensors are copied by `memmove`
    into buffers of our own, which are used in turn: whoever reads must let the computation catch up every `turns` reads.

    Args:
        example: an array as the user gave it, of the shape and dtype to come.
        array: the same as `as_array` made it.
        turns: number of buffers.
    """

    __slots__ = ("_buffers", "_size", "dtype", "given", "shape")

    def __init__(self, example: Any, array: Any, turns: int) -> None:
        self.shape = tuple(np.shape(example))
        plain = isinstance(example, (torch.Tensor, np.ndarray, jax.Array)) and example.dtype != torch.bfloat16
        self.given = example.dtype if plain else None
        self.dtype, self._size = array.dtype, array.nbytes
        same = isinstance(example, torch.Tensor) and plain and not example.is_complex() and array.dtype == jax_dtype(example)
        self._buffers = itertools.cycle([_unaligned_like(array) for _ in range(turns)]) if same else None

    def __call__(self, x: Any) -> Any:
        """A private copy of `x`, or None."""
        if isinstance(x, torch.Tensor):
            if x.dtype is not self.given or x.shape != self.shape or not x.is_cpu:
                return None
            if self._buffers is not None and type(x) is torch.Tensor and x.is_contiguous() and not x.is_neg():
                buffer, address = next(self._buffers)
                ctypes.memmove(address, x.data_ptr(), self._size)
                return buffer
            return (x.detach() if x.requires_grad else x).numpy(force=True).astype(self.dtype)
        if isinstance(x, np.ndarray):
            return x.astype(self.dtype) if x.shape == self.shape and x.dtype == self.given else None
        if isinstance(x, jax.Array):
            return x if x.shape == self.shape and x.dtype == self.given else None
        return None


def _unaligned_like(array: Any) -> tuple[np.ndarray, int]:
    """A buffer of an array's shape, and its address.

    Its address is odd for vector loads, so that XLA always copies it: an aligned one it would use in place, and a result that is an
    input unchanged would then change with the buffer.
    """
    memory = np.empty(array.nbytes + 64 + array.dtype.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + array.dtype.itemsize
    buffer = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    return buffer, buffer.ctypes.data
