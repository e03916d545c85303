"""Arrays across the border between torch, NumPy and JAX: always a copy, never shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype


def to_jax(array: Any) -> jax.Array:
    """Copy a torch tensor, NumPy array or number into a JAX array of the same dtype; a JAX array is returned as it is.

    Memory is never shared: an in-place write in torch would otherwise change a JAX array, and race with computations on it.
    """
    if isinstance(array, jax.Array):
        return array
    if isinstance(array, torch.Tensor):
        dtype = to_jax_dtype(array.dtype)
        array = array.detach()
        if array.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own
            return _copied(array.float().numpy()).astype(dtype)
        return _copied(array.resolve_conj().resolve_neg().numpy(force=True).astype(dtype, copy=False))
    try:
        array = np.asarray(array)
    except Exception as error:
        raise InputError(f"Cannot read a `{type(array).__name__}` as an array. Pass a torch tensor, a NumPy or a JAX array.") from error
    if array.dtype == object:
        raise InputError("Cannot read a nested or ragged object as an array. Pass a torch tensor, a NumPy or a JAX array.")
    if array.dtype == np.float64 and not jax.config.jax_enable_x64:
        array = array.astype(np.float32)
    return _copied(array)


def _copied(array: np.ndarray) -> jax.Array:
    """Copy in NumPy and hand the copy over: `jnp.array` would compile a program for every new shape."""
    return jnp.asarray(np.array(array))


def to_torch(array: Any) -> torch.Tensor:
    """Copy a JAX or NumPy array into a torch tensor of the same dtype; a torch tensor is cloned."""
    if isinstance(array, torch.Tensor):
        return array.detach().clone()
    if getattr(array, "dtype", None) == jnp.bfloat16:
        return torch.tensor(np.asarray(array.astype(jnp.float32))).bfloat16()
    return torch.tensor(np.asarray(array))
