"""Exact real-time recurrent learning, for any number of layers and groups.

    J_t = dh_t/dtheta = (dh_t/dh_(t-1)) J_(t-1) + dh_t/dtheta|_(h_(t-1) fixed)
    g_t = dl_t/dtheta|_(h_(t-1) fixed) + (dl_t/dh_(t-1)) J_(t-1)

`J` is the influence matrix of all N hidden values (batch included) over all weights that reach a
state. In chunks of K steps (Schmidhuber 1992) the gradient within the chunk comes by reverse mode,
the past by `(dL/dh_0) J_0`, and

    J_K = (dh_K/dh_0) J_0 + dh_K/dtheta

is formed once per chunk, which divides the cubic term by K. Where batch elements do not mix,
`dh_K/dh_0` is one (n, n) block for each of B elements, and `dh_K/dtheta` is the sum over the steps
of `dh_K/dy_t ⊗ x_t`, with `y` what the weights make of the features `x`.

Memory: N·P, with N = B·n. Time per step: (B·n²·P + n·K·step)/K; a model that mixes batch elements
or uses weights in ways without a linear form has n = N and B = 1. Exact always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import common_dtype
from etrace_bridge.rules.base import (
    APPROXIMATE,
    EXACT,
    Carry,
    Chunk,
    Promise,
    ReverseRule,
    register_rule,
)
from etrace_bridge.step.influence import Influence, chunk_influence, weights_of_views
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.reverse import scan_steps
from etrace_bridge.step.unit_arrays import at_elements
from etrace_bridge.step.units import Block, Layout, find_layout, weight_unit_axes

Memory = list[list[Any]]  # [hidden leaf][weight]: (*leaf shape, *weight shape)


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

    def init(self, program: StepProgram) -> Memory:
        weights = [program.weight_vars[n].aval for n in reaching_weights(program)]
        hidden = [leaf.invar.aval for leaf in program.leaves]
        return [
            [jnp.zeros((*h.shape, *w.shape), self._stored(h, w)) for w in weights] for h in hidden
        ]

    def unit_axes(self, program: StepProgram) -> Memory:
        """Return the axes of weight units: an entry of `J` belongs to the unit of its weight.

        So `F J` of one unit needs no entry of another.
        """
        axes = weight_unit_axes(program)
        weights = [program.weight_vars[n] for n in reaching_weights(program)]
        return [[leaf.invar.aval.ndim + axes.get(w, 0) for w in weights] for leaf in program.leaves]

    def _stored(self, h: Any, w: Any) -> Any:
        return jnp.dtype(self.trace_dtype or common_dtype(h.dtype, w.dtype))

    def past(self, program: StepProgram, theta, memory: Memory, h0) -> dict[int, Any]:
        """Return `(dL/dh_0) J_0`."""
        return {
            w: sum(_past(h, J[n]) for h, J in zip(h0, memory, strict=True))
            for n, w in enumerate(reaching_weights(program))
        }

    def advance(
        self, program: StepProgram, theta, carry: Carry, data: Chunk, memory: Memory | None
    ) -> Memory:
        """Return `(dh_K/dh_0) J_0 + dh_K/dtheta`."""
        F, made = _advanced(program, theta, carry, data)
        weights = [theta[n] for n in reaching_weights(program)]

        def moved(i: int, n: int) -> Any:
            new = made[i][n]
            for f, J in zip(F[i], memory or (), strict=memory is not None):
                new = new + _product(f, J[n].reshape(*f.shape[::2], *weights[n].shape))
            return new

        return [
            [
                moved(i, n).astype(self._stored(h, w)).reshape(*h.shape, *w.shape)
                for n, w in enumerate(weights)
            ]
            for i, h in enumerate(carry.hidden)
        ]

    def reset(self, program: StepProgram, memory: Memory, keep: jax.Array) -> Memory:
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


def _past(h: jax.Array, J: jax.Array) -> jax.Array:
    """Return `h · J` over all hidden values, in the wider of their dtypes."""
    wide = _wider(h, J)
    return jnp.tensordot(h.astype(wide), J.astype(wide), axes=h.ndim)


def _product(F: jax.Array, J: jax.Array) -> jax.Array:
    """Return `F J` of every row, in the wider of their dtypes."""
    wide = _wider(F, J)
    return jnp.einsum("rij,rj...->ri...", F.astype(wide), J.astype(wide))


def _wider(a: jax.Array, b: jax.Array) -> np.dtype:
    return max(a.dtype, b.dtype, key=lambda dtype: jnp.finfo(dtype).bits)


def _advanced(
    program: StepProgram, theta: Sequence[jax.Array], carry: Carry, data: Chunk
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return `dh_K/dh_0` and `dh_K/dtheta`.

    They are [new leaf][old leaf]: (rows, values, values), and [leaf][weight]: (rows, values,
    *weight shape).
    """
    layout = find_layout(program)
    if not _has_rows(program, layout, data.args[0].shape[0]):
        return _by_reverse_mode(program, theta, carry, data)
    made, _, _ = chunk_influence(program, layout, theta, carry.hidden, carry.other, data.args)
    blocks = [block for family in layout.families for block in family.blocks]
    views = [_at_view(layout, block, made) for block in blocks]

    def weights(views: Sequence[jax.Array]) -> list[Any]:
        own = list(zip(blocks, views, strict=True))
        whole = {b.contact.index: v for b, v in own if b.form is b.contact.form}
        parts = {b.pieces[0][1].part.var: v for b, v in own if b.form is not b.contact.form}
        found = weights_of_views(program, theta, parts, whole)
        return [found[n] for n in reaching_weights(program)]

    # No weight reaches a state: there is nothing to map over.
    rows = jax.vmap(jax.vmap(weights))(views) if views else []
    ends = np.cumsum([h.size // layout.rows for h in carry.hidden])[:-1].tolist()
    F = [jnp.split(row, ends, axis=2) for row in jnp.split(made.F, ends, axis=1)]
    by_weight = [jnp.split(row, ends, axis=1) for row in rows]
    return F, [[weight[n] for weight in by_weight] for n in range(len(carry.hidden))]


def _has_rows(program: StepProgram, layout: Layout, steps: int) -> bool:
    """Return whether each batch element's influence follows from what the contacts make.

    That is so if all weights have a contact with a linear form, and no other state carries
    derivatives.
    """
    forms = [block.form for family in layout.families for block in family.blocks]
    by_other = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v, _ in program.other_vars)
    return (
        not layout.untraced
        and (steps == 1 or not by_other)
        and all(
            layout.rows == 1 or (f.sizes[f.row] == layout.rows and f.row not in f.view)
            for f in forms
        )
    )


def _at_view(layout: Layout, block: Block, made: Influence) -> jax.Array:
    """Return `sum of dh_K/dy_t ⊗ x_t` of a block over the steps: (rows, n, *shape of the view)."""
    form, x = block.form, made.data.get(block.contact.index)
    G = at_elements(block, [made.G[s.var] for s, _ in block.pieces])
    G = G.reshape(*G.shape[:2], *form.shape(form.trace_out))
    row = form.row if layout.rows > 1 else ""
    if x is None:
        found = jnp.einsum(f"NK{form.trace_out}->{row}N{form.view}", G)
    else:
        phi = jax.vmap(form.features)(x)
        terms = f"NK{form.trace_out},K{form.feature}->{row}N{form.view}"
        found = jnp.einsum(terms, G, phi.astype(G.dtype))
    return found if row else found[None]


def _by_reverse_mode(
    program: StepProgram, theta: Sequence[jax.Array], carry: Carry, data: Chunk
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the influence of any step, with all hidden values as one row.

    It takes one reverse pass for each of them.
    """
    reaching, run = reaching_weights(program), chunk_function(program, theta, carry, data)
    rows = jax.jacrev(run, argnums=(0, 1))([theta[n] for n in reaching], list(carry.hidden))
    pairs = list(zip(carry.hidden, rows, strict=True))
    F = [
        [by.reshape(1, h.size, g.size) for by, g in zip(row[1], carry.hidden, strict=True)]
        for h, row in pairs
    ]
    return F, [[by.reshape(1, h.size, *by.shape[h.ndim :]) for by in row[0]] for h, row in pairs]


def chunk_function(
    program: StepProgram, theta: Sequence[jax.Array], carry: Carry, data: Chunk
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """Return the hidden states after a chunk as a function.

    Its arguments are the weights that reach a state, and the hidden states before the chunk.
    """

    def run(some: Sequence[Any], hidden: Sequence[jax.Array]) -> list[Any]:
        full = list(theta)
        for n, w in zip(reaching_weights(program), some, strict=True):
            full[n] = w
        return list(scan_steps(program, full, hidden, carry.other, data.args)[1])

    return run


def reaching_weights(program: StepProgram) -> list[int]:
    """Return indices of the weights that reach a state."""
    certificates = program.graph.structure.certificates
    paths = program.graph.module_info.invar_to_weight_path
    return [
        n
        for n, v in enumerate(program.weight_vars)
        if certificates[paths[v]].kind in ("traced", "upstream")
    ]
