"""Exact real-time recurrent learning, for any number of layers and groups.

    J_t = dh_t/dtheta = (dh_t/dh_(t-1)) J_(t-1) + dh_t/dtheta|_(h_(t-1) fixed)
    g_t = dl_t/dtheta|_(h_(t-1) fixed) + (dl_t/dh_(t-1)) J_(t-1)

`J` is the influence matrix of all N hidden values (batch included) over all weights that reach a state. In chunks of
K steps (Schmidhuber 1992) the gradient within the chunk comes by reverse mode, the past by `(dL/dh_0) J_0`, and

    J_K = (dh_K/dh_0) J_0 + dh_K/dtheta

is formed once a chunk, which divides the cubic term by K.

Memory: N·P. Time a step: (N²·P + N·K·step)/K. Exact always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge.engine.chunk_bptt import chunk_gradient, scan_steps
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, register_rule

Influence = list[list[Any]]  # [hidden leaf][weight]: (*leaf shape, *weight shape)


@register_rule
@dataclass(frozen=True)
class RTRL(Rule):
    """Exact RTRL."""

    name: ClassVar[str] = "rtrl"

    def init(self, program: StepProgram) -> Influence:
        weights = [program.weight_vars[n] for n in _reaching(program)]
        return [[jnp.zeros((*leaf.invar.aval.shape, *w.aval.shape), leaf.invar.aval.dtype) for w in weights] for leaf in program.leaves]

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        reaching = _reaching(program)
        grads = losses = None
        if data.loss is None:
            outputs, hidden, other = scan_steps(program, theta, carry.hidden, carry.other, data.args)
        else:
            found = chunk_gradient(program, theta, carry, data)
            grads, losses, outputs = list(found.grads), found.losses, found.outputs
            hidden, other = found.hidden, found.other
            if not fresh:
                for n, w in enumerate(reaching):
                    for h0, J in zip(found.h0, carry.trace, strict=True):
                        grads[w] = grads[w] + jnp.tensordot(h0, J[n], axes=h0.ndim)
        trace = carry.trace if final else self._advance(program, theta, carry, data, reaching, fresh)
        return ChunkResult(grads, losses, outputs, Carry(hidden, other, trace))

    def _advance(self, program, theta, carry: Carry, data: Chunk, reaching, fresh: bool) -> Influence:
        def run(some: Sequence[Any], hidden: Sequence[Any]) -> list[Any]:
            full = list(theta)
            for n, w in zip(reaching, some, strict=True):
                full[n] = w
            return scan_steps(program, full, hidden, carry.other, data.args)[1]

        rows = jax.jacrev(run, argnums=(0, 1))([theta[n] for n in reaching], list(carry.hidden))
        by_weight, by_hidden = [r[0] for r in rows], [r[1] for r in rows]
        if fresh:
            return by_weight
        return [
            [
                new + sum(jnp.tensordot(by_hidden[i][j], carry.trace[j][n], axes=carry.hidden[j].ndim) for j in range(len(carry.hidden)))
                for n, new in enumerate(row)
            ]
            for i, row in enumerate(by_weight)
        ]

    def reset(self, program: StepProgram, trace: Influence, keep: Any) -> Influence:
        return [[J * keep.reshape(-1, *(1,) * (J.ndim - 1)).astype(J.dtype) for J in row] for row in trace]


def _reaching(program: StepProgram) -> list[int]:
    """Places of the weights that reach a state."""
    certificates = program.graph.structure.certificates
    paths = program.graph.module_info.invar_to_weight_path
    return [n for n, v in enumerate(program.weight_vars) if certificates[paths[v]].kind in ("traced", "upstream")]
