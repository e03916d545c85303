"""Losses, each with its two signatures: `torch.nn.functional`'s (reduction by name) and aten's (by
number).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.activations import log_softmax, logsigmoid
from etrace_bridge.frontend.ops.arrays import (
    expand_to,
    is_float,
    scalar,
    select,
    together,
    zeros_like,
)
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of
from etrace_bridge.frontend.ops.elementwise import add, mul, sub
from etrace_bridge.frontend.ops.indexing import take_along
from etrace_bridge.frontend.ops.mathematics import absolute, clamp, scaled, shifted
from etrace_bridge.frontend.ops.ranges import require_range
from etrace_bridge.frontend.ops.reductions import mean, sum_
from etrace_bridge.frontend.ops.registry import implements

_NUMBERED = {0: "none", 1: "mean", 2: "sum"}


def reduction_name(
    reduction: Any, size_average: bool | None = None, reduce: bool | None = None
) -> str:
    """Name a reduction given by name or number; two deprecated flags rule over both."""
    if size_average is not None or reduce is not None:
        return "none" if reduce is False else "mean" if size_average is not False else "sum"
    return _NUMBERED.get(reduction) or reduction


def reduced(
    loss: Any, reduction: Any, size_average: bool | None = None, reduce: bool | None = None
) -> Any:
    """Reduce as asked."""
    return {"none": lambda x: x, "mean": mean, "sum": sum_}[
        reduction_name(reduction, size_average, reduce)
    ](loss)


def _times(loss: Any, weight: Any) -> Any:
    return loss if weight is None else mul(loss, weight)


# ---- distances


def _enter_distance(name: str, distance: Callable) -> None:
    def functional(
        input: Any,
        target: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        weight: Any = None,
    ) -> Any:
        loss = distance(sub(input, target))
        reduction = reduction_name(reduction, size_average, reduce)
        if weight is None or reduction != "mean":
            return reduced(_times(loss, weight), reduction)
        return lax.div(sum_(mul(loss, weight)), sum_(weight))

    implements(f"F.{name}")(functional)
    implements(name)(
        lambda input, target, reduction=1: reduced(distance(sub(input, target)), reduction)
    )


_enter_distance("mse_loss", lax.square)
_enter_distance("l1_loss", absolute)


def _smooth(d: Any, beta: float) -> Any:
    """`d^2 / (2 beta)` near 0 and `|d| - beta / 2` beyond beta."""
    size = absolute(d)
    if beta == 0:
        return size
    return select(
        lax.lt(size, scalar(beta, d)), scaled(lax.square(d), 0.5 / beta), shifted(size, -0.5 * beta)
    )


@implements("F.smooth_l1_loss")
def smooth_l1_loss(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    beta: float = 1.0,
) -> Any:
    """Squared near 0, linear beyond."""
    return reduced(_smooth(sub(input, target), beta), reduction, size_average, reduce)


implements("smooth_l1_loss")(
    lambda input, target, reduction=1, beta=1.0: smooth_l1_loss(
        input, target, None, None, reduction, beta
    )
)


@implements("huber_loss")
def huber_loss(
    input: Any, target: Any, reduction: Any = "mean", delta: float = 1.0, weight: Any = None
) -> Any:
    """`delta` times the smooth L1 loss."""
    d = sub(input, target)
    size = absolute(d)
    far = scaled(shifted(size, -0.5 * delta), delta)
    loss = select(lax.le(size, scalar(delta, d)), scaled(lax.square(d), 0.5), far)
    return reduced(_times(loss, weight), reduction)


# ---- classification


def _picked_class(
    scores: Any, target: Any, weight: Any, ignore_index: int, op: str
) -> tuple[Any, Any]:
    """Give, for class scores `(N, C, *)` or `(C,)`, minus the score of the target class, weighted,
    and the weights.
    """
    d = 0 if np.ndim(scores) == 1 else 1
    require_range(target, op, 0, np.shape(scores)[d], ignore_index)
    ignored = lax.eq(target, scalar(ignore_index, target))
    classes = select(ignored, zeros_like(target), target)
    score = lax.squeeze(take_along(scores, lax.expand_dims(classes, (d,)), d), (d,))
    weights = (
        lax.full(np.shape(target), scalar(1, scores), scores.dtype)
        if weight is None
        else weight.at[classes].get(mode="clip")
    )
    weights = select(ignored, zeros_like(weights), weights)
    return lax.neg(lax.mul(select(ignored, zeros_like(score), score), weights)), weights


def _nll(input: Any, target: Any, weight: Any, ignore_index: int, reduction: Any) -> Any:
    loss, weights = _picked_class(input, target, weight, ignore_index, "nll_loss")
    return (
        lax.div(sum_(loss), sum_(weights)) if reduction in ("mean", 1) else reduced(loss, reduction)
    )


@implements("F.nll_loss")
def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """Minus the log-probability of the target class."""
    return _nll(
        input, target, weight, ignore_index, reduction_name(reduction, size_average, reduce)
    )


implements("nll_loss", "nll_loss_nd", "nll_loss2d")(
    lambda input, target, weight=None, reduction=1, ignore_index=-100: _nll(
        input, target, weight, ignore_index, reduction
    )
)
implements("nll_loss_forward", "nll_loss2d_forward")(
    lambda input, target, weight, reduction, ignore_index: (
        _nll(input, target, weight, ignore_index, reduction),
        scaled(
            sum_(_picked_class(input, target, weight, ignore_index, "nll_loss")[1]),
            float(reduction != 0),
        ),
    )
)


def _cross_entropy(
    input: Any, target: Any, weight: Any, reduction: str, ignore_index: int, smoothing: float
) -> Any:
    d = 0 if np.ndim(input) == 1 else 1
    classes = np.shape(input)[d]
    log_probability = log_softmax(input, d)
    wide = (
        None
        if weight is None
        else expand_to(
            lax.reshape(weight, (classes,) + (1,) * (np.ndim(input) - d - 1)), np.shape(input)
        )
    )
    if is_float(target):  # class probabilities
        target = (
            target
            if smoothing == 0
            else shifted(scaled(target, 1 - smoothing), smoothing / classes)
        )
        product = lax.mul(log_probability, cast(target, dtype_of(input)))
        loss = lax.neg(lax.reduce_sum(product if wide is None else lax.mul(product, wide), (d,)))
        return (
            lax.div(sum_(loss), scalar(max(np.size(loss), 1), loss))
            if reduction == "mean"
            else reduced(loss, reduction)
        )
    loss, weights = _picked_class(log_probability, target, weight, ignore_index, "cross_entropy")
    if smoothing > 0:
        ignored = lax.eq(target, scalar(ignore_index, target))
        smooth = lax.neg(
            lax.reduce_sum(
                log_probability if wide is None else lax.mul(log_probability, wide), (d,)
            )
        )
        smooth = select(ignored, zeros_like(smooth), smooth)
        loss = lax.add(scaled(loss, 1 - smoothing), scaled(smooth, smoothing / classes))
    return lax.div(sum_(loss), sum_(weights)) if reduction == "mean" else reduced(loss, reduction)


@implements("F.cross_entropy")
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Softmax and negative log-likelihood, for class indices or class probabilities."""
    reduction = reduction_name(reduction, size_average, reduce)
    return _cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing)


