"""A JAX function with a declared gradient: in forward mode if its backward is linear, else in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_linear(run_backward: Callable, avals: list, cts: tuple) -> bool:
    """Return whether `backward` is linear in the cotangents, by transposing it."""

    def transpose(values: tuple, tangents: list) -> Any:
        return jax.linear_transpose(lambda *c: run_backward(values, c), *cts)(tangents)

    tangents = [a for a in avals if jnp.issubdtype(a.dtype, jnp.inexact)]
    try:
        jax.eval_shape(transpose, tuple(avals), tangents)
    except Exception:
        # JAX raises several kinds (NotImplementedError, AssertionError, TypeError) for a function
        # that is not linear
        return False
    return True


def with_jvp(
    run_forward: Callable, run_backward: Callable, cts: tuple, wanted: list[bool]
) -> Callable:
    """Return `run_forward` with the transpose of a linear `run_backward` as its forward mode."""
    function = jax.custom_jvp(run_forward)

    @function.defjvp
    def jvp(primals: tuple, tangents: tuple) -> tuple:
        outputs = run_forward(*primals)
        floating = [
            t
            for p, t in zip(primals, tangents, strict=True)
            if jnp.issubdtype(p.dtype, jnp.inexact)
        ]
        transposed = jax.linear_transpose(lambda *c: run_backward(primals, c), *cts)
        found = iter(transposed(floating))
        return outputs, [
            next(found) if w else _zero_tangent(o) for o, w in zip(outputs, wanted, strict=True)
        ]

    return function


def with_vjp(run_forward: Callable, run_backward: Callable, wanted: list[bool]) -> Callable:
    """Return `run_forward` with `run_backward` as its reverse mode."""
    function = jax.custom_vjp(run_forward)

    def forward(*primals: Any) -> tuple:
        return run_forward(*primals), primals

    def backward(primals: tuple, cotangents: list) -> tuple:
        found = iter(
            run_backward(primals, tuple(c for c, w in zip(cotangents, wanted, strict=True) if w))
        )
        return tuple(
            next(found) if jnp.issubdtype(p.dtype, jnp.inexact) else _zero_tangent(p)
            for p in primals
        )

    function.defvjp(forward, backward)
    return function


def _zero_tangent(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)
