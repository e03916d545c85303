"""Base of rules that carry some entries of the influence matrix exactly.

For unit i (`step.units`), with `theta_i` all weights that feed it and `S_i` a set of hidden values,

    J_i,t = dh_t/dtheta_i restricted to S_i  =  F_t[S_i, S_i] J_i,t-1 + (dh_t/dy_i)[S_i] ⊗ x_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t[S_i] · J_i,t-1

`F_t = dh_t/dh_(t-1)` is the Jacobian of the whole step over all n hidden values of a batch element,
`y_i` what the weights make, `x_t` their features. A rule says what `S_i` is. Within a chunk the
gradient is exact reverse mode; what came before it comes from `J`.

Memory: m·B·P, with m the size of the largest set. Time per step: n vjps of the step and m²·B·P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.diagnostics import Path
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.rules.base import APPROXIMATE, EXACT, Carry, Chunk, Promise, ReverseRule
from etrace_bridge.step.connectivity import family_reach, step_connectivity
from etrace_bridge.step.influence import Influence, step_influence, weights_of_views
from etrace_bridge.step.program import StepProgram, make_program
from etrace_bridge.step.time import scan_time
from etrace_bridge.step.unit_arrays import at_elements, flat_rows, spread_features, take
from etrace_bridge.step.units import Family, Layout, Piece, Sum, find_layout, single_block

Memory = list[list[Any]]  # [family][piece]: (m, *shape of the trace)


@dataclass(frozen=True)
class SparseInfluence(ReverseRule):
    """Influence of each unit on a set of hidden values.

    Attributes:
        trace_dtype: dtype in which the influence is stored, e.g. `"bfloat16"`; None: that of what
            the weights make.
    """

    trace_dtype: str | None = field(default=None, kw_only=True)

    def sets(self, program: StepProgram, layout: Layout) -> list[np.ndarray]:
        """Return `S_i` for each family: numbers of hidden values (units of a row, m), -1 for none."""
        raise InputError(
            f"The rule `{type(self).__name__}` does not define `sets(...)`, the "
            "hidden values that each unit follows. Define it."
        )

    def init(self, program: StepProgram) -> Memory:
        layout, memory = find_layout(program), []
        for family, S in zip(layout.families, self.sets(program, layout), strict=True):
            forms = [piece.part.form for _, piece in family.pieces]
            dtype = jnp.dtype(self.trace_dtype or family.sums[0].var.aval.dtype)
            memory.append([jnp.zeros((S.shape[1], *f.shape(f.trace)), dtype) for f in forms])
        return memory

    def past(self, program: StepProgram, theta, memory: Memory, h0) -> dict[int, jax.Array]:
        layout, by_part = find_layout(program), {}
        flat = flat_rows(layout, h0)
        for family, S, old in zip(layout.families, self.sets(program, layout), memory, strict=True):
            if not S.shape[1]:
                continue
            for (summed, piece), J in zip(family.pieces, old, strict=True):
                form, (sets, letters) = piece.part.form, _sets_at(family, S, summed, piece)
                b = jnp.where(sets >= 0, flat[:, np.maximum(sets, 0)], 0)
                b = b.reshape(*form.shape(letters), -1)
                terms = f"{letters}N,N{form.trace}->{form.view}"
                by_part[piece.part.var] = jnp.einsum(terms, b, J.astype(b.dtype))
        return weights_of_views(program, theta, by_part)

    def advance(
        self, program: StepProgram, theta, carry: Carry, data: Chunk, memory: Memory | None
    ) -> Memory:
        layout = find_layout(program)
        sets = self.sets(program, layout)

        def step(state: Any, args: Any) -> tuple[Any, None]:
            hidden, other, memory = state
            made, hidden, other = step_influence(program, layout, theta, hidden, other, args)
            moved = zip(layout.families, sets, memory, strict=True)
            return (hidden, other, [_move(family, S, made, old) for family, S, old in moved]), None

        start = list(carry.hidden), list(carry.other), memory or self.init(program)
        (_, _, new), _ = scan_time(step, start, list(data.args), data.args[0].shape[0])
        return new

    def reset(self, program: StepProgram, memory: Memory, keep: jax.Array) -> Memory:
        layout = find_layout(program)
        if layout.rows != keep.shape[0]:
            raise InputError(
                f"The batch elements of this model depend on each other, so `{self.name}` cannot "
                "reset single ones. Call `reset()` without a mask."
            )
        new = []
        for family, old in zip(layout.families, memory, strict=True):
            units = jnp.repeat(keep, family.units // layout.rows)
            pairs = zip(family.pieces, old, strict=True)
            new.append(
                [J * at_elements(single_block(s, p), units).astype(J.dtype) for (s, p), J in pairs]
            )
        return new

    @property
    def dropped(self) -> str:
        """What is left out where the sets are too small, for people."""
        return "some of the influence is dropped"

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        carried = [drop for drop in certificate.drops if drop.cut.primitive == "state"]
        if carried and chunk < length:
            return Promise(APPROXIMATE, f"drops {carried[0]} between chunks")
        if self.trace_dtype is not None and chunk < length:
            return Promise(APPROXIMATE, f"the influence is stored as {self.trace_dtype}")
        return Promise(EXACT, "the whole influence on every hidden state is carried")

    def promises(self, graph: ETraceGraph, length: int, chunk: int) -> dict[Path, Promise]:
        """Exact where a unit reaches nothing outside its set, however long it takes."""
        found = super().promises(graph, length, chunk)
        if chunk >= length:
            return found
        program, certificates = make_program(graph), graph.certificate()
        for path in self._open_paths(program):
            if found[path].kind == EXACT and not certificates[path].exact:
                reason = f"{self.dropped}; {certificates[path].reason}"
                found[path] = Promise(APPROXIMATE, reason)
        return found

    def _open_paths(self, program: StepProgram) -> set[Path]:
        """Return parameters of units that reach something outside their set."""
        layout, paths = find_layout(program), set()
        F, by_sum = step_connectivity(program, layout)
        for family, S in zip(layout.families, self.sets(program, layout), strict=True):
            inside = np.zeros((len(S), layout.size + 1), bool)
            np.put_along_axis(inside, np.where(S >= 0, S, layout.size), True, 1)
            inside = inside[:, : layout.size]
            reached = family_reach(family, by_sum, layout.size) | (inside @ F.T)
            if (reached & ~inside).any():
                paths.update(p for _, piece in family.pieces for p in piece.contact.view.paths)
        return paths


def _sets_at(family: Family, S: np.ndarray, summed: Sum, piece: Piece) -> tuple[np.ndarray, str]:
    """Return the sets of a piece's elements in a row, (elements, m), and the elements' letters.

    Where all units have the same set, it is one set, and only the letter of the row.
    """
    form, rows = piece.part.form, family.rows
    has_row = rows == 1 or form.sizes[form.row] == rows
    if has_row and (S[:1] == S).all():
        return S[:1], "" if rows == 1 else form.row
    return S[summed.unit[: len(summed.unit) // rows]], form.out


def _move(family: Family, S: np.ndarray, made: Influence, old: Sequence[jax.Array]) -> list[Any]:
    """Return `F[S, S] J + G[S] ⊗ x` of a family's pieces.

    Batch and units stay axes of their own, so that a mesh that divides them moves no influence.
    """
    m = S.shape[1]
    if not m:
        return list(old)
    new = []
    for (summed, piece), J in zip(family.pieces, old, strict=True):
        form, (sets, letters) = piece.part.form, _sets_at(family, S, summed, piece)
        at, real = np.maximum(sets, 0), sets >= 0
        F = made.F[:, at[:, :, None], at[:, None, :]]  # (rows, elements of a row, m, m)
        F = jnp.where(real[:, :, None] & real[:, None, :], F, 0)
        F = F.reshape(*form.shape(letters), m, m)
        moved = jnp.einsum(f"{letters}NM,M{form.trace}->N{form.trace}", F, J.astype(F.dtype))
        G = take(made.G[summed.var], summed.unit, 1)
        G = G.reshape(len(G), family.rows, -1)  # (n, rows, elements of a row)
        if len(sets) == 1:
            G = take(G, at[0], 0)
        else:
            G = jnp.take_along_axis(G, np.broadcast_to(at.T[:, None], (m, *G.shape[1:])), axis=0)
        G = jnp.where(real.T[:, None], G, 0).reshape(m, *form.shape(form.out))
        x = spread_features(single_block(summed, piece), made.data)
        terms = f"N{form.out},{form.trace}->N{form.trace}"
        new.append((moved + jnp.einsum(terms, G, x)).astype(J.dtype))
    return new
