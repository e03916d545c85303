"""Arrays that cross between torch, NumPy and JAX: always copied, never shared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import is_concrete
from etrace_bridge.frontend.ops.dtypes import JAX_TO_TORCH, TORCH_TO_JAX, to_jax_dtype


def to_jax(array: Any) -> jax.Array:
    """Copy a torch tensor, NumPy array or number into a JAX array of the same dtype; a JAX array is
    returned as it is.

    Memory is never shared: an in-place write in torch would otherwise change a JAX array, and race
    with computations on it.
    """
    if isinstance(array, jax.Array):
        return living(array)
    copy = to_host(array)
    if isinstance(array, torch.Tensor):
        to_jax_dtype(array.dtype)  # refuses float64 in 32-bit mode
    return jnp.asarray(copy)  # `jnp.array` would compile a program for every new shape


def living(array: jax.Array, name: str = "The array") -> jax.Array:
    """Return a JAX array, which may be traced; raise if its memory was donated."""
    if is_concrete(array) and array.is_deleted():
        raise InputError(
            f"{name} is a JAX array that was deleted: it was donated to another computation. Pass "
            "a copy."
        )
    return array


def to_host(array: Any, name: str = "The array") -> np.ndarray:
    """Copy a torch tensor, NumPy array, number or list into a NumPy array of the dtype that JAX
    gives it in its current mode.

    Args:
        array: What to copy.
        name: What it is, for errors; begins a sentence.

    Raises:
        InputError: It is not an array of numbers in memory, or an integer does not fit into 32
            bits.
    """
    source = (
        _tensor_memory(array, name)
        if isinstance(array, torch.Tensor)
        else _number_array(array, name)
    )
    dtype = jax.dtypes.canonicalize_dtype(source.dtype.newbyteorder("="))
    if dtype.itemsize < source.dtype.itemsize and dtype.kind in "iu" and source.size:
        info = np.iinfo(dtype)
        least, most = int(source.min()), int(source.max())
        if least < info.min or most > info.max:
            raise InputError(
                f"{name} has the value {least if least < info.min else most}, which does not fit into {dtype}: JAX runs in 32-bit mode. "
                'Call `jax.config.update("jax_enable_x64", True)` at the start of the program, or use smaller numbers.'
            )
    return source.astype(dtype)


def _tensor_memory(tensor: torch.Tensor, name: str) -> np.ndarray:
    """Return a view of a tensor's numbers, or a copy where NumPy cannot show them in place."""
    kind = (
        "nested" if tensor.is_nested
        else "quantised" if tensor.is_quantized
        else "sparse" if tensor.layout is not torch.strided
        else "meta" if tensor.is_meta
        else str(tensor.dtype) if tensor.dtype not in TORCH_TO_JAX
        else ""
    )  # fmt: skip
    if kind:
        raise InputError(
            f"{name} is a {kind} tensor. Pass a dense tensor with values in memory, of a plain "
            "numeric dtype."
        )
    tensor = tensor.detach()
    try:
        if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own
            return tensor.contiguous().view(torch.int16).numpy(force=True).view(jnp.bfloat16)
        return tensor.numpy(force=True)
    except Exception as error:
        raise InputError(
            f"{name} is a `{type(tensor).__name__}` whose values cannot be read: {error}"
        ) from error


def _number_array(array: Any, name: str) -> np.ndarray:
    """Read anything but a tensor as an array of numbers."""
    try:
        found = np.asarray(array)
    except Exception as error:
        raise InputError(
            f"{name} is a `{type(array).__name__}`. Expected a torch tensor, a NumPy or a JAX "
            "array."
        ) from error
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            f"{name} is a masked array, and its mask would be lost. Fill it, and pass `mask=` "
            "where steps are to be left out."
        )
    if found.dtype.newbyteorder("=") not in JAX_TO_TORCH:
        raise InputError(
            f"{name} is a `{type(array).__name__}` of {found.dtype}, not of numbers in one "
            "rectangular block. Expected a torch tensor, a NumPy or a JAX array."
        )
    return found


def to_real_jax(tensor: torch.Tensor) -> jax.Array:
    """Copy a torch tensor to JAX as the step stores it.

    A complex tensor becomes a real array with a last axis of real and imaginary part.
    """
    return to_jax(
        torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    )


def held_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of `to_real_jax(tensor)`."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def to_torch(array: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a JAX or NumPy array into a torch tensor of the same dtype; a torch tensor is cloned.

    Args:
        array: The array.
        like: The tensor that the array belongs to (a parameter, for its value or gradient). If it
            is complex, the array is real and has its real and imaginary parts along the last axis.
    """
    if like is not None and like.is_complex():
        return torch.view_as_complex(to_torch(array))
    if isinstance(array, torch.Tensor):
        return array.detach().clone()
    if getattr(array, "dtype", None) == jnp.bfloat16:
        return torch.tensor(np.asarray(array.astype(jnp.float32))).bfloat16()
    return torch.from_numpy(np.array(array, order="C"))  # torch itself refuses negative strides
