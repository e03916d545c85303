"""Low-rank RTRL: D-RTRL's trace, and what crosses a product as a matrix of low rank per unit.

For unit i (`step.units`), with `theta_i` all weights that feed it, `e_i` the columns of its own
states and `eps_i` D-RTRL's trace,

    dh_t/dtheta_i = e_i eps_i,t + R_i,t,        R_i ≈ A_i E_i^T        (A_i: n × r, E_i: P_i × r)
    eps_i,t = D_t eps_i,t-1 + df_t ⊗ x_t                               (as in D-RTRL)
    R_i,t   = F_t R_i,t-1 + X_t e_i eps_i,t-1 + X_y,i,t ⊗ x_t,         cut to rank r
              (the best in the norm `sum_j w_j ‖row j‖²`; `rules.reach` has the weights `w_t`)
    g_t     = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · (e_i eps_i,t-1 + A_i E_i^T)

`F_t = dh_t/dh_(t-1)` is the Jacobian of the whole step over all n hidden values of all layers,
`D_t` its core and `X_t = F_t - D_t`; `X_y,i = dh_t/dy_i - e_i df_i` is how the new states depend,
beside the core, on what the weights of the unit make (`step.crossing`); `b_t = dl_t/dh_(t-1)`. The
terms of `R_i,t` are columns of `L` (n × q) and `Z` (P_i × q), with `q = r + states of the unit +
sums that feed it`; `rules.best_rank` cuts `L Z^T`. `hops=1` moves `R` by `D_t` in place of `F_t`:
it follows one product, and there is no cubic term. `rules.discarded` follows what is cut off.

Within a chunk the gradient is exact reverse mode, as in `DRTRL(credit="chunk")`; the past comes
from the memory before it. Rank 0 is that rule; rank n has `A_i = I` and is exact.

Memory: r·B·(n² + P), and D-RTRL's. Time per step: B·n² for `X` of one layer and r·B·n³ for `F A`,
and a few passes over r·B·P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._bytes import parse_bytes
from etrace_bridge._errors import InputError
from etrace_bridge.compiler.diagnostics import Path
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.rules.base import (
    APPROXIMATE,
    EXACT,
    Carry,
    Chunk,
    Promise,
    ReverseRule,
    register_rule,
)
from etrace_bridge.rules.discarded import advance_lost, error_of_gradient, nothing_lost
from etrace_bridge.rules.low_rank_memory import (
    advance_eps,
    cut_to_rank,
    family_ranks,
    gradient_norm_factor,
    new_family,
    reset_family,
    weight_gradients,
)
from etrace_bridge.rules.reach import advance_reach, no_reach
from etrace_bridge.step.crossing import Crossing, crossing_derivatives, crossing_sums
from etrace_bridge.step.forward import run_forward
from etrace_bridge.step.linearise import CoreLinear, linearise_core
from etrace_bridge.step.program import StepProgram, make_program
from etrace_bridge.step.steps import Steps, no_loss
from etrace_bridge.step.time import scan_time
from etrace_bridge.step.unit_arrays import (
    at_elements,
    contact_data,
    core_times,
    flat_rows,
    spread_features,
    take,
    to_view,
)
from etrace_bridge.step.units import Block, Family, Layout, find_layout

# "families": [{"A", "E", "eps"}], "lost": as in rules.discarded, "reach": as in rules.reach
Memory = dict[str, Any]


@register_rule
@dataclass(frozen=True)
class LowRankRTRL(ReverseRule):
    """Diagonal plus low rank.

    Attributes:
        rank: r; 0 is D-RTRL, the number of hidden values per batch element (or more) is exact.
        hops: None follows all products; 1 follows one.
        max_bytes: weights whose `A` and `E` do not fit into this, the largest first, keep D-RTRL's
            trace; a number or text such as `"500MB"`.
        trace_dtype: dtype in which factors and trace are stored, e.g. `"bfloat16"`; None keeps the
            states' dtype. Each step is computed in float32 at least.
    """

    rank: int = 1
    hops: int | None = None
    max_bytes: int | str = 2 * 10**9
    trace_dtype: str | None = None
    name: ClassVar[str] = "low_rank"
    follows_states: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0:
            raise InputError(f"`rank` is {self.rank!r}; it must be a whole number, 0 or more.")
        if self.hops not in (None, 1):
            raise InputError(f"`hops` is {self.hops!r}; it must be 1, or None for all.")
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "max_bytes"))

    def variants(self) -> Iterator[LowRankRTRL]:
        """Ranks from 16 down."""
        for rank in (16, 8, 4, 2, 1):
            yield replace(self, rank=rank)

    def init(self, program: StepProgram) -> Memory:
        layout = find_layout(program)
        ranks = family_ranks(layout, self.rank, int(self.max_bytes))
        families = [new_family(layout, f, r) for f, r in zip(layout.families, ranks, strict=True)]
        if self.trace_dtype is not None:
            families = jax.tree.map(lambda x: x.astype(self.trace_dtype), families)
        return {"families": families, "lost": nothing_lost(layout), "reach": no_reach(layout)}

    def unit_axes(self, program: StepProgram) -> Memory:
        """`A` lies with its units, so that `F A` of a unit needs no column of another one."""
        memory = jax.eval_shape(lambda: self.init(program))
        families = [{**jax.tree.map(lambda _: 2, f), "A": 3} for f in memory["families"]]
        return {**jax.tree.map(lambda _: 1, memory), "families": families}

    def past(self, program: StepProgram, theta, memory: Memory, h0) -> dict[int, Any]:
        """`b · (e eps + A E^T)`."""
        layout = find_layout(program)
        b = _widened(layout, flat_rows(layout, h0))
        found: list[tuple[Block, Any]] = []
        for family, old in zip(layout.families, _widened(layout, memory["families"]), strict=True):
            low = [jnp.einsum("ej,eju->eu", b, A).reshape(-1) for A in old["A"]]
            own = [take(b, np.maximum(n, 0), 1).reshape(-1) for n in family.states.T]
            own = [jnp.where(p >= 0, x, 0) for p, x in zip(family.positions.T, own, strict=True)]
            for block, E, eps in zip(family.blocks, old["E"], old["eps"], strict=True):
                terms = [*zip(low, E, strict=True), *zip(own, eps, strict=True)]
                if terms:
                    total = reduce(jnp.add, [at_elements(block, x) * col for x, col in terms])
                    found.append((block, to_view(block, total)))
        return weight_gradients(program, theta, found)

    def advance(
        self, program: StepProgram, theta, carry: Carry, data: Chunk, memory: Memory | None
    ) -> Memory:
        layout = find_layout(program)

        def step(state: Any, args: Any) -> tuple[Any, None]:
            hidden, other, memory = state
            return self._advance(program, layout, theta, hidden, other, memory, args), None

        start = list(carry.hidden), list(carry.other), memory or self.init(program)
        (_, _, new), _ = scan_time(step, start, list(data.args), data.args[0].shape[0])
        return new

    def _advance(
        self, program: StepProgram, layout: Layout, theta, hidden, other, memory: Memory, args
    ) -> tuple[Any, Any, Memory]:
        """One step: states and memory after it."""
        env, lead = program.weight_env(theta), [a[None] for a in args]
        forward = run_forward(program, env, hidden, other, lead)
        steps = Steps(program, theta, env, forward, lead, None, jnp.ones(1), no_loss)
        core = linearise_core(steps)
        start, saved = program.start_env(env, args, hidden, other), [s[0] for s in forward.saved]
        data = contact_data(program, layout, start, saved)
        across = crossing_derivatives(program, layout, core, start, saved)
        wide = partial(_widened, layout)
        across = Crossing(*wide(program.tuning.computed_once((across.X, across.of_sum))))
        core = CoreLinear(wide(core.D), replace(core.df, units=wide(core.df.units)))
        old = wide(memory)
        reach = advance_reach(program, layout, core, across.X, old["reach"])
        new, rest, cut = [], 0.0, 0.0
        for family, factors in zip(layout.families, old["families"], strict=True):
            L, Z = self._factors(program, layout, family, core, across, factors, data)
            rank = len(factors["A"])
            A, E, kept, lost = cut_to_rank(program, layout, family, L, Z, rank, 1 + reach)
            eps = advance_eps(program, family, core, factors["eps"], data)
            new.append({"A": A, "E": E, "eps": eps})
            rest, cut = rest + kept, cut + lost
        lost = advance_lost(program, layout, core, across.X, old["lost"], cut, rest, self.hops)
        found = {"families": new, "lost": lost, "reach": reach}
        after = jax.tree.map(lambda x, like: x.astype(like.dtype), found, memory)
        return forward.new_hidden, forward.new_other, after

    def _factors(
        self, program, layout: Layout, family: Family, core: CoreLinear, across: Crossing, old, data
    ) -> tuple[list[Any], list]:
        """Columns of `L` (1, rows, n, units per row), and `Z`: for each block its columns.

        A column of a block is (number, array), or (a number for each of its pieces, array).
        """
        moved = core_times(program, layout, core, old["A"])
        if self.hops is None and len(moved):
            moved = moved + jnp.einsum("ejk,reku->reju", across.X, old["A"])
        L = [moved[k : k + 1] for k in range(len(moved))]
        for source in family.states.T:  # X e
            column = take(across.X, np.maximum(source, 0), 2)[None]
            L.append(jnp.where(source >= 0, column, 0) if (source < 0).any() else column)
        of_sum = {}
        for (owner, summed), column in zip(crossing_sums(layout), across.of_sum, strict=True):
            if owner is family:
                of_sum[summed.var] = len(L)
                L.append(column[None])
        dtype, Z = old["A"].dtype, []
        L = [x.astype(dtype) for x in L]
        for block, E, eps in zip(family.blocks, old["E"], old["eps"], strict=True):
            columns: list[tuple[Any, Any]] = list(enumerate([*E, *eps]))
            numbers = [of_sum.get(summed.var) for summed, _ in block.pieces]
            if any(n is not None for n in numbers):
                columns.append((numbers, spread_features(block, data).astype(dtype)))
            Z.append(columns)
        return L, Z

    def discarded(self, program: StepProgram, memory: Memory | None, h0) -> Any:
        layout = find_layout(program)
        if self._rounds(layout):
            return None  # each step adds an error that `rules.discarded` does not follow
        b = flat_rows(layout, h0)
        if memory is None:
            return jnp.zeros(2, b.dtype)
        factor = gradient_norm_factor(program, layout)
        square, bound = error_of_gradient(memory["lost"], b)
        return jnp.stack(
            [square, bound * factor if factor < math.inf else jnp.full_like(bound, math.inf)]
        )

    def _rounds(self, layout: Layout) -> bool:
        """Whether the memory has fewer bits than the states."""
        stored = self.trace_dtype or layout.dtype
        return jnp.finfo(stored).bits < jnp.finfo(layout.dtype).bits

    def reset(self, program: StepProgram, memory: Memory, keep: Any) -> Memory:
        layout = find_layout(program)
        if layout.rows != keep.shape[0]:
            raise InputError(
                "The batch elements of this model depend on each other, so `low_rank` cannot reset "
                "single ones. Call `reset()` without a mask."
            )
        by_row = {"lost": memory["lost"], "reach": memory["reach"]}
        families = zip(layout.families, memory["families"], strict=True)
        return {
            "families": [reset_family(layout, f, old, keep) for f, old in families],
            **jax.tree.map(lambda x: x * keep[:, None].astype(x.dtype), by_row),
        }

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if length == 1 or chunk >= length:
            return Promise(EXACT, "exact credit inside the one chunk")
        if self.trace_dtype is not None and certificate.kind == "traced":
            return Promise(APPROXIMATE, f"factors and trace are stored as {self.trace_dtype}")
        if self.rank == 0 or certificate.exact:
            return Promise(EXACT if certificate.exact else APPROXIMATE, certificate.reason)
        return Promise(
            APPROXIMATE,
            f"keeps rank {self.rank} per unit of what d_rtrl drops; {certificate.reason}",
        )

    def promises(self, graph: ETraceGraph, length: int, chunk: int) -> dict[Path, Promise]:
        found = super().promises(graph, length, chunk)
        if not self.rank or length == 1 or chunk >= length:
            return found
        layout = find_layout(make_program(graph))
        ranks = family_ranks(layout, self.rank, int(self.max_bytes))
        for family, r in zip(layout.families, ranks, strict=True):
            for block in family.blocks if r == 0 else ():
                for path in block.contact.view.paths:
                    if found[path].kind == APPROXIMATE:
                        reason = graph.certificate()[path].reason
                        found[path] = Promise(
                            APPROXIMATE,
                            "as d_rtrl, since what it drops would take more than "
                            f"`max_bytes={self.max_bytes}`; {reason}",
                        )
        return found


def _widened(layout: Layout, tree: Any) -> Any:
    """Numbers to compute with: in the states' dtype, and in float32 at least."""
    dtype = jnp.float32 if jnp.finfo(layout.dtype).bits < 32 else layout.dtype
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)
