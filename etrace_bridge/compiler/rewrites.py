"""Rewrites a step in plain equations into a form that is better for traces and compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from etrace_bridge._jax_compat import ClosedJaxpr, JaxprEqn, Var, make_jaxpr_closed
from etrace_bridge.compiler.jaxpr import evaluate, read


def slices_to_splits(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replace slices that tile a value by one `split`.

    Its transpose is a concatenation and not a sum of pads.
    """
    jaxpr = closed.jaxpr
    slices: dict[Var, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "slice":
            slices.setdefault(eqn.invars[0], []).append(eqn)
    tilings = {v: t for v, eqns in slices.items() if (t := _tiling(v, eqns)) is not None}
    if not tilings:
        return closed
    parts: dict[Var, list[Any]] = {}

    def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        source = eqn.invars[0] if eqn.primitive.name == "slice" else None
        if source not in tilings:
            return None
        axis, starts, sizes = tilings[source]
        if source not in parts:
            parts[source] = list(lax.split(operands[0], sizes, axis))
        return [parts[source][starts.index(eqn.params["start_indices"][axis])]]

    return _rewritten(closed, on_equation)


def _tiling(v: Var, eqns: list[JaxprEqn]) -> tuple[int, list[int], list[int]] | None:
    """Return (axis, starts, sizes) if these slices tile the value along one axis."""
    shape = v.aval.shape
    bounds: dict[tuple[int, int], None] = {}
    axes = set()
    for eqn in eqns:
        low, high = eqn.params["start_indices"], eqn.params["limit_indices"]
        cut = [d for d, n in enumerate(shape) if high[d] - low[d] != n]
        if len(cut) != 1 or eqn.params["strides"] not in (None, (1,) * len(shape)):
            return None
        axes.add(cut[0])
        bounds[low[cut[0]], high[cut[0]]] = None
    if len(axes) != 1:
        return None
    axis, ordered = axes.pop(), sorted(bounds)
    ends = [0, *(b for _, b in ordered)]
    if [a for a, _ in ordered] != ends[:-1] or ends[-1] != shape[axis]:
        return None
    return axis, [a for a, _ in ordered], [b - a for a, b in ordered]


def _rewritten(
    closed: ClosedJaxpr, on_equation: Callable[[JaxprEqn, list[Any]], list[Any] | None]
) -> ClosedJaxpr:
    """Trace the step again, with another meaning for some equations."""
    jaxpr = closed.jaxpr

    def flat(*args: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        evaluate(jaxpr.eqns, env, on_equation)
        return [read(env, v) for v in jaxpr.outvars]

    return make_jaxpr_closed(
        flat,
        *(
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
            for v in jaxpr.invars
        ),
    )
