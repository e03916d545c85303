"""Arrays on their way in: private copies, with shapes checked once per shape and indices at every
call.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import BridgedModule, InputRange, input_name, living, to_host
from etrace_bridge.learning.processes import own_part


def as_inputs(x: Any) -> tuple:
    """Return the inputs of a program that takes arrays by position, as a tuple."""
    if isinstance(x, dict):
        raise InputError(
            f"The input is a dict with the keys {', '.join(map(repr, x))}. A brainstate module and "
            "an exported learner take arrays by position: pass a tuple of them. (A torch model "
            "takes dicts.)"
        )
    several = isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence)
    return tuple(x) if several else (x,)


def read_inputs(net: brainstate.nn.Module, x: Any, sequence: bool = False) -> tuple:
    """Return the tensors in a model's input, in order, whatever its structure."""
    if isinstance(net, BridgedModule):
        return net.read_inputs(x, sequence)
    return as_inputs(x)


def as_targets(targets: Any) -> Any:
    """Return targets as a tree of arrays; numbers and lists of numbers become arrays."""
    if isinstance(targets, (bool, int, float)) or (
        isinstance(targets, list) and not any(map(_is_tree, targets))
    ):
        return as_array(targets, name="The target")
    if isinstance(targets, dict):
        return {key: as_targets(value) for key, value in targets.items()}
    return type(targets)(map(as_targets, targets)) if type(targets) in (list, tuple) else targets


def is_array(x: Any) -> bool:
    """Return whether this is an array of torch, NumPy or JAX."""
    return isinstance(x, (torch.Tensor, np.ndarray, jax.Array))


def _is_tree(x: Any) -> bool:
    return is_array(x) or isinstance(x, (dict, tuple))


def read_mask(mask: Any, float_dtype: Any = None) -> Any:
    """Return a mask as an array of finite real numbers."""
    array = as_array(mask, float_dtype, "`mask`")
    values = np.asarray(own_part(array))
    if array.dtype.kind == "c" or not np.isfinite(values).all():
        raise InputError(
            f"`mask` is {array.dtype} and must be finite real numbers; it holds complex numbers, "
            "NaN or infinity."
        )
    if array.dtype.kind in "iu" and not np.isin(values, (0, 1)).all():
        raise InputError(
            f"`mask` is {array.dtype} and has other numbers than 0 and 1, as lengths or the numbers "
            "of samples have. Make a mask of lengths with `length_mask(lengths)`; pass weights as "
            "floats; leave everything else out of the batch, which is `(xs, targets, mask)`."
        )
    return array


def read_choice(mask: Any) -> Any:
    """Return a mask that picks batch elements, of booleans or of 0 and 1, as an array."""
    array = read_mask(mask)
    if not np.isin(np.asarray(own_part(array)), (0, 1)).all():
        raise InputError(
            "`mask` picks batch elements, so it must be of booleans, or of 0 and 1; it has other "
            "numbers."
        )
    return array


def as_array(x: Any, float_dtype: Any = None, name: str = "The array") -> Any:
    """Copy a torch tensor or NumPy array, in the dtype that JAX will use; return JAX arrays as they
    are.

    Args:
        x: the array.
        float_dtype: dtype of NumPy's float64 arrays, which are its default rather than a choice.
        name: what it is, for errors; begins a sentence.
    """
    if not isinstance(x, (torch.Tensor, np.ndarray)) and isinstance(x, jax.Array):
        return living(x, name)
    array = to_host(x, name)
    by_default = (
        float_dtype is not None
        and array.dtype.kind == "f"
        and getattr(x, "dtype", np.float64) == np.float64
    )
    return array.astype(float_dtype) if by_default and not isinstance(x, torch.Tensor) else array


def check_batch(args: Sequence[Any], axis: int) -> None:
    """Raise if there is no input, or if the batch is empty."""
    if not args:
        raise InputError(
            "There is no input. Pass a tensor, or a tuple or dict of tensors for a model with "
            "several inputs."
        )
    for n, a in enumerate(args):
        if np.ndim(a) > axis and np.shape(a)[axis] == 0:
            raise InputError(
                f"{input_name('input', n, len(args))} has shape {tuple(np.shape(a))}: the batch is "
                "empty."
            )


def signature(arrays: Sequence[Any]) -> tuple:
    """Return shapes and dtypes."""
    return tuple((tuple(np.shape(a)), str(a.dtype)) for a in arrays)


def show_signature(shapes: Sequence[tuple]) -> str:
    """Show a signature to people."""
    return ", ".join(f"{dtype}{shape}" for shape, dtype in shapes)


def check_float_dtypes(args: Sequence[Any], float_dtype: Any) -> None:
    """Raise if a floating-point input has another precision than the model."""
    for n, a in enumerate(args):
        if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype != float_dtype:
            raise InputError(
                f"Input {n} is {a.dtype}, but the model's parameters are {float_dtype}. Convert "
                f"one of them: `x.to(torch.{float_dtype})`."
            )


def check_finite(named: dict[str, Any]) -> None:
    """Raise if an array has NaN or infinity, and say where."""
    for name, given in named.items():
        array = np.asarray(own_part(given))
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))
            raise InputError(
                f"The {name} has {len(where)} values that are NaN or infinite, the first at index "
                f"{tuple(int(i) for i in where[0])}. Clean the data, or leave `check_inputs` off."
            )


