"""Activation functions, with torch's derivative at every kink, and the softmax family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend.derivatives import replace_value
from etrace_bridge.frontend.ops.arrays import axes, axis, expand_to, scalar, select, zeros_like
from etrace_bridge.frontend.ops.dtypes import cast, float_type
from etrace_bridge.frontend.ops.elementwise import add, div, sub
from etrace_bridge.frontend.ops.mathematics import absolute, scaled, shifted
from etrace_bridge.frontend.ops.registry import implements


@implements("relu")
def relu(input: Any, inplace: bool = False) -> Any:
    """`max(x, 0)`, with derivative 0 at 0 (the derivative of `lax.max` is 1/2 there)."""
    return select(lax.le(input, scalar(0, input)), zeros_like(input), input)


@implements("hardtanh")
def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    """Limit to [min_val, max_val]; unlike `clamp`, the derivative at the limits is 0, as that of
    `lax.clamp`.
    """
    return lax.clamp(scalar(min_val, input), input, scalar(max_val, input))


implements("relu6")(lambda input, inplace=False: hardtanh(input, 0, 6))


@implements("leaky_relu")
def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """x where positive, else `negative_slope * x`."""
    return select(lax.gt(input, scalar(0, input)), input, scaled(input, negative_slope))


@implements("rrelu")
def rrelu(
    input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Leaky relu; in training the slope is random, which has no counterpart here."""
    if training:
        raise NotSupportedError(
            "`rrelu` draws random slopes in training mode. Call `model.eval()` or use `leaky_relu`."
        )
    return leaky_relu(input, (lower + upper) / 2)


@implements("prelu", "_prelu_kernel")
def prelu(input: Any, weight: Any) -> Any:
    """Leaky relu with a learned slope, one for all channels or one per channel (dimension 1)."""
    if np.ndim(weight) == 1 and np.size(weight) > 1 and np.ndim(input) > 1:
        weight = lax.broadcast_in_dim(
            weight, (1, np.size(weight)) + (1,) * (np.ndim(input) - 2), (1,)
        )
    elif np.size(weight) == 1:
        weight = lax.reshape(weight, ())
    return select(
        lax.gt(input, scalar(0, input)), input, lax.mul(expand_to(weight, np.shape(input)), input)
    )


@implements("elu")
def elu(
    input: Any,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
    inplace: bool = False,
) -> Any:
    """x where positive, else `alpha * (exp(x) - 1)`; the scales are those of `aten::elu`."""
    positive = lax.gt(input, scalar(0, input))
    # expm1 sees no large positive value, so its unused branch cannot give inf * 0 in the gradient.
    safe = select(positive, zeros_like(input), input)
    negative = scaled(
        lax.expm1(safe if input_scale == 1 else scaled(safe, input_scale)), alpha * scale
    )
    return select(positive, input if scale == 1 else scaled(input, scale), negative)


# In Python, `F.elu(x, alpha, inplace)` has its flag in the place of aten's scale.
implements("F.elu")(lambda input, alpha=1.0, inplace=False: elu(input, alpha))


@implements("celu")
def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """x where positive, else `alpha * (exp(x / alpha) - 1)`; torch's derivative divides by an alpha
    of single precision.
    """
    value, rounded = elu(input, alpha, 1.0, 1 / alpha), float(np.float32(alpha))
    return (
        value
        if rounded == alpha or input.dtype != np.float64
        else replace_value(elu(input, alpha, 1.0, 1 / rounded), value)
    )


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
implements("selu")(lambda input, inplace=False: elu(input, _SELU_ALPHA, _SELU_SCALE))


@implements("gelu")
def gelu(input: Any, *, approximate: str = "none") -> Any:
    """`x * Phi(x)`, exact by default; `approximate="tanh"` for the tanh form."""
    if approximate == "tanh":
        inner = scaled(
            lax.add(input, scaled(lax.integer_pow(input, 3), 0.044715)), math.sqrt(2 / math.pi)
        )
        return lax.mul(scaled(input, 0.5), shifted(lax.tanh(inner), 1))
    return lax.mul(scaled(input, 0.5), lax.erfc(scaled(input, -math.sqrt(0.5))))


implements("silu")(lambda input, inplace=False: lax.mul(input, lax.logistic(input)))


@implements("softplus")
def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """`log(1 + exp(beta * x)) / beta`, and x itself above the threshold."""
    x = scaled(input, beta)
    linear = lax.gt(x, scalar(threshold, x))
    return select(
        linear,
        input,
        lax.div(lax.log1p(lax.exp(select(linear, zeros_like(x), x))), scalar(beta, x)),
    )


@implements("mish")
def mish(input: Any, inplace: bool = False) -> Any:
    """`x * tanh(softplus(x))`."""
    return lax.mul(input, lax.tanh(softplus(input)))


@implements("logsigmoid", "log_sigmoid")
def logsigmoid(input: Any) -> Any:
    """`log(sigmoid(x))` without overflow."""
    return lax.sub(lax.min(input, scalar(0, input)), lax.log1p(lax.exp(lax.neg(absolute(input)))))


implements("aten::log_sigmoid_forward")(
    lambda input: (logsigmoid(input), lax.exp(lax.neg(absolute(input))))
)
implements("softsign")(lambda input: div(input, add(absolute(input), 1)))
implements("tanhshrink")(lambda input: sub(input, lax.tanh(cast(input, float_type(input)))))


