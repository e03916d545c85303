"""What low-rank RTRL has cut off: an estimate and a bound of the error that it makes.

Let `Δ_t` be the difference between the true influence `dh_t/dtheta` of one row and the one that the
rule keeps. With `C_t` what the rule cuts off at step t, which it knows, and `F_t = D_t + X_t`,

    Δ_t = F_t Δ_(t-1) + C_t,      error of the gradient = b_t · Δ_(t-1)

Two vectors per row follow the norms of the rows of `Δ`, given those of `C_t`, `c_t`:

    d_t = (|D_t| + |X_t|) d_(t-1) + c_t           at least the norms
    v_t = (D_t² + X_t²) v_(t-1) + c_t²            about their squares, if what is cut off at different steps
                                                  and hidden values points into unrelated directions

with `|·|` and `²` element by element, so `‖b_t Δ_(t-1)‖ ≤ |b_t| · d`, about `sqrt(b_t² · v)`. With
`hops=1`, `C_t` also has `X_t R_(t-1)`; the norms of `R`'s rows are known, so they are added to `d`
and `v` before `X_t`. (A bound by norms of matrices, `‖F‖ ‖Δ‖ + ‖C‖` with `‖F‖² ≤ ‖F‖_1 ‖F‖_∞`, is
never smaller.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from etrace_bridge.step.linearise import CoreLinear
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.unit_arrays import core_times
from etrace_bridge.step.units import Layout

Lost = dict[str, Any]  # "rows": d, "square": v, "rest": squared norms of R's rows; each (rows, n)


def nothing_lost(layout: Layout) -> Lost:
    """Before the first step."""
    rows = jnp.zeros((layout.rows, layout.size), layout.dtype)
    return {"rows": rows, "square": rows, "rest": rows}


def advance_lost(
    program: StepProgram,
    layout: Layout,
    core: CoreLinear,
    X: Any,
    lost: Lost,
    cut: Any,
    rest: Any,
    hops: int | None,
) -> Lost:
    """The vectors after a step.

    Args:
        program: the step.
        layout: its units.
        core: its linearised core.
        X: `F - D`, (rows, n, n).
        lost: the vectors before it.
        cut: squared norms of the rows of what was cut off, (rows, n).
        rest: the same of the new `R`, (rows, n).
        hops: as in the rule; with 1, `X` did not move the old `R`.
    """
    moved = lost["rows"] + jnp.sqrt(lost["rest"]) if hops else lost["rows"]
    variance = lost["square"] + lost["rest"] if hops else lost["square"]
    new = {
        "rows": _core(program, layout, core, jnp.abs, lost["rows"])
        + _apply(jnp.abs(X), moved)
        + jnp.sqrt(cut),
        "square": _core(program, layout, core, jnp.square, lost["square"])
        + _apply(X * X, variance)
        + cut,
        "rest": rest,
    }
    return {name: x.astype(layout.dtype) for name, x in new.items()}


def error_of_gradient(lost: Lost, b: Any) -> tuple[Any, Any]:
    """Squared estimate and bound of the error of `b · dh/dtheta`, for `b` (rows, n)."""
    return jnp.sum(b * b * lost["square"]), jnp.sum(jnp.abs(b) * lost["rows"])


def _apply(X: Any, v: Any) -> Any:
    return jnp.einsum("ejk,ek->ej", X, v)


def _core(program: StepProgram, layout: Layout, core: CoreLinear, fun: Any, v: Any) -> Any:
    """`fun(D) v` for v (rows, n)."""
    D = [[[None if x is None else fun(x) for x in row] for row in block] for block in core.D]
    return core_times(program, layout, replace(core, D=D), v, -1)
