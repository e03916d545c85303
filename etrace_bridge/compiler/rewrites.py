"""Rewrites of a step that is already in plain equations: the same values, in a form that traces and XLA like better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from etrace_bridge._jax_compat import ClosedJaxpr, JaxprEqn, Var, bind_equation, make_jaxpr_closed
from etrace_bridge.compiler.contacts import has_contact_rule
from etrace_bridge.compiler.jaxpr import evaluate, read, variables


def slices_to_splits(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Slices that tile a value become one `split`, whose transpose is a concatenation and not a sum of pads."""
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
            parts[source] = lax.split(operands[0], sizes, axis)
        return [parts[source][starts.index(eqn.params["start_indices"][axis])]]

    return _rewritten(closed, on_equation)


def _tiling(v: Var, eqns: list[JaxprEqn]) -> tuple[int, list[int], list[int]] | None:
    """(axis, starts, sizes) if these slices tile the value along one axis."""
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


def read_spread_copies(closed: ClosedJaxpr, is_weight: Sequence[bool], is_new_state: Sequence[bool]) -> ClosedJaxpr:
    """A product that is spread over positions of a state has that spread copy as its only reader.

    A gate `g = x @ w` of shape `(B, 1)` feeds many positions, each value of its spread copy only one: the trace belongs to
    the copy. Whatever else reads `g`, an output for example, then reads the copy's first column, and all credit for `w`
    passes through the copy.

    Args:
        closed: the step.
        is_weight: for each input, whether it is a parameter.
        is_new_state: for each output, whether it is a new hidden state.
    """
    jaxpr = closed.jaxpr
    narrow = {spread.invars[0]: spread for spread in _spread_products(jaxpr, is_weight, is_new_state)}
    if not narrow:
        return closed
    copies: dict[int, Any] = {}

    def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if id(eqn) in copies:
            return [copies[id(eqn)]]
        spread = narrow.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if spread is None:
            return None
        (copies[id(spread)],) = bind_equation(spread, bind_equation(eqn, operands))
        return [_first_column(copies[id(spread)], spread)]

    return _rewritten(closed, on_equation)


def _spread_products(jaxpr, is_weight: Sequence[bool], is_new_state: Sequence[bool]) -> list[JaxprEqn]:
    """The broadcasts of a product with a weight that lead to a new state, where the product has other readers too."""
    data = {v for v, weight in zip(jaxpr.invars, is_weight, strict=True) if not weight}
    weights = {v for v, weight in zip(jaxpr.invars, is_weight, strict=True) if weight}
    products = set()
    readers: dict[Var, list[JaxprEqn | None]] = {}
    for eqn in jaxpr.eqns:
        operands = list(variables(eqn.invars))
        for v in operands:
            readers.setdefault(v, []).append(eqn)
        if any(v in data for v in operands):
            data.update(eqn.outvars)
            if has_contact_rule(eqn) and any(v in weights for v in operands):
                products.add(eqn.outvars[0])
        elif any(v in weights for v in operands):
            weights.update(eqn.outvars)
    for v in variables(jaxpr.outvars):
        readers.setdefault(v, []).append(None)
    reach = set(variables([v for v, new in zip(jaxpr.outvars, is_new_state, strict=True) if new]))
    for eqn in reversed(jaxpr.eqns):
        if any(v in reach for v in eqn.outvars):
            reach.update(variables(eqn.invars))
    found = []
    for y in products:
        spreads = [e for e in readers.get(y, ()) if e is not None and _widens(e)]
        if len(spreads) == 1 < len(readers[y]) and spreads[0].outvars[0] in reach:
            found.append(spreads[0])
    return found


def _widens(eqn: JaxprEqn) -> bool:
    shapes = (eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape) if eqn.primitive.name == "broadcast_in_dim" else ((), ())
    return math.prod(shapes[0]) < math.prod(shapes[1])


def _first_column(copy: Any, spread: JaxprEqn) -> Any:
    """The value that was spread, from its copy."""
    shape, dims = spread.invars[0].aval.shape, spread.params["broadcast_dimensions"]
    size = [shape[dims.index(d)] if d in dims else 1 for d in range(copy.ndim)]
    return lax.squeeze(lax.slice(copy, (0,) * copy.ndim, size), [d for d in range(copy.ndim) if d not in dims])


def _rewritten(closed: ClosedJaxpr, on_equation: Callable[[JaxprEqn, list[Any]], list[Any] | None]) -> ClosedJaxpr:
    """The step traced again, with another meaning for some equations."""
    jaxpr = closed.jaxpr

    def flat(*args: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        evaluate(jaxpr.eqns, env, on_equation)
        return [read(env, v) for v in jaxpr.outvars]

    return make_jaxpr_closed(flat, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in jaxpr.invars))
