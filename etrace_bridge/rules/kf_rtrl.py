"""KF-RTRL: Kronecker-factored RTRL (Mujika et al. 2018), one column of inputs for all units.

For the sum `y` of some products (a gate's pre-activation) with inputs `x`, `dh_t/dtheta` is stored as
`A ⊗ u`, A: hidden values by units, u: like `x`, and is right in the mean:

    A_t = c1 ρ1 F_t A_(t-1) + c2 ρ2 dh_t/dy_t        u_t = (c1 / ρ1) u_(t-1) + (c2 / ρ2) x_t
    g_t = dl_t/dtheta |_(h_(t-1) fixed)  +  (b_t A_(t-1)) ⊗ u_(t-1)
    ρ1² = |u_(t-1)| / |F_t A_(t-1)|,                 ρ2² = |x_t| / |dh_t/dy_t|

`c1`, `c2` are random signs, drawn for every sum and step and shared by the batch; `F_t` is the
Jacobian of the whole step. Since only two terms are mixed, the noise is far below UORO's. A bias is
a column whose input is 1. Within a chunk the gradient is exact reverse mode; the factors move step
by step. `rules.noise` says where the signs come from.

Memory: B·(n·U + I) for each sum of U units and I inputs, n hidden values. Time per step: n vjps of
the step and B·n²·U for `F A`. Exact in the mean, not for a single draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge._errors import InputError
from etrace_bridge.rules.base import Carry, Chunk, register_rule
from etrace_bridge.rules.noise import Draws, after_draw, draw_key, no_draws, read_data
from etrace_bridge.rules.uoro import UORO, root_ratio
from etrace_bridge.step.influence import Influence, step_influence, weights_of_views
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.time import scan_time
from etrace_bridge.step.unit_arrays import at_elements, flat_rows, to_view
from etrace_bridge.step.units import Layout, Piece, Sum, find_layout, single_block

Factors = dict[str, Any]


@register_rule
@dataclass(frozen=True)
class KFRTRL(UORO):
    """Kronecker-factored RTRL.

    Attributes:
        seed: of the random signs.
    """

    name: ClassVar[str] = "kf_rtrl"

    def init(self, program: StepProgram) -> dict[str, Any]:
        """For each sum `A` (n, units) and, for each of its pieces, `u`; and the draws made."""
        layout = find_layout(program)
        factors = [
            {
                "A": jnp.zeros((layout.size, summed.var.aval.size), summed.var.aval.dtype),
                "u": [
                    jnp.zeros(
                        p.part.form.shape(self.letters(layout, summed, p)), summed.var.aval.dtype
                    )
                    for p in summed.pieces
                ],
            }
            for summed in find_sums(layout)
        ]
        return {"factors": factors, "draws": no_draws()}

    def past(self, program: StepProgram, theta, memory: dict[str, Any], h0) -> dict[int, jax.Array]:
        """Return `(b A) ⊗ u`."""
        layout, by_part = find_layout(program), {}
        flat = flat_rows(layout, h0)
        for summed, old in zip(find_sums(layout), memory["factors"], strict=True):
            by_row = old["A"].reshape(layout.size, layout.rows, -1)
            b = jnp.einsum("en,neu->eu", flat, by_row).reshape(-1)
            for piece, u in zip(summed.pieces, old["u"], strict=True):
                form = piece.part.form
                cotangent = at_elements(single_block(summed, piece), b).reshape(
                    form.shape(form.trace_out)
                )
                letters = self.letters(layout, summed, piece)
                spread = jnp.einsum(f"{form.trace_out},{letters}->{form.trace}", cotangent, u)
                by_part[piece.part.var] = to_view(single_block(summed, piece), spread)
        return weights_of_views(program, theta, by_part)

    def advance(
        self,
        program: StepProgram,
        theta,
        carry: Carry,
        data: Chunk,
        memory: dict[str, Any] | None,
    ) -> dict[str, Any]:
        layout = find_layout(program)

        def step(state: Any, args: Any) -> tuple[Any, None]:
            hidden, other, factors, draws = state
            draws = read_data(draws, theta, args)
            signs = self.pairs(layout, draws)
            made, hidden, other = step_influence(program, layout, theta, hidden, other, args)
            moved = zip(find_sums(layout), factors, signs, strict=True)
            factors = [self.move(layout, summed, made, old, c) for summed, old, c in moved]
            return (hidden, other, factors, after_draw(draws)), None

        old = memory or self.init(program)
        start = list(carry.hidden), list(carry.other), old["factors"], old["draws"]
        (*_, factors, draws), _ = scan_time(step, start, list(data.args), data.args[0].shape[0])
        return {"factors": factors, "draws": draws}

    def pairs(self, layout: Layout, draws: Draws) -> Any:
        """Return `c1` and `c2` of every sum, (sums, 2)."""
        shape = len(find_sums(layout)), 2
        return jax.random.rademacher(draw_key(self.seed, draws), shape, layout.dtype)

    def move(
        self, layout: Layout, summed: Sum, made: Influence, old: Factors, signs: jax.Array
    ) -> Factors:
        """Return the factors of one sum after a step."""
        A = old["A"].reshape(layout.size, layout.rows, -1)
        moved = jnp.einsum("ejk,keu->jeu", made.F, A).reshape(old["A"].shape)
        xs, G = self.features(layout, summed, made), made.G[summed.var]
        rho1, rho2 = root_ratio(old["u"], [moved]), root_ratio(xs, [G])
        c1, c2 = signs
        u = [c1 / rho1 * u + c2 / rho2 * x for u, x in zip(old["u"], xs, strict=True)]
        new = {"A": c1 * rho1 * moved + c2 * rho2 * G, "u": u}
        return jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)

    def letters(self, layout: Layout, summed: Sum, piece: Piece) -> str:
        """Return the letters of a piece's `u`: those of its features; none for a bias."""
        return piece.part.form.feature

    def features(self, layout: Layout, summed: Sum, made: Influence) -> list[Any]:
        """Return `x` of each piece, like `u`; for a bias 1."""
        found = []
        for piece in summed.pieces:
            form, x = piece.part.form, made.data.get(piece.contact.index)
            letters = self.letters(layout, summed, piece)
            ones = jnp.ones(form.shape(letters), piece.part.var.aval.dtype)
            if x is not None:
                terms = f"{letters},{form.feature}->{letters}"
                ones = jnp.einsum(terms, ones, form.features(x))
            found.append(ones)
        return found

    def reset(
        self, program: StepProgram, memory: dict[str, Any], keep: jax.Array
    ) -> dict[str, Any]:
        layout = find_layout(program)
        if layout.rows != keep.shape[0]:
            raise InputError(
                "The batch elements of this model depend on each other, so `kf_rtrl` cannot reset "
                "single ones. Call `reset()` without a mask."
            )
        units = [jnp.repeat(keep, old["A"].shape[1] // layout.rows) for old in memory["factors"]]
        pairs = zip(memory["factors"], units, strict=True)
        factors = [{**old, "A": old["A"] * mask.astype(old["A"].dtype)} for old, mask in pairs]
        return {**memory, "factors": factors}


def find_sums(layout: Layout) -> list[Sum]:
    """Return the sums of all families."""
    return [summed for family in layout.families for summed in family.sums]
