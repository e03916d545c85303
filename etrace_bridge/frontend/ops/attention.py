"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.activations import softmax
from etrace_bridge.frontend.ops.arrays import expand_to, scalar, select, zeros_like
from etrace_bridge.frontend.ops.linalg import matmul
from etrace_bridge.frontend.ops.mathematics import scaled
from etrace_bridge.frontend.ops.random import dropout
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import repeat_interleave, transpose


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
    factor = 1 / math.sqrt(np.shape(query)[-1]) if scale is None else scale
    scores = matmul(scaled(query, factor), transpose(key, -2, -1))
    shape = np.shape(scores)
    if is_causal:
        row, column = (lax.broadcasted_iota(np.int32, shape[-2:], k) for k in (0, 1))
        attn_mask = lax.ge(row, column)
    if attn_mask is not None and attn_mask.dtype == np.bool_:
        scores = select(attn_mask, scores, scalar(-math.inf, scores))
    elif attn_mask is not None:
        scores = lax.add(scores, expand_to(attn_mask, shape))
    if attn_mask is not None:
        # Keep rows without any admitted key away from the softmax, where they would be nan.
        blocked = lax.eq(lax.reduce_max(scores, (len(shape) - 1,)), scalar(-math.inf, scores))
        blocked = expand_to(lax.expand_dims(blocked, (len(shape) - 1,)), shape)
        weights = select(blocked, zeros_like(scores), softmax(select(blocked, zeros_like(scores), scores), -1))
    else:
        weights = softmax(scores, -1)
    return matmul(dropout(weights, dropout_p), value)


implements("_scaled_dot_product_flash_attention_for_cpu")(
    lambda query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None: (
        attend(query, key, value, attn_mask, dropout_p, is_causal, scale),
        zeros_like(query[..., 0]),
    )
)
