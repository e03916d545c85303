"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.activations import logsumexp, softmax
from etrace_bridge.frontend.ops.arrays import expand_to, scalar, select, zeros_like
from etrace_bridge.frontend.ops.joining import repeat_interleave
from etrace_bridge.frontend.ops.linalg import matmul
from etrace_bridge.frontend.ops.mathematics import scaled
from etrace_bridge.frontend.ops.random import dropout
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import transpose


@implements("scaled_dot_product_attention")
def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`softmax(query @ key.T * scale + mask) @ value`; a query that may attend to nothing gives 0."""
    if enable_gqa:
        times = np.shape(query)[-3] // np.shape(key)[-3]
        key, value = (repeat_interleave(x, times, -3) for x in (key, value))
    scores = _scores(query, key, attn_mask, is_causal, scale)
    if attn_mask is None:
        return matmul(dropout(softmax(scores, -1), dropout_p), value)
    # Keep rows without any admitted key away from the softmax, where they would be nan.
    last, zero = np.ndim(scores) - 1, zeros_like(scores)
    blocked = lax.eq(lax.reduce_max(scores, (last,)), scalar(-math.inf, scores))
    blocked = expand_to(lax.expand_dims(blocked, (last,)), np.shape(scores))
    weights = select(blocked, zero, softmax(select(blocked, zero, scores), -1))
    return matmul(dropout(weights, dropout_p), value)


def _scores(query: Any, key: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """Scaled products of queries and keys, with the mask added or -inf where it forbids."""
    factor = 1 / math.sqrt(np.shape(query)[-1]) if scale is None else scale
    scores = matmul(scaled(query, factor), transpose(key, -2, -1))
    if is_causal:
        row, column = (lax.broadcasted_iota(np.int32, np.shape(scores)[-2:], k) for k in (0, 1))
        mask = lax.ge(row, column)
    if mask is None:
        return scores
    if mask.dtype == np.bool_:
        return select(mask, scores, scalar(-math.inf, scores))
    return lax.add(scores, expand_to(mask, np.shape(scores)))


@implements("_scaled_dot_product_flash_attention_for_cpu")
def attend_with_normaliser(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention with the logarithm of the softmax's denominator."""
    scores = _scores(query, key, attn_mask, is_causal, scale)
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale), logsumexp(scores, -1)