implements("cross_entropy_loss")(
    lambda input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0: (
        _cross_entropy(input, target, weight, _NUMBERED[reduction], ignore_index, label_smoothing)
    )
)


# ---- binary classification


@jax.custom_jvp
def _binary_entropy(p: Any, target: Any) -> Any:
    """`-(t log p + (1 - t) log(1 - p))`, the logarithms kept above -100."""
    floor = lambda x: clamp(x, -100.0)
    rest = lax.sub(scalar(1, target), target)
    return lax.neg(
        lax.add(lax.mul(target, floor(lax.log(p))), lax.mul(rest, floor(lax.log1p(lax.neg(p)))))
    )


@_binary_entropy.defjvp
def _binary_entropy_jvp(primals: Any, tangents: Any) -> Any:
    # torch keeps p (1 - p) above 1e-12 (held in single precision, also for float64), so that the
    # gradient stays finite where p is 0 or 1.
    p, target = primals
    slope = lax.div(
        lax.sub(p, target), clamp(lax.mul(p, lax.sub(scalar(1, p), p)), float(np.float32(1e-12)))
    )
    by_target = lax.sub(lax.log1p(lax.neg(p)), lax.log(p))
    return _binary_entropy(p, target), lax.add(
        lax.mul(slope, tangents[0]), lax.mul(by_target, tangents[1])
    )


@implements("F.binary_cross_entropy")
def binary_cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """Cross-entropy of probabilities."""
    return reduced(
        _times(_binary_entropy(*together(input, target)), weight), reduction, size_average, reduce
    )


implements("binary_cross_entropy")(
    lambda input, target, weight=None, reduction=1: binary_cross_entropy(
        input, target, weight, None, None, reduction
    )
)


def _binary_logits(x: Any, target: Any, pos_weight: Any) -> Any:
    """`(1 - t) x - log_weight * logsigmoid(x)`, the stable form."""
    rest = mul(sub(1, target), x)
    factor = 1 if pos_weight is None else add(mul(sub(pos_weight, 1), target), 1)
    return sub(rest, mul(factor, logsigmoid(x)))


@implements("F.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    pos_weight: Any = None,
) -> Any:
    """Cross-entropy of sigmoids."""
    return reduced(
        _times(_binary_logits(input, target, pos_weight), weight), reduction, size_average, reduce
    )


implements("binary_cross_entropy_with_logits")(
    lambda input, target, weight=None, pos_weight=None, reduction=1: (
        binary_cross_entropy_with_logits(input, target, weight, None, None, reduction, pos_weight)
    )
)


# ---- distributions


def _divergence(input: Any, target: Any, log_target: bool) -> Any:
    if log_target:
        return mul(lax.exp(target), sub(target, input))
    at_zero = lax.eq(target, scalar(0, target))
    own = select(
        at_zero,
        zeros_like(target),
        lax.mul(target, lax.log(select(at_zero, scalar(1, target), target))),
    )
    return sub(own, mul(target, input))


@implements("F.kl_div")
def kl_div(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    log_target: bool = False,
) -> Any:
    """Kullback-Leibler divergence of log-probabilities from probabilities."""
    loss = _divergence(input, target, log_target)
    if reduction == "batchmean":
        return lax.div(sum_(loss), scalar(np.shape(input)[0] if np.ndim(input) else 1, loss))
    return reduced(loss, reduction, size_average, reduce)


implements("kl_div")(
    lambda input, target, reduction=1, *, log_target=False: kl_div(
        input, target, None, None, reduction, log_target
    )
)
