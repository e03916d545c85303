"""UORO: unbiased online recurrent optimisation (Tallec and Ollivier 2018), RTRL as one outer
product.

    J_t ≈ s_t ⊗ θ_t,                   E[s_t ⊗ θ_t] = J_t = F_t J_(t-1) + dh_t/dtheta
    s_t = ρ0 F_t s_(t-1) + ρ1 ν        θ_t = θ_(t-1) / ρ0 + (ν · dh_t/dtheta) / ρ1
    g_t = dl_t/dtheta |_(h_(t-1) fixed)  +  (dl_t/dh_(t-1) · s_(t-1)) θ_(t-1)
    ρ0² = |θ_(t-1)| / |F_t s_(t-1)|,   ρ1² = |ν · dh_t/dtheta| / |ν|

`ν` are random signs, one for each hidden value of the whole batch, so products of different terms
vanish in the mean: the gradient is noisy and has no bias. `F_t = dh_t/dh_(t-1)` of the whole step.
In chunks of K steps the gradient within the chunk is exact, and `F` and `dh/dtheta` are those of
the chunk: one draw of `ν` per chunk, and less noise the longer the chunk is.

The signs come from `seed`, from how many were drawn before, and from the data (`rules.noise`). The
same seed, weights and data give the same gradient, on any number of devices.

Memory: B·H + P, less than any trace. Time per step: one more reverse pass and one forward
derivative per chunk. Exact in the mean; a single gradient is not, unless one chunk covers the
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge.rules.base import (
    APPROXIMATE,
    EXACT,
    Carry,
    Chunk,
    Promise,
    ReverseRule,
    register_rule,
)
from etrace_bridge.rules.noise import Draws, after_draw, draw_key, no_draws, read_data
from etrace_bridge.rules.rtrl import chunk_function, reaching_weights
from etrace_bridge.step.program import StepProgram

SMALL = 1e-7  # keeps the factors finite where a norm is zero


@register_rule
@dataclass(frozen=True)
class UORO(ReverseRule):
    """RTRL as one random outer product.

    Attributes:
        seed: of the random signs.
    """

    seed: int = 0
    name: ClassVar[str] = "uoro"
    mixes_batch: ClassVar[bool] = True

    def init(self, program: StepProgram) -> dict[str, Any]:
        """Return `s` by hidden leaf, `theta` by weight, and the draws made.

        Only weights that reach a state have one.
        """
        weights = [program.weight_vars[n].aval for n in reaching_weights(program)]
        hidden = [leaf.invar.aval for leaf in program.leaves]
        return {
            "s": [jnp.zeros(h.shape, h.dtype) for h in hidden],
            "theta": [jnp.zeros(w.shape, w.dtype) for w in weights],
            "draws": no_draws(),
        }

    def past(self, program: StepProgram, theta, memory: dict[str, Any], h0) -> dict[int, jax.Array]:
        """Return `(dL/dh_0 · s) θ`."""
        factor = sum(jnp.vdot(h, s) for h, s in zip(h0, memory["s"], strict=True))
        pairs = zip(reaching_weights(program), memory["theta"], strict=True)
        return {n: factor.astype(row.dtype) * row for n, row in pairs}

    def advance(
        self,
        program: StepProgram,
        theta,
        carry: Carry,
        data: Chunk,
        memory: dict[str, Any] | None,
    ) -> dict[str, Any]:
        reaching, old = reaching_weights(program), memory or self.init(program)
        run = chunk_function(program, theta, carry, data)
        _, pull = jax.vjp(run, [theta[n] for n in reaching], list(carry.hidden))
        draws = read_data(old["draws"], theta, data.args)
        noise = self.signs(draws, carry.hidden)
        by_theta = pull(noise)[0]
        # Surrogate gradients have no forward mode: the transpose of the reverse pass is one.
        (moved,) = jax.linear_transpose(lambda h: pull(h)[1], noise)(old["s"])
        rho0 = root_ratio(old["theta"], moved)
        rho1 = root_ratio(by_theta, noise)
        s = [rho0 * m + rho1 * v for m, v in zip(moved, noise, strict=True)]
        rows = [x / rho0 + y / rho1 for x, y in zip(old["theta"], by_theta, strict=True)]
        new = {"s": s, "theta": rows, "draws": after_draw(draws)}
        return jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)

    def signs(self, draws: Draws, hidden: Sequence[jax.Array]) -> list[Any]:
        """Return `ν`, one array per hidden leaf."""
        keys = jax.random.split(draw_key(self.seed, draws), len(hidden))
        return [
            jax.random.rademacher(k, h.shape, h.dtype) for k, h in zip(keys, hidden, strict=True)
        ]

    def reset(
        self, program: StepProgram, memory: dict[str, Any], keep: jax.Array
    ) -> dict[str, Any]:
        s = [x * keep.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype) for x in memory["s"]]
        return {**memory, "s": s}

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        carried = [drop for drop in certificate.drops if drop.cut.primitive == "state"]
        if chunk >= length:
            return Promise(EXACT, "exact credit inside the one chunk")
        if carried:
            return Promise(APPROXIMATE, f"drops {carried[0]} between chunks; otherwise unbiased")
        return Promise(APPROXIMATE, "unbiased: random, and exact in the mean over seeds")


def root_ratio(left: Sequence[Any], right: Sequence[jax.Array]) -> jax.Array:
    """Return `sqrt(|left| / |right|)`."""
    return jnp.sqrt((_norm(left) + SMALL) / (_norm(right) + SMALL))


def _norm(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(x * x) for x in arrays))
