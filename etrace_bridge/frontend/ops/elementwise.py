"""Element-wise arithmetic, comparison, logic and mathematical functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import TracingError
from etrace_bridge.frontend.ops.arrays import (
    expand_to,
    is_float,
    same_shape,
    scalar,
    select,
    together,
    zeros_like,
)
from etrace_bridge.frontend.ops.dtypes import cast, float_type, result_type
from etrace_bridge.frontend.ops.mathematics import trunc
from etrace_bridge.frontend.ops.registry import implements

# ---- arithmetic


@implements("add")
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """`input + alpha * other`; on booleans, logical or."""
    dtype = result_type(input, other)
    a, b = together(input, other, dtype=dtype)
    if dtype == torch.bool:
        return (
            lax.bitwise_or(a, b)
            if alpha
            else expand_to(a, np.broadcast_shapes(np.shape(a), np.shape(b)))
        )
    return lax.add(a, b if _is_one(alpha) else lax.mul(b, scalar(alpha, b)))


@implements("sub", "subtract")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """`input - alpha * other`."""
    a, b = together(input, other)
    return lax.sub(a, b if _is_one(alpha) else lax.mul(b, scalar(alpha, b)))


@implements("rsub")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """`other - alpha * input`."""
    return sub(other, input, alpha=alpha)


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, (bool, int, float)) and alpha == 1


@implements("mul", "multiply")
def mul(input: Any, other: Any) -> Any:
    """`input * other`; on booleans, logical and."""
    dtype = result_type(input, other)
    a, b = together(input, other, dtype=dtype)
    return lax.bitwise_and(a, b) if dtype == torch.bool else lax.mul(a, b)


@implements("div", "divide", "true_divide")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """`input / other`, with integers taken to the default float unless the quotient is rounded."""
    if rounding_mode is None:
        return lax.div(*together(input, other, dtype=float_type(input, other)))
    if rounding_mode == "floor":
        return floor_divide(input, other)
    a, b = together(input, other)
    return trunc(lax.div(a, b)) if is_float(a) else lax.div(a, b)


@implements("floor_divide")
def floor_divide(input: Any, other: Any) -> Any:
    """Quotient rounded towards minus infinity, from the exact remainder as Python does it."""
    a, b = same_shape(*together(input, other))
    rest = lax.rem(a, b)
    zero = zeros_like(rest)
    off = lax.bitwise_and(lax.ne(rest, zero), lax.ne(lax.lt(rest, zero), lax.lt(b, zero)))
    if not is_float(rest):
        quotient = lax.div(a, b)
        return select(off, lax.sub(quotient, scalar(1, quotient)), quotient)
    quotient = lax.div(lax.sub(a, rest), b)
    quotient = lax.round(select(off, lax.sub(quotient, scalar(1, quotient)), quotient))
    return select(lax.eq(b, zero), lax.round(lax.div(a, b)), quotient)


@implements("remainder")
def remainder(input: Any, other: Any) -> Any:
    """Remainder with the sign of the divisor, as Python's `%`."""
    a, b = same_shape(*together(input, other))
    rest = lax.rem(a, b)
    zero = zeros_like(rest)
    off = lax.bitwise_and(lax.ne(rest, zero), lax.ne(lax.lt(rest, zero), lax.lt(b, zero)))
    return select(off, lax.add(rest, b), rest)


@implements("fmod")
def fmod(input: Any, other: Any) -> Any:
    """Remainder with the sign of the dividend, as C's `fmod`."""
    return lax.rem(*together(input, other))


def _reversed(rule: Callable) -> Callable:
    return lambda input, other: rule(other, input)


implements("rdiv")(_reversed(div))
implements("rfloordiv")(_reversed(floor_divide))
implements("rmod")(_reversed(remainder))


@implements("pow")
def power(input: Any, exponent: Any) -> Any:
    """`input ** exponent`; a small integer exponent becomes `integer_pow`, whose derivative is
    torch's at 0.
    """
    dtype = result_type(input, exponent)
    number = isinstance(exponent, (bool, int, float)) and not isinstance(input, (bool, int, float))
    if number and float(exponent).is_integer() and abs(exponent) < 2**31:
        base = cast(input, dtype)
        if exponent == 0:
            return lax.full(np.shape(base), scalar(1, base), base.dtype)
        if exponent > 0 or is_float(base):
            return base if exponent == 1 else lax.integer_pow(base, int(exponent))
        return _negative_integer_power(base, int(exponent))
    base, exponent = same_shape(*together(input, exponent, dtype=dtype))
    if not is_float(base):
        return _integer_power(base, exponent)
    # 0 ** 0 is 1 whatever the direction: torch's derivatives there are 0, those of `lax.pow` are
    # not.
    zero = zeros_like(base)
    constant = lax.bitwise_and(lax.eq(base, zero), lax.eq(exponent, zero))
    return lax.pow(select(constant, scalar(1, base), base), exponent)


