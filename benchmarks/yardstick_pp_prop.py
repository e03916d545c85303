"""Hand-written pp-prop for one torch-layout GRU with a linear readout, beside
`benchmarks.yardstick`, whose parts it uses.

With `r`, `z`, `n`, `m` and their `df_t` as there, and `alpha` the decay,

    f_t = alpha z_t f_(t-1) + (1 - alpha) df_t          one for each of r, z, n, m
    c_t = b_t f_(t-1) / (1 - alpha^(t-1))               b_t = dl_t/dh_(t-1)
    g   = sum of dl_t/dW (h fixed) + c_t (x) xbar_(t-1) xbar_t = alpha xbar_(t-1) + input_t; a bias has an input of 1

Blocks of K steps run one after the other. In each, the filter of the inputs acts on `c_t` instead:
`q_s` is the sum of `alpha^(t-s-1) c_t` over the later steps t of the block, and `q_0` meets what
`xbar` was before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.yardstick import (
    Gradients,
    Params,
    _factors,
    _forward,
    _in_blocks,
    _joined,
    _through_recurrence,
)
from etrace_bridge.lowering import jit


def _block(
    params: Params, carry: Any, x: Array, target: Array, *, steps: int, credit: str, alpha: float
) -> tuple[Any, Array]:
    """Run K of a sequence's `steps`: new state, filters, inputs' filters and sums; outputs."""
    h, filters, n, x_bar, h_bar, sums = carry
    size = x.shape[0]
    h_end, gates = _forward(params, h, x, False)
    h_new = jnp.concatenate([gates.h[1:], h_end[None]])
    outputs = h_new @ params["weight_out"].T + params["bias_out"]
    error = outputs - target
    d_out = error * (2 / (steps * error[0].size))
    c = d_out @ params["weight_out"]
    factors = _factors(gates)
    direct = [c * factor for factor in factors]
    b = c * gates.z
    if credit == "step":
        b += _through_recurrence(params["weight_hh"], [direct[0], direct[1], direct[3]])

    left = alpha ** np.arange(size + 1.0)
    norms = left * n + (1 - left)
    b *= jnp.where(norms[:-1] > 0, 1 / jnp.maximum(norms[:-1], 1e-9), 0).astype(b.dtype)[
        :, None, None
    ]

    def step(filters: list[Array], values: Any) -> tuple[list[Array], list[Array]]:
        b, z, dfs = values
        return [alpha * z * f + (1 - alpha) * df for f, df in zip(filters, dfs, strict=True)], [
            b * f for f in filters
        ]

    filters, credits = lax.scan(step, filters, (b, gates.z, list(factors)))
    ages = np.arange(size) - np.arange(size + 1)[:, None]
    spread = jnp.asarray(np.where(ages >= 0, alpha ** np.maximum(ages, 0.0), 0), b.dtype)
    later = [jnp.tensordot(spread, credit, 1) for credit in credits]
    cotangents = [d + q[1:] for d, q in zip(direct, later, strict=True)]
    first = [q[0] for q in later]

    def gradient(inputs: Array, before: Array, which: tuple[int, ...]) -> Array:
        now = jnp.einsum("kbi,kbg->ig", inputs, jnp.concatenate([cotangents[k] for k in which], -1))
        return now + before.T @ jnp.concatenate([first[k] for k in which], -1)

    bias = [
        q.sum((0, 1)) + q0.sum(0) * (n / (1 - alpha))
        for q, q0 in zip(cotangents, first, strict=True)
    ]
    added = {
        "weight_ih": gradient(x, x_bar, (0, 1, 2)),
        "weight_hh": gradient(gates.h, h_bar, (0, 1, 3)),
        "bias_ih": jnp.concatenate(bias[:3]),
        "bias_hh": jnp.concatenate([bias[0], bias[1], bias[3]]),
        "weight_out": jnp.einsum("kbo,kbh->oh", d_out, h_new),
        "bias_out": d_out.sum((0, 1)),
    }
    ages = jnp.asarray(left[size - 1 :: -1], b.dtype)
    x_bar, h_bar = (
        alpha**size * old + jnp.tensordot(ages, new, 1)
        for old, new in ((x_bar, x), (h_bar, gates.h))
    )
    return (h_end, filters, norms[-1], x_bar, h_bar, jax.tree.map(jnp.add, sums, added)), outputs


@partial(jit, static_argnames=("block", "credit", "alpha"))
def sequence_gradients(
    params: Params, h0: Array, xs: Array, targets: Array, *, block: int, credit: str, alpha: float
) -> tuple[Gradients, Array]:
    """Return the pp-prop gradients of a whole sequence and its outputs, in blocks that divide it
    evenly.
    """
    steps, batch, inputs = xs.shape
    turned = ("weight_ih", "weight_hh")
    sums = {
        name: jnp.zeros(value.shape[::-1] if name in turned else value.shape)
        for name, value in params.items()
    }
    start = (
        h0,
        [jnp.zeros_like(h0)] * 4,
        jnp.zeros(()),
        jnp.zeros((batch, inputs)),
        jnp.zeros_like(h0),
        sums,
    )
    run = partial(_block, params, steps=steps, credit=credit, alpha=alpha)
    carry, outputs = lax.scan(
        lambda carry, piece: run(carry, *piece), start, _in_blocks((xs, targets), steps // block)
    )
    return {name: g.T if name in turned else g for name, g in carry[-1].items()}, _joined(outputs)
