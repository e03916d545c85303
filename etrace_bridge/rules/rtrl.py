"""Exact real-time recurrent learning, for any number of layers and groups.

    J_t = dh_t/dtheta = (dh_t/dh_(t-1)) J_(t-1) + dh_t/dtheta|_(h_(t-1) fixed)
    g_t = dl_t/dtheta|_(h_(t-1) fixed) + (dl_t/dh_(t-1)) J_(t-1)

`J` is the influence matrix of all N hidden values (batch included) over all weights that reach a
state. In chunks of K steps (Schmidhuber 1992) the gradient within the chunk comes by reverse mode,
the past by `(dL/dh_0) J_0`, and

    J_K = (dh_K/dh_0) J_0 + dh_K/dtheta

is formed once per chunk, which divides the cubic term by K.

Memory: N·P. Time per step: (N²·P + N·K·step)/K. Exact always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.reverse import scan_steps

Influence = list[list[Any]]  # [hidden leaf][weight]: (*leaf shape, *weight shape)


@register_rule
@dataclass(frozen=True)
class RTRL(ReverseRule):
    """Exact RTRL.

    Attributes:
        trace_dtype: dtype in which the influence matrix is stored, e.g. `"bfloat16"`; None: the
            wider one of each state's and weight's.
    """

    trace_dtype: str | None = None
    name: ClassVar[str] = "rtrl"
    follows_states: ClassVar[bool] = True

    def init(self, program: StepProgram) -> Influence:
        weights = [program.weight_vars[n].aval for n in reaching_weights(program)]
        hidden = [leaf.invar.aval for leaf in program.leaves]
        return [
            [jnp.zeros((*h.shape, *w.shape), self._stored(h, w)) for w in weights] for h in hidden
        ]

    def _stored(self, h: Any, w: Any) -> Any:
        return jnp.dtype(self.trace_dtype or jnp.promote_types(h.dtype, w.dtype))

    def past(self, program: StepProgram, theta, memory: Influence, h0) -> dict[int, Any]:
        """`(dL/dh_0) J_0`."""
        return {
            w: sum(_product(h, J[n], h.ndim) for h, J in zip(h0, memory, strict=True))
            for n, w in enumerate(reaching_weights(program))
        }

    def advance(
        self, program: StepProgram, theta, carry: Carry, data: Chunk, memory: Influence | None
    ) -> Influence:
        """`(dh_K/dh_0) J_0 + dh_K/dtheta`."""
        reaching, run = reaching_weights(program), chunk_function(program, theta, carry, data)
        rows = jax.jacrev(run, argnums=(0, 1))([theta[n] for n in reaching], list(carry.hidden))
        by_weight, by_hidden = [r[0] for r in rows], [r[1] for r in rows]

        def carried(i: int, n: int) -> Any:
            return sum(
                _product(by_hidden[i][j], J[n], carry.hidden[j].ndim)
                for j, J in enumerate(memory or ())
            )

        return [
            [
                (new + carried(i, n)).astype(self._stored(h, theta[reaching[n]]))
                for n, new in enumerate(row)
            ]
            for i, (h, row) in enumerate(zip(carry.hidden, by_weight, strict=True))
        ]

    def reset(self, program: StepProgram, memory: Influence, keep: Any) -> Influence:
        return [
            [J * keep.reshape(-1, *(1,) * (J.ndim - 1)).astype(J.dtype) for J in row]
            for row in memory
        ]

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        carried = [drop for drop in certificate.drops if drop.cut.primitive == "state"]
        if carried and chunk < length:
            return Promise(APPROXIMATE, f"drops {carried[0]} between chunks")
        if self.trace_dtype is not None and chunk < length:
            return Promise(APPROXIMATE, f"the influence matrix is stored as {self.trace_dtype}")
        return Promise(EXACT, "the whole influence on every hidden state is carried")


def _product(a: Any, J: Any, axes: int) -> Any:
    """`a · J`, in the wider of their dtypes."""
    wide = max(a.dtype, J.dtype, key=lambda dtype: jnp.finfo(dtype).bits)
    return jnp.tensordot(a.astype(wide), J.astype(wide), axes=axes)


def chunk_function(
    program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The hidden states after a chunk, as a function of the weights that reach a state and of the
    hidden states before it.
    """

    def run(some: Sequence[Any], hidden: Sequence[Any]) -> list[Any]:
        full = list(theta)
        for n, w in zip(reaching_weights(program), some, strict=True):
            full[n] = w
        return scan_steps(program, full, hidden, carry.other, data.args)[1]

    return run


def reaching_weights(program: StepProgram) -> list[int]:
    """Indices of the weights that reach a state."""
    certificates = program.graph.structure.certificates
    paths = program.graph.module_info.invar_to_weight_path
    return [
        n
        for n, v in enumerate(program.weight_vars)
        if certificates[paths[v]].kind in ("traced", "upstream")
    ]
