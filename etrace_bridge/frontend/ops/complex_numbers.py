"""Making complex tensors and taking them apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.arrays import scalar, select, zeros_like
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, float_type
from etrace_bridge.frontend.ops.registry import implements


def is_complex(x: Any) -> bool:
    """Return whether an array is complex."""
    return dtype_of(x).is_complex


implements("real", view=True)(lambda input: lax.real(input) if is_complex(input) else input)
implements("isreal")(
    lambda input: (
        lax.eq(lax.imag(input), zeros_like(lax.imag(input)))
        if is_complex(input)
        else lax.full(np.shape(input), True)
    )
)


@implements("imag", view=True)
def imag(input: Any) -> Any:
    """The imaginary part; torch refuses a real tensor."""
    if not is_complex(input):
        raise TypeError("`imag` takes a complex tensor")
    return lax.imag(input)


@implements("complex")
def make_complex(real: Any, imag: Any) -> Any:
    """`real + i * imag`."""
    real, imag = _broadcast(real, imag)
    return lax.complex(real, imag)


@implements("polar")
def polar(abs: Any, angle: Any) -> Any:
    """`abs * exp(i * angle)`."""
    abs, angle = _broadcast(abs, angle)
    return lax.complex(lax.mul(abs, lax.cos(angle)), lax.mul(abs, lax.sin(angle)))


def _broadcast(a: Any, b: Any) -> tuple[Any, Any]:
    if dtype_of(a) != dtype_of(b):
        raise TypeError(f"Expected two tensors of one dtype, got {dtype_of(a)} and {dtype_of(b)}")
    shape = np.broadcast_shapes(a.shape, b.shape)

    def spread(x: Any) -> Any:
        return lax.broadcast_in_dim(x, shape, range(len(shape) - x.ndim, len(shape)))

    return spread(a), spread(b)


@implements("view_as_real", view=True)
def view_as_real(input: Any) -> Any:
    """A last axis of real and imaginary part."""
    if not is_complex(input):
        raise TypeError("`view_as_real` takes a complex tensor")
    shape = (*input.shape, 1)
    return lax.concatenate(
        [lax.reshape(part, shape) for part in (lax.real(input), lax.imag(input))], input.ndim
    )


@implements("view_as_complex", view=True)
def view_as_complex(input: Any) -> Any:
    """Complex numbers from a last axis of real and imaginary part."""
    if is_complex(input) or not input.ndim or input.shape[-1] != 2:
        raise TypeError("`view_as_complex` takes a real tensor whose last dimension is 2")
    return lax.complex(
        *(lax.index_in_dim(input, k, input.ndim - 1, keepdims=False) for k in (0, 1))
    )


@implements("angle")
def angle(input: Any) -> Any:
    """The angle of a complex number, with derivative 0 at 0; pi for a negative real one."""
    if not is_complex(input):
        x = cast(input, float_type(input))
        turned = select(lax.lt(x, scalar(0, x)), scalar(np.pi, x), zeros_like(x))
        return select(lax.ne(x, x), x, turned)
    real, imaginary = lax.real(input), lax.imag(input)
    zero = lax.bitwise_and(lax.eq(real, zeros_like(real)), lax.eq(imaginary, zeros_like(real)))
    return lax.atan2(select(zero, zeros_like(real), imaginary), select(zero, scalar(1, real), real))


@implements("isfinite")
def isfinite(input: Any) -> Any:
    """Return which entries are neither infinite nor nan."""
    if is_complex(input):
        return lax.bitwise_and(lax.is_finite(lax.real(input)), lax.is_finite(lax.imag(input)))
    return (
        lax.is_finite(input)
        if dtype_of(input).is_floating_point
        else lax.full(np.shape(input), True)
    )


@implements("sgn")
def sgn(input: Any) -> Any:
    """`z / |z|` of a complex number, the sign of a real one; 0 at 0."""
    return input if dtype_of(input) == torch.bool else lax.sign(input)
