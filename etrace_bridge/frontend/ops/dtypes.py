"""Torch dtypes and their JAX twins, and torch's promotion rules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import NotSupportedError

TORCH_TO_JAX: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): np.dtype(getattr(jnp, jax_name))
    for name, jax_name in {
        "bool": "bool_", "uint8": "uint8", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
        "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
        "float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "float64": "float64",
        "complex64": "complex64", "complex128": "complex128",
    }.items()
}  # fmt: skip
JAX_TO_TORCH = {jax_dtype: torch_dtype for torch_dtype, jax_dtype in TORCH_TO_JAX.items()}
_NEEDS_X64 = (torch.float64, torch.complex128)


def to_jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the JAX dtype of a torch dtype; 64-bit integers become 32-bit when JAX runs without
    x64.
    """
    if dtype not in TORCH_TO_JAX:
        raise NotSupportedError(
            f"`{dtype}` has no JAX counterpart here. Convert the tensor to a plain numeric dtype "
            "first."
        )
    if dtype in _NEEDS_X64 and not jax.config.jax_enable_x64:
        raise NotSupportedError(
            f"The model uses `{dtype}`, but JAX runs with 64-bit types disabled and would silently compute in 32 bits. "
            'Call `jax.config.update("jax_enable_x64", True)` at the start of the program, or use `model.float()`.'
        )
    return jax.dtypes.canonicalize_dtype(TORCH_TO_JAX[dtype])


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a JAX or NumPy dtype."""
    dtype = np.dtype(dtype)
    if dtype not in JAX_TO_TORCH:
        raise NotSupportedError(f"JAX dtype `{dtype}` has no torch counterpart.")
    return JAX_TO_TORCH[dtype]


def dtype_of(value: Any) -> torch.dtype:
    """Return the torch dtype of an array, or the one torch gives a tensor made of a Python number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    if isinstance(value, float):
        return torch.get_default_dtype()
    if isinstance(value, complex):
        return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
    return to_torch_dtype(value.dtype)


def result_type(*operands: Any) -> torch.dtype:
    """Return torch's common dtype: tensors with dimensions rule over 0-dim tensors, and those over
    Python numbers.
    """
    return _result_type(tuple((_priority(x), dtype_of(x)) for x in operands))


def _priority(value: Any) -> int:
    if isinstance(value, (bool, int, float, complex)):
        return 0
    return 2 if np.ndim(value) else 1


@functools.lru_cache(maxsize=4096)
def _result_type(ranked: tuple[tuple[int, torch.dtype], ...]) -> torch.dtype:
    common: torch.dtype | None = None
    for rank in (0, 1, 2):
        own = (
            functools.reduce(torch.promote_types, [d for r, d in ranked if r == rank])
            if any(r == rank for r, _ in ranked)
            else None
        )
        common = _stronger(own, common)
    if common is None:
        raise TypeError("`result_type` needs at least one operand")
    return common


def _category(dtype: torch.dtype) -> int:
    return (
        3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1
    )


def _stronger(high: torch.dtype | None, low: torch.dtype | None) -> torch.dtype | None:
    """Combine the dtype of a higher-ranked group with a lower-ranked one, which counts only if its
    kind is greater.
    """
    if high is None or low is None:
        return low if high is None else high
    if _category(low) <= _category(high):
        return high
    if low.is_complex and high.is_floating_point:
        return high.to_complex()
    return torch.promote_types(high, low)


def float_type(*operands: Any) -> torch.dtype:
    """Return the common dtype with integers taken to the default float, as `sin` or `/` do."""
    common = result_type(*operands)
    return common if _category(common) >= 2 else torch.get_default_dtype()


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Convert an array or number to a torch dtype; a number becomes a NumPy scalar, a literal in
    the jaxpr.
    """
    target = to_jax_dtype(dtype)
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value).astype(target)
    if isinstance(value, np.ndarray):
        return value.astype(target)
    if value.dtype == target and not getattr(value, "weak_type", False):
        return value
    if dtype == torch.bool:
        return lax.ne(value, np.zeros((), value.dtype))
    if jnp.issubdtype(value.dtype, jnp.complexfloating) and not dtype.is_complex:
        value = lax.real(value)
    # A negative number wraps in torch, and is clipped by JAX
    if target.kind == "u" and value.dtype.kind == "f":
        value = lax.convert_element_type(value, to_jax_dtype(torch.int64))
    return lax.convert_element_type(value, target)
