"""Losses with margins, likelihoods of counts and Gaussians, and the similarities they rest on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.activations import logsigmoid
from etrace_bridge.frontend.ops.arrays import axes, expand_to, scalar, select, together, zeros_like
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, float_type
from etrace_bridge.frontend.ops.elementwise import add, mul, sub
from etrace_bridge.frontend.ops.indexing import take_along
from etrace_bridge.frontend.ops.losses import reduced
from etrace_bridge.frontend.ops.mathematics import clamp, scaled, shifted
from etrace_bridge.frontend.ops.ranges import require_range
from etrace_bridge.frontend.ops.reductions import mean, safe_root, vector_norm
from etrace_bridge.frontend.ops.registry import implements


@implements("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Cosine of the angle along a dimension; a norm counts as at least `eps`, but keeps its own
    gradient.
    """
    a, b = together(x1, x2)
    over = axes((dim,), np.ndim(a))

    def unit(x: Any) -> Any:
        size = vector_norm(x, 2.0, over, True)
        lift = lax.stop_gradient(lax.sub(lax.max(size, scalar(eps, size)), size))
        return lax.div(x, expand_to(lax.add(size, lift), np.shape(x)))

    return lax.reduce_sum(lax.mul(unit(a), unit(b)), over)


@implements("pairwise_distance")
def pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Norm of the difference along the last dimension."""
    d = add(sub(x1, x2), eps)
    return vector_norm(d, float(p), (np.ndim(d) - 1,), keepdim)


def _hinge(x: Any) -> Any:
    """`max(x, 0)` with the gradient of `clamp_min`, which passes at 0."""
    return clamp(x, 0)


@implements("F.hinge_embedding_loss")
def hinge_embedding_loss(
    input: Any,
    target: Any,
    margin: float = 1.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """Distance itself for target 1, what lacks to the margin for target -1."""
    x, t = together(input, target)
    zero = zeros_like(x)
    far = select(lax.eq(t, scalar(1, t)), zero, _hinge(lax.sub(scalar(margin, x), x)))
    near = select(lax.eq(t, scalar(-1, t)), zero, x)
    return reduced(lax.add(far, near), reduction, size_average, reduce)


@implements("F.margin_ranking_loss")
def margin_ranking_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """How far the first fails to exceed the second (target 1) or the second the first (-1) by the
    margin.
    """
    loss = _hinge(add(mul(lax.neg(target), sub(input1, input2)), margin))
    return reduced(loss, reduction, size_average, reduce)


@implements("F.soft_margin_loss")
def soft_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean"
) -> Any:
    """`log(1 + exp(-target * input))`."""
    return reduced(lax.log1p(lax.exp(mul(lax.neg(target), input))), reduction, size_average, reduce)


implements("soft_margin_loss")(
    lambda input, target, reduction=1: soft_margin_loss(input, target, reduction=reduction)
)


@implements("F.cosine_embedding_loss")
def cosine_embedding_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """One minus the cosine for target 1, the cosine beyond the margin for target -1."""
    dim = np.ndim(target)
    a, b = together(input1, input2, dtype=float_type(input1, input2))
    tiny = 1e-12
    over = (dim,)
    product = lax.reduce_sum(lax.mul(a, b), over)
    sizes = (shifted(lax.reduce_sum(lax.square(x), over), tiny) for x in (a, b))
    cosine = lax.div(product, safe_root(lax.mul(*sizes)))
    zero, t = zeros_like(cosine), expand_to(target, np.shape(cosine))
    near = select(lax.eq(t, scalar(1, t)), lax.sub(scalar(1, cosine), cosine), zero)
    far = select(lax.eq(t, scalar(-1, t)), _hinge(shifted(cosine, -margin)), zero)
    return reduced(lax.add(near, far), reduction, size_average, reduce)


@implements("F.triplet_margin_loss")
def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2, eps: float = 1e-6, swap: bool = False,
    size_average: Any = None, reduce: Any = None, reduction: Any = "mean",
) -> Any:  # fmt: skip
    """How much nearer the negative is than the positive plus the margin."""
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = lax.min(far, pairwise_distance(positive, negative, p, eps))
    return reduced(_hinge(shifted(sub(near, far), margin)), reduction, size_average, reduce)


@implements("F.multi_margin_loss")
def multi_margin_loss(
    input: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None, size_average: Any = None,
    reduce: Any = None, reduction: Any = "mean",
) -> Any:  # fmt: skip
    """How far the other classes come within the margin of the target class."""
    x = input if np.ndim(input) == 2 else lax.reshape(input, (1, np.size(input)))
    require_range(target, "multi_margin_loss", 0, np.shape(x)[1])
    t = lax.reshape(target, (np.shape(x)[0], 1))
    own = expand_to(take_along(x, t, 1), np.shape(x))
    gap = lax.sub(shifted(x, margin), own)
    others = lax.ne(lax.broadcasted_iota(t.dtype, np.shape(x), 1), expand_to(t, np.shape(x)))
    open_gap = lax.bitwise_and(others, lax.gt(gap, scalar(0, gap)))
    loss = gap if p == 1 else lax.square(gap)
    if weight is not None:
        loss = lax.mul(
            loss,
            expand_to(
                lax.expand_dims(weight.at[lax.squeeze(t, (1,))].get(mode="clip"), (1,)), np.shape(x)
            ),
        )
    loss = mean(select(open_gap, loss, zeros_like(loss)), 1)
    return reduced(
        loss if np.ndim(input) == 2 else lax.squeeze(loss, (0,)), reduction, size_average, reduce
    )


@implements("F.multilabel_margin_loss")
def multilabel_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: Any = "mean"
) -> Any:
    """How far the other classes come within a margin of 1 of each of the labels, which stand before
    the first -1 of a row.

    torch's own decomposition counts the places after the -1 as labels of class 0.
    """
    classes = np.shape(input)[-1] if np.ndim(input) else 1
    x, t = (lax.reshape(a, (np.size(a) // classes, classes)) for a in (input, target))
    require_range(target, "multilabel_margin_loss", -1, classes)
    is_label = lax.cummin(lax.convert_element_type(lax.ge(t, scalar(0, t)), np.int32), 1)
    index = lax.broadcasted_iota(t.dtype, (len(x), classes, classes), 2)
    wide = lambda a, axis: expand_to(lax.expand_dims(a, (axis,)), index.shape)
    hot = lax.bitwise_and(lax.eq(wide(t, 2), index), lax.gt(wide(is_label, 2), np.int32(0)))
    one_hot = lax.convert_element_type(hot, x.dtype)
    own = lax.reduce_sum(lax.mul(one_hot, wide(x, 1)), (2,))
    gap = shifted(lax.sub(wide(x, 1), wide(own, 2)), 1)
    is_other = lax.bitwise_not(lax.reduce_or(hot, (1,)))
    counts = lax.bitwise_and(wide(is_other, 1), lax.gt(wide(is_label, 2), np.int32(0)))
    counts = lax.bitwise_and(counts, lax.gt(gap, scalar(0, gap)))
    loss = lax.reduce_sum(select(counts, gap, zeros_like(gap)), (1, 2))
    loss = lax.div(loss, scalar(classes, loss))
    loss = loss if np.ndim(input) == 2 else lax.squeeze(loss, (0,))
    return reduced(loss, reduction, size_average, reduce)


@implements("F.multilabel_soft_margin_loss")
def multilabel_soft_margin_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """Mean over classes of the binary cross-entropy of sigmoids."""
    loss = lax.neg(
        add(mul(target, logsigmoid(input)), mul(sub(1, target), logsigmoid(lax.neg(input))))
    )
    loss = mean(loss if weight is None else mul(loss, weight), -1)
    return reduced(loss, reduction, size_average, reduce)


# ---- likelihoods


@implements("F.poisson_nll_loss")
def poisson_nll_loss(
    input: Any, target: Any, log_input: bool = True, full: bool = False, size_average: Any = None, eps: float = 1e-8,
    reduce: Any = None, reduction: Any = "mean",
) -> Any:  # fmt: skip
    """Minus the log-likelihood of counts, without the constant term or with Stirling's formula for
    it.
    """
    input = cast(input, float_type(input))
    if log_input:
        loss = sub(lax.exp(input), mul(target, input))
    else:
        loss = sub(input, mul(target, lax.log(shifted(input, eps))))
    if full:
        target = cast(target, float_type(target))
        large = lax.gt(target, scalar(1, target))
        t = select(large, target, scalar(2, target))
        stirling = add(sub(mul(t, lax.log(t)), t), scaled(lax.log(scaled(t, 2 * math.pi)), 0.5))
        loss = add(loss, select(large, stirling, zeros_like(stirling)))
    return reduced(loss, reduction, size_average, reduce)


@implements("F.gaussian_nll_loss")
def gaussian_nll_loss(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: Any = "mean",
) -> Any:
    """Minus the log-likelihood of Gaussians with given variances."""
    variance = cast(var, dtype_of(input)) if isinstance(var, (int, float)) else var
    if np.ndim(variance) and np.ndim(variance) == np.ndim(input) - 1:
        variance = lax.expand_dims(variance, (np.ndim(variance),))
    variance = expand_to(variance, np.broadcast_shapes(np.shape(variance), np.shape(input)))
    # torch keeps the variance above eps without changing its gradient.
    lifted = lax.stop_gradient(lax.sub(lax.max(variance, scalar(eps, variance)), variance))
    variance = lax.add(variance, lifted)
    loss = scaled(
        add(lax.log(variance), lax.div(*together(lax.square(sub(input, target)), variance))), 0.5
    )
    return reduced(shifted(loss, 0.5 * math.log(2 * math.pi)) if full else loss, reduction)
