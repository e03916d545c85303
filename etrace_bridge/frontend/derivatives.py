"""A value with the gradient of another value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def replace_value(old: Any, new: Any) -> Any:
    """Return the value of `new` with the gradient of `old`, as an in-place write under
    `torch.no_grad` does.
    """
    if jnp.iscomplexobj(old):
        return lax.complex(
            _replace(lax.real(old), lax.real(new)), _replace(lax.imag(old), lax.imag(new))
        )
    return _replace(old, new)


@jax.custom_jvp
def _replace(old: Any, new: Any) -> Any:
    return new


@_replace.defjvp
def _replace_jvp(primals: tuple, tangents: tuple) -> tuple:
    return primals[1], tangents[0]