@implements("hardsigmoid")
def hardsigmoid(input: Any, inplace: bool = False) -> Any:
    """`relu6(x + 3) / 6`; torch's backward kernel holds its 1/6 in single precision, also for
    float64.
    """
    limited = hardtanh(shifted(input, 3), 0, 6)
    value = scaled(limited, 1 / 6)
    return (
        value
        if limited.dtype != np.float64
        else replace_value(scaled(limited, float(np.float32(1 / 6))), value)
    )


@implements("hardswish")
def hardswish(input: Any, inplace: bool = False) -> Any:
    """`x * relu6(x + 3) / 6`."""
    middle = scaled(lax.mul(input, shifted(input, 3)), 1 / 6)
    above = lax.ge(input, scalar(3, input))
    return select(lax.le(input, scalar(-3, input)), zeros_like(input), select(above, input, middle))


@implements("threshold", "_threshold")
def threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    """x where it exceeds the threshold, else `value`."""
    return select(lax.le(input, scalar(threshold, input)), scalar(value, input), input)


@implements("hardshrink")
def hardshrink(input: Any, lambd: float = 0.5) -> Any:
    """x where `|x| > lambd`, else 0."""
    return select(lax.le(lax.abs(input), scalar(lambd, input)), zeros_like(input), input)


@implements("softshrink")
def softshrink(input: Any, lambd: float = 0.5) -> Any:
    """x moved towards 0 by `lambd`, and 0 within it."""
    moved = lax.sub(input, lax.mul(lax.sign(input), scalar(lambd, input)))
    return select(lax.le(lax.abs(input), scalar(lambd, input)), zeros_like(input), moved)


@implements("glu")
def glu(input: Any, dim: int = -1) -> Any:
    """First half times the sigmoid of the second half."""
    d = axis(dim, np.ndim(input))
    half = np.shape(input)[d] // 2
    first, second = (lax.slice_in_dim(input, k * half, (k + 1) * half, 1, d) for k in (0, 1))
    return lax.mul(first, lax.logistic(second))


# ---- softmax family


def _in_dtype(x: Any, dtype: torch.dtype | None) -> Any:
    return cast(x, float_type(x) if dtype is None else dtype)


def softmax(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """`exp(x) / sum(exp(x))` along one dimension."""
    x = _in_dtype(input, dtype)
    if np.ndim(x) == 0 or np.size(x) == 0:
        return lax.div(x, x) if np.size(x) == 0 else lax.add(lax.sub(x, x), scalar(1, x))
    d = axis(dim, np.ndim(x))
    # A row of -inf alone is nan in torch: the subtraction must see the infinite maximum itself.
    top = lax.stop_gradient(lax.expand_dims(lax.reduce_max(x, (d,)), (d,)))
    exponential = lax.exp(lax.sub(x, expand_to(top, np.shape(x))))
    total = lax.expand_dims(lax.reduce_sum(exponential, (d,)), (d,))
    return lax.div(exponential, expand_to(total, np.shape(x)))


def log_softmax(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Logarithm of `softmax`."""
    x = _in_dtype(input, dtype)
    if np.ndim(x) == 0 or np.size(x) == 0:
        return lax.sub(x, x)
    d = axis(dim, np.ndim(x))
    top = lax.stop_gradient(lax.expand_dims(lax.reduce_max(x, (d,)), (d,)))
    moved = lax.sub(x, expand_to(top, np.shape(x)))
    total = lax.expand_dims(lax.log(lax.reduce_sum(lax.exp(moved), (d,))), (d,))
    return lax.sub(moved, expand_to(total, np.shape(x)))


def _enter_softmax(name: str, rule: Callable) -> None:
    """Enter the three signatures of one member: torch's, `torch.nn.functional`'s, and the aten
    kernel's.
    """
    implements(name)(rule)
    implements(f"F.{name}")(
        lambda input, dim=None, _stacklevel=3, dtype=None: rule(
            input, _legacy_dim(dim, input), dtype
        )
    )
    implements(f"aten::_{name}")(lambda input, dim, half_to_float=False: rule(input, dim))


def _legacy_dim(dim: int | None, x: Any) -> int:
    return dim if dim is not None else 0 if np.ndim(x) in (0, 1, 3) else 1


def softmin(
    input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    """Softmax of the negative."""
    return softmax(lax.neg(input), _legacy_dim(dim, input), dtype)


_enter_softmax("softmax", softmax)
_enter_softmax("log_softmax", log_softmax)
implements("softmin")(softmin)


@implements("logsumexp")
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Logarithm of the sum of exponentials over dimensions."""
    x = cast(input, float_type(input))
    over = axes(dim, np.ndim(x))
    if not over:
        return x
    top = lax.reduce_max(x, over)
    top = lax.stop_gradient(select(lax.is_finite(top), top, zeros_like(top)))
    wide = lax.expand_dims(top, over)
    total = lax.add(
        lax.log(lax.reduce_sum(lax.exp(lax.sub(x, expand_to(wide, np.shape(x)))), over)), top
    )
    return lax.expand_dims(total, over) if keepdim else total
