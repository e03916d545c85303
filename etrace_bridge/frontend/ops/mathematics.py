"""Mathematical functions of one and two tensors: powers, exponentials, trigonometry, rounding,
extrema.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.scipy.special
import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.arrays import (
    is_float,
    same_shape,
    scalar,
    select,
    together,
    zeros_like,
)
from etrace_bridge.frontend.ops.dtypes import cast, float_type, result_type, to_jax_dtype
from etrace_bridge.frontend.ops.registry import implements


def scaled(x: Any, factor: float) -> Any:
    """Multiply by a Python number without changing the dtype."""
    return lax.mul(x, scalar(factor, x))


def shifted(x: Any, offset: float) -> Any:
    """Add a Python number without changing the dtype."""
    return lax.add(x, scalar(offset, x))


# ---- functions with a floating result, integers taken to the default float


def _in_float(function: Callable) -> Callable:
    return lambda input: function(cast(input, float_type(input)))


def _sinc(x: Any) -> Any:
    at_zero = lax.eq(x, scalar(0, x))
    angle = scaled(select(at_zero, scalar(1, x), x), math.pi)
    return select(at_zero, scalar(1, x), lax.div(lax.sin(angle), angle))


_FLOAT_FUNCTIONS: dict[str, Callable] = {
    "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "log": lax.log, "log1p": lax.log1p,
    "log2": lambda x: scaled(lax.log(x), 1 / math.log(2)), "log10": lambda x: scaled(lax.log(x), 1 / math.log(10)),
    "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "reciprocal": lambda x: lax.integer_pow(x, -1),
    "sin": lax.sin, "cos": lax.cos, "tan": lax.tan, "asin arcsin": lax.asin, "acos arccos": lax.acos,
    "atan arctan": lax.atan, "sinh": lax.sinh, "cosh": lax.cosh, "tanh": lax.tanh,
    "asinh arcsinh": lax.asinh, "acosh arccosh": lax.acosh, "atanh arctanh": lax.atanh,
    "sinc": _sinc, "deg2rad": lambda x: scaled(x, math.pi / 180), "rad2deg": lambda x: scaled(x, 180 / math.pi),
    "erf": lax.erf, "erfc": lax.erfc, "erfinv": lax.erf_inv, "lgamma gammaln": lax.lgamma,
    "sigmoid expit": lax.logistic,
    "ndtri": jax.scipy.special.ndtri, "log_ndtr": jax.scipy.special.log_ndtr,
    "ndtr": lambda x: scaled(lax.erfc(scaled(x, -math.sqrt(0.5))), 0.5),
}  # fmt: skip
for _names, _function in _FLOAT_FUNCTIONS.items():
    implements(*_names.split())(_in_float(_function))


# ---- functions that keep the dtype


@implements("abs", "absolute")
def absolute(input: Any) -> Any:
    """Distance from 0, with derivative 0 at 0 (that of `lax.abs` is 1 there)."""
    if input.dtype.kind == "u":
        return input
    return lax.mul(input, lax.sign(input)) if input.dtype.kind == "f" else lax.abs(input)


implements("neg", "negative")(lambda input: lax.neg(input))
implements("sign")(lambda input: input if input.dtype == np.bool_ else lax.sign(input))
implements("square")(
    lambda input: lax.square(cast(input, torch.int64) if input.dtype == np.bool_ else input)
)


def _on_floats(function: Callable) -> Callable:
    return lambda input: function(input) if is_float(input) else input


@implements("trunc", "fix")
def trunc(input: Any) -> Any:
    """Round towards zero; integers are left alone."""
    return (
        select(lax.lt(input, scalar(0, input)), lax.ceil(input), lax.floor(input))
        if is_float(input)
        else input
    )


implements("floor")(_on_floats(lax.floor))
implements("ceil")(_on_floats(lax.ceil))
implements("frac")(lambda input: lax.sub(input, trunc(input)))


@implements("round")
def round_half_even(input: Any, *, decimals: int = 0) -> Any:
    """Round to the nearest, ties to even, at a number of decimals."""
    if not is_float(input):
        return input
    if decimals == 0:
        return lax.round(input, lax.RoundingMethod.TO_NEAREST_EVEN)
    ten = scalar(10.0 ** abs(decimals), input)
    up, down = (lax.mul, lax.div) if decimals > 0 else (lax.div, lax.mul)
    return down(lax.round(up(input, ten), lax.RoundingMethod.TO_NEAREST_EVEN), ten)


# ---- tests of single entries


def _is_infinite(x: Any, *signs: int) -> Any:
    if not is_float(x):
        return lax.full(np.shape(x), False)
    found = [lax.eq(x, scalar(sign * math.inf, x)) for sign in signs]
    return found[0] if len(found) == 1 else lax.bitwise_or(*found)


implements("isnan")(lambda input: lax.ne(input, input))
implements("isinf")(lambda input: _is_infinite(input, 1, -1))
implements("isposinf")(lambda input: _is_infinite(input, 1))
implements("isneginf")(lambda input: _is_infinite(input, -1))


@implements("signbit")
def signbit(input: Any) -> Any:
    """Return whether the sign is negative; -0.0 counts."""
    zero = scalar(0, input)
    if input.dtype == np.bool_:
        return lax.full(np.shape(input), False)
    if not is_float(input):
        return lax.lt(input, zero)
    return lax.bitwise_or(lax.lt(input, zero), lax.lt(lax.integer_pow(input, -1), zero))


@implements("nan_to_num")
def nan_to_num(
    input: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    """Replace nan and infinities by numbers."""
    if not is_float(input):
        return input
    limits = (
        np.finfo(input.dtype)
        if input.dtype != to_jax_dtype(torch.bfloat16)
        else torch.finfo(torch.bfloat16)
    )
    x = select(lax.ne(input, input), scalar(0.0 if nan is None else nan, input), input)
    x = select(
        _is_infinite(input, 1), scalar(float(limits.max) if posinf is None else posinf, input), x
    )
    return select(
        _is_infinite(input, -1), scalar(float(limits.min) if neginf is None else neginf, input), x
    )


# ---- two tensors


def _binary(function: Callable, dtype: Callable = result_type) -> Callable:
    return lambda input, other: function(
        *same_shape(*together(input, other, dtype=dtype(input, other)))
    )


def _logaddexp(a: Any, b: Any) -> Any:
    distance = lax.sub(a, b)
    same_infinity = lax.ne(distance, distance)  # inf - inf; or a nan, which the sum passes on
    distance = absolute(select(same_infinity, zeros_like(a), distance))
    soft = lax.add(lax.max(a, b), lax.log1p(lax.exp(lax.neg(distance))))
    return select(same_infinity, lax.add(a, b), soft)


def _logaddexp2(a: Any, b: Any) -> Any:
    return scaled(_logaddexp(scaled(a, math.log(2)), scaled(b, math.log(2))), 1 / math.log(2))


def _xlogy(a: Any, b: Any, log: Callable = lax.log, pole: float = 0.0) -> Any:
    masked = lax.bitwise_and(lax.eq(a, scalar(0, a)), lax.le(b, scalar(pole, b)))
    return select(masked, zeros_like(a), lax.mul(a, log(select(masked, scalar(1, b), b))))


def _heaviside(x: Any, values: Any) -> Any:
    step = lax.convert_element_type(lax.gt(x, scalar(0, x)), x.dtype)
    return select(lax.eq(x, scalar(0, x)), values, step)


def _copysign(a: Any, b: Any) -> Any:
    return lax.mul(absolute(a), select(signbit(b), scalar(-1, a), scalar(1, a)))


_BINARY_FLOAT = {
    "atan2 arctan2": lax.atan2, "copysign": _copysign, "xlogy": _xlogy,
    "igamma gammainc": lax.igamma, "igammac gammaincc": lax.igammac,
    "xlog1py": lambda a, b: _xlogy(a, b, lax.log1p, -1.0),
}  # fmt: skip
for _names, _function in _BINARY_FLOAT.items():
    implements(*_names.split())(_binary(_function, float_type))
_BINARY_SAME = {
    "maximum": lax.max, "minimum": lax.min, "logaddexp": _logaddexp, "logaddexp2": _logaddexp2, "heaviside": _heaviside,
    "hypot": lambda a, b: lax.sqrt(lax.add(lax.square(a), lax.square(b))),
    # Unlike `maximum`, torch gives the whole gradient of a tie to the first operand here.
    "fmax": lambda a, b: select(lax.bitwise_or(lax.ge(a, b), lax.ne(b, b)), a, b),
    "fmin": lambda a, b: select(lax.bitwise_or(lax.le(a, b), lax.ne(b, b)), a, b),
}  # fmt: skip
for _name, _function in _BINARY_SAME.items():
    implements(_name)(_binary(_function))


@implements("ldexp")
def ldexp(input: Any, other: Any) -> Any:
    """`input * 2 ** other`."""
    power = lax.exp2(cast(other, float_type(other)))
    return lax.mul(*together(input, power, dtype=float_type(input, other)))


@implements("logit")
def logit(input: Any, eps: float | None = None) -> Any:
    """`log(x / (1 - x))`, with x first kept `eps` away from 0 and 1."""
    x = cast(input, float_type(input))
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return lax.log(lax.div(x, lax.sub(scalar(1, x), x)))


@implements("clamp", "clip")
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """Limit to [min, max]; the gradient passes at the limits themselves, which `lax.clamp` would
    not do.
    """
    dtype = result_type(*[x for x in (input, min, max) if x is not None])
    x = cast(input, dtype)
    if min is not None:
        a, low = together(x, min, dtype=dtype)
        x = select(lax.lt(a, low), low, a) if not _has_nan(low) else lax.max(a, low)
    if max is not None:
        a, high = together(x, max, dtype=dtype)
        x = select(lax.gt(a, high), high, a) if not _has_nan(high) else lax.min(a, high)
    return x


def _has_nan(limit: Any) -> bool:
    return isinstance(limit, np.ndarray) and limit.dtype.kind == "f" and bool(np.isnan(limit).any())


implements("clamp_min")(lambda input, min: clamp(input, min))
implements("clamp_max")(lambda input, max: clamp(input, None, max))