def _negative_integer_power(base: Any, exponent: int) -> Any:
    """Integers to a negative power: 1 and -1 have an integer result, everything else is 0 in torch."""
    minus = scalar(1 if exponent % 2 == 0 else -1, base)
    one = scalar(1, base)
    return select(
        lax.eq(base, one), one, select(lax.eq(base, lax.neg(one)), minus, zeros_like(base))
    )


def _integer_power(base: Any, exponent: Any) -> Any:
    """Repeated squaring over the bits of an integer exponent."""
    result, square_of = lax.full(np.shape(base), scalar(1, base), base.dtype), base
    for bit in range(8 * base.dtype.itemsize - (base.dtype.kind == "i")):
        odd = lax.ne(lax.bitwise_and(exponent, scalar(1 << bit, exponent)), scalar(0, exponent))
        result = select(odd, lax.mul(result, square_of), result)
        square_of = lax.mul(square_of, square_of)
    if base.dtype.kind == "u":
        return result
    even = lax.eq(lax.bitwise_and(exponent, scalar(1, exponent)), scalar(0, exponent))
    by_parity = select(even, *(_negative_integer_power(base, n) for n in (-2, -1)))
    return select(lax.lt(exponent, scalar(0, exponent)), by_parity, result)


implements("rpow")(_reversed(power))


@implements("float_power")
def float_power(input: Any, exponent: Any) -> Any:
    """`input ** exponent` in double precision."""
    complex_result = result_type(input, exponent).is_complex
    dtype = torch.complex128 if complex_result else torch.float64
    double = [
        x if isinstance(x, (bool, int, float, complex)) else cast(x, dtype)
        for x in (input, exponent)
    ]
    return cast(power(*double), dtype)


@implements("addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """`input + value * tensor1 * tensor2`."""
    return add(input, mul(tensor1, tensor2), alpha=value)


@implements("addcdiv")
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """`input + value * tensor1 / tensor2`."""
    return add(input, div(tensor1, tensor2), alpha=value)


@implements("lerp")
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """`input + weight * (end - input)`."""
    return add(input, mul(weight, sub(end, input)))


# ---- comparison and logic


def _same_dtype(op: Callable) -> Callable:
    return lambda input, other: op(*together(input, other))


for _names, _op in {
    "eq": lax.eq, "ne not_equal": lax.ne, "lt less": lax.lt, "le less_equal": lax.le, "gt greater": lax.gt,
    "ge greater_equal": lax.ge, "bitwise_and": lax.bitwise_and, "bitwise_or": lax.bitwise_or,
    "bitwise_xor": lax.bitwise_xor,
}.items():  # fmt: skip
    implements(*_names.split())(_same_dtype(_op))


def _truth(x: Any) -> Any:
    return cast(x, torch.bool)


def _logical(op: Callable) -> Callable:
    return lambda input, other: op(*together(_truth(input), _truth(other)))


implements("logical_and")(_logical(lax.bitwise_and))
implements("logical_or")(_logical(lax.bitwise_or))
implements("logical_xor")(_logical(lax.bitwise_xor))
implements("logical_not")(lambda input: lax.bitwise_not(_truth(input)))

implements("bitwise_not")(lambda input: lax.bitwise_not(input))


@implements("bitwise_left_shift")
def left_shift(input: Any, other: Any) -> Any:
    """`input << other`."""
    return lax.shift_left(*same_shape(*together(input, other)))


@implements("bitwise_right_shift")
def right_shift(input: Any, other: Any) -> Any:
    """`input >> other`, keeping the sign."""
    return lax.shift_right_arithmetic(*same_shape(*together(input, other)))


implements("rlshift")(_reversed(left_shift))
implements("rrshift")(_reversed(right_shift))


@implements("isclose")
def isclose(
    input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Any:
    """`|input - other| <= atol + rtol * |other|`."""
    dtype = result_type(input, other)
    a, b = together(
        input, other, dtype=dtype if dtype.is_floating_point else torch.get_default_dtype()
    )
    near = lax.le(
        lax.abs(lax.sub(a, b)), lax.add(lax.mul(lax.abs(b), scalar(rtol, b)), scalar(atol, b))
    )
    near = lax.bitwise_or(lax.eq(a, b), lax.bitwise_and(lax.is_finite(b), near))
    return lax.bitwise_or(near, lax.bitwise_and(lax.ne(a, a), lax.ne(b, b))) if equal_nan else near


implements("Tensor.where")(lambda input, condition, other: where(condition, input, other))


@implements("where")
def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """Choose element-wise between two tensors or numbers."""
    if input is None or other is None:
        raise TracingError(
            "`torch.where(condition)` gives a result whose size depends on the values in a tensor. "
            "A traced step has fixed shapes. Use `torch.where(condition, a, b)` instead."
        )
    yes, no = together(input, other)
    return select(_truth(condition), yes, no)