def sequence_length(args: Sequence[Any], targets: Any, mask: Any, batch_first: bool) -> int:
    """Return the number of time steps that inputs, targets and mask agree on; arrays are time-major
    here.
    """
    for n, a in enumerate(args):
        if np.ndim(a) < 2:
            raise InputError(
                f"Input {n} has shape {tuple(np.shape(a))}; a sequence needs a time and a batch "
                "axis. Lengths of padded sequences are no input of a step: give "
                "`mask=eb.length_mask(lengths)`, and leave packing out of `forward`."
            )
    lengths = {f"input {n}": np.shape(a)[0] for n, a in enumerate(args)}
    for n, t in enumerate(jax.tree.leaves(targets)):
        lengths[f"target {n}" if n else "the target"] = (
            np.shape(t)[0] if np.ndim(t) else "no time axis"
        )
    if mask is not None:
        lengths["`mask`"] = np.shape(mask)[0] if np.ndim(mask) else "no time axis"
    found = set(lengths.values())
    if len(found) != 1:
        layout = "(batch, T, …), since the model is batch_first" if batch_first else "(T, batch, …)"
        raise InputError(
            "The number of time steps differs: "
            f"{', '.join(f'{name} has {n}' for name, n in lengths.items())}. Sequences are "
            f"{layout}. For one target for each sequence, (batch, …), pass `loss_at='last'` or "
            "`loss_at='every'`, or `loss_at='model'` if the model itself reduces its output over "
            "time; for a loss over all outputs, such as those of `snntorch.functional`, pass "
            "`seq_loss=` in place of `loss=`."
        )
    length = found.pop()
    if not length:
        raise InputError("The sequence has no time steps.")
    return length


class FastReader:
    """Reads a step's arrays of one known kind; returns None for anything else, which then takes the
    checked way.

    Everything is converted by `as_array`, except for torch tensors in plain memory, which are
    copied to buffers. The buffers are used in turn, so the reader must let the computation catch up
    every `turns` reads. Bytes that JAX can use as they are are copied by `memmove`:
    `Tensor.numpy()` and a copy take 13 µs when the caches are cold from the step before. Eight-byte
    numbers of which JAX uses four bytes are cast.

    Args:
        example: an array as the user gave it, of the shape and dtype to come.
        array: the same as `as_array` made it.
        float_dtype: as for `as_array`.
        ranges: what the program demands of this input.
        name: what it is, for errors.
        turns: number of buffers.
    """

    __slots__ = (
        "_buffers",
        "_casts",
        "_dtype",
        "_float_dtype",
        "_name",
        "_ranges",
        "_shape",
        "_size",
        "_type",
    )

    def __init__(
        self,
        example: Any,
        array: Any,
        float_dtype: Any,
        ranges: Sequence[InputRange],
        name: str,
        turns: int,
    ) -> None:
        self._type, self._dtype, self._shape = type(example), example.dtype, tuple(example.shape)
        self._float_dtype = float_dtype
        self._ranges = ranges
        self._name = name
        self._size = array.nbytes
        kinds = str(self._dtype), str(array.dtype)
        self._casts = kinds in (("torch.int64", "int32"), ("torch.float64", "float32"))
        is_buffered = self._casts or (kinds[0] == f"torch.{kinds[1]}" and array.dtype.kind != "c")
        buffers = (
            [_unaligned_like(array) for _ in range(turns)]
            if is_buffered and self._type is torch.Tensor
            else None
        )
        self._buffers = None if buffers is None else itertools.cycle(buffers)

    def __call__(self, x: Any) -> Any:
        """Return a private copy of `x`, or None."""
        try:
            if type(x) is not self._type or x.dtype != self._dtype or x.shape != self._shape:
                return None
        except RuntimeError:  # a nested tensor has no shape
            return None
        if self._buffers is not None and _is_plain_memory(x):
            array, address = next(self._buffers)
            if self._casts:
                source = x.detach().numpy()
                np.copyto(array, source, casting="unsafe")
                if array.dtype.kind == "i" and not (array == source).all():
                    # which says what does not fit
                    return as_array(x, self._float_dtype, self._name)
            else:
                ctypes.memmove(address, x.data_ptr(), self._size)
        else:
            array = as_array(x, self._float_dtype, self._name)
        for each in self._ranges:
            each.check(array, self._name)
        return array


def _is_plain_memory(x: torch.Tensor) -> bool:
    """Return whether a tensor's bytes lie in memory in the order of its elements."""
    return x.is_cpu and x.layout is torch.strided and x.is_contiguous() and not x.is_neg()


def _unaligned_like(array: Any) -> tuple[np.ndarray, int]:
    """Return a buffer of an array's shape, and its address.

    Its address is odd for vector loads, so that JAX always copies it. JAX would use an aligned
    buffer in place, and a result that is an unchanged input would then change with the buffer.
    """
    memory = np.empty(array.nbytes + 64 + array.dtype.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + array.dtype.itemsize
    buffer = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    return buffer, buffer.ctypes.data
