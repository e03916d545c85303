"""Retraces a step so that the later passes meet plain equations only.

jit bodies are inlined, control flow is removed (`control_flow`), broadcasting becomes explicit, and
slices and broadcasts move before element-wise equations (`moves`). Calls with a custom derivative
stay whole: inlining one would replace its derivative by that of its body. Wherever a value computed
from parameters alone meets data in an element-wise or structural equation, it first passes through
a `copy` or `broadcast_in_dim`, so that every contact is one equation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bind_equation,
    called_jaxpr,
    is_concrete,
    keep_source,
    make_jaxpr_closed,
    module_scope,
    remove_dead_equations,
)
from etrace_bridge.compiler.aliases import is_alias, producers
from etrace_bridge.compiler.contacts import has_contact_rule
from etrace_bridge.compiler.control_flow import cond, scan, while_loop
from etrace_bridge.compiler.diagnostics import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Path,
)
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.moves import (
    Value,
    as_broadcast,
    as_data,
    sliced,
    split,
    spread,
    widened,
)
from etrace_bridge.compiler.primitives import CUSTOM_DERIVATIVE, is_elementwise, is_structural
from etrace_bridge.compiler.rewrites import slices_to_splits
from etrace_bridge.compiler.source_line import source_line
from etrace_bridge.compiler.sparse import dense_product, is_sparse_product

# The beginning of the names of braintrace's primitives, whose `impl` is plain operations
MARKED = "etp_"
_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_lin"}
)


class Normaliser:
    """Runs a step's equations once more, and replaces some of them."""

    def __init__(self, new_states: set[Var]) -> None:
        self.records: list[CompilationRecord] = []
        self.new_states = new_states  # whatever reads these must still read them afterwards

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Run a jaxpr on values."""
        env: dict[Var, Value] = {v: Value(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            if eqn.effects and not eqn.outvars:
                # Prints and run-time checks: they cannot run inside a select or a vmap over time
                continue
            with keep_source(eqn):
                results = self.equation(eqn, [read(v) for v in eqn.invars])
            for v, result in zip(eqn.outvars, results, strict=True):
                if v in self.new_states and result.is_data:
                    result.maker = result.spread_from = None
                env[v] = result
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Run one equation, or the equations that replace it."""
        name = eqn.primitive.name
        if name in _INLINED:
            body = called_jaxpr(eqn)
            return self.run(body.jaxpr, body.consts, operands)
        if name.startswith(MARKED):
            return self.expand(lambda *args: eqn.primitive.impl(*args, **eqn.params), operands)
        if is_sparse_product(eqn, [v.val for v in operands]):
            values, second, third, dense = operands
            return self.expand(
                lambda x, y: dense_product(eqn, x, second.val, third.val, y), [values, dense]
            )
        if name == "cond":
            return cond(self, eqn, operands)
        if name == "scan":
            return scan(self, eqn, operands)
        if name == "while":
            return while_loop(self, eqn, operands)
        if name == "scatter-add" and is_concrete(operands[1].val):
            return self.scatter_add(eqn, operands)
        if name == "optimization_barrier":
            return operands  # several values side by side, unchanged
        if name == "slice" and operands[0].is_data and _is_contiguous(eqn):
            bounds = eqn.params["start_indices"], eqn.params["limit_indices"]
            return [sliced(self.bind, operands[0], *bounds)]
        if name == "split" and operands[0].is_data:
            return split(self.bind, operands[0], eqn.params["axis"], eqn.params["sizes"])
        if name == "broadcast_in_dim" and operands[0].from_product:
            return [widened(self.bind, operands[0], dict(eqn.params))]
        if name in CUSTOM_DERIVATIVE or not is_elementwise(eqn):
            return self.bind(eqn, operands)
        shape = eqn.outvars[0].aval.shape
        return self.bind(eqn, [spread(self.bind, v, shape) for v in operands])

    def expand(self, function: Callable, operands: list[Value]) -> list[Value]:
        """Run the plain operations that an equation of another library stands for."""
        body = make_jaxpr_closed(
            function, *(jax.ShapeDtypeStruct(np.shape(v.val), v.val.dtype) for v in operands)
        )
        return self.run(body.jaxpr, body.consts, operands)

    def bind(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Run an equation as it is, on weights as data where it joins them with data."""
        is_data, given = any(v.is_data for v in operands), operands
        aligned = is_elementwise(eqn) or is_structural(eqn)
        if is_data and aligned and eqn.primitive.name not in ("gather", "dynamic_slice"):
            operands = [as_data(v) if v.is_weight else v for v in operands]
        paths = frozenset().union(*(v.paths for v in operands)) if operands else frozenset()
        vals = [v.val for v in operands]
        if not is_data and not paths and _is_index_arithmetic(eqn, vals):
            with jax.ensure_compile_time_eval():
                outs = [np.asarray(o) for o in bind_equation(eqn, vals)]
        elif eqn.primitive.name == "dynamic_slice" and all(is_concrete(v) for v in vals[1:]):
            outs = [_static_slice(vals[0], vals[1:], eqn.params["slice_sizes"])]
        else:
            outs = bind_equation(eqn, vals)
        results = [Value(o, paths, is_data) for o in outs]
        _note_origin(eqn, given, operands, results)
        return results

    def scatter_add(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Run `x.at[i].add(u)` as a plain addition: `u` is set among zeros first.

        The indices are fixed; if one occurs twice, the equation stays as it is.
        """
        x, indices, updates = operands
        p = eqn.params
        options = {k: p[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
        with jax.ensure_compile_time_eval():
            zeros, ones = (np.full(np.shape(v.val), n, np.int32) for v, n in ((x, 0), (updates, 1)))
            times = np.asarray(
                lax.scatter_add(zeros, indices.val, ones, p["dimension_numbers"], **options)
            )
        if np.max(times, initial=0) > 1:
            return self.bind(eqn, operands)
        is_data = x.is_data or updates.is_data
        if is_data:
            x, updates = (as_data(v) if v.is_weight else v for v in (x, updates))
        among = lax.scatter(
            lax.full_like(x.val, 0), indices.val, updates.val, p["dimension_numbers"], **options
        )
        return [Value(lax.add(x.val, among), x.paths | updates.paths, is_data)]

    def record(
        self, kind: DiagnosticKind, eqn: JaxprEqn, message: str, level=DiagnosticLevel.INFO
    ) -> None:
        """Record a decision."""
        context = {"line": source_line(eqn), "module": module_scope(eqn)}
        self.records.append(
            CompilationRecord(kind, level, message, eqn.primitive.name, context=context)
        )


def normalise(
    closed: ClosedJaxpr, weight_paths: Sequence[Path | None], new_states: Sequence[Any] = ()
) -> tuple[ClosedJaxpr, list[CompilationRecord]]:
    """Retrace a step into plain equations.

    Args:
        closed: the step's jaxpr.
        weight_paths: for each input, the parameter it is a leaf of, or None for data.
        new_states: the jaxpr's outputs that are new hidden states.
    """
    normaliser = Normaliser(_state_values(closed.jaxpr, new_states))

    def flat(*args: Any) -> list[Any]:
        values = [
            Value(a, frozenset([p] if p else []), p is None)
            for a, p in zip(args, weight_paths, strict=True)
        ]
        return [v.val for v in normaliser.run(closed.jaxpr, closed.consts, values)]

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in closed.jaxpr.invars
    ]
    plain = make_jaxpr_closed(flat, *avals)
    plain = slices_to_splits(ClosedJaxpr(remove_dead_equations(plain.jaxpr), plain.consts))
    return plain, normaliser.records


def _state_values(jaxpr: Jaxpr, new_states: Sequence[Any]) -> set[Var]:
    """Return the variables that are a new state or a rearrangement of one.

    Those in the bodies of calls are included.
    """
    made_by = producers(jaxpr.eqns)
    found: set[Var] = set()
    pending = list(variables(new_states))
    while pending:
        v = pending.pop()
        eqn = made_by.get(v)
        if eqn is None or v in found:
            continue
        found.add(v)
        if eqn.primitive.name in _INLINED:
            body = called_jaxpr(eqn).jaxpr
            found |= _state_values(body, [body.outvars[eqn.outvars.index(v)]])
        elif is_alias(eqn):
            pending += variables(eqn.invars)
    return found


def _note_origin(
    eqn: JaxprEqn, given: list[Value], operands: list[Value], results: list[Value]
) -> None:
    """Note in the results what made them, for slices and broadcasts that move before it.

    Args:
        eqn: the equation.
        given: its operands.
        operands: the same, with weights as data.
        results: its results.
    """
    name, first = eqn.primitive.name, results[0] if results else None
    if first is None:
        return
    if name == "broadcast_in_dim":
        first.spread_from = (operands[0], dict(eqn.params))
    if name == "reshape" and operands[0].from_product:
        first.spread_from = as_broadcast(operands[0], eqn.outvars[0].aval.shape)
        first.from_product = first.spread_from is not None
    if not any(v.is_data for v in given):
        return
    if is_elementwise(eqn):
        # A custom derivative is traced for one shape, so it cannot be applied to a slice
        if len(results) == 1 and name not in CUSTOM_DERIVATIVE:
            first.maker = (eqn, given)
        for r in results:
            r.from_product = any(v.from_product for v in operands)
    elif any(v.is_weight for v in operands) and has_contact_rule(eqn):
        first.from_product = True


def _is_index_arithmetic(eqn: JaxprEqn, vals: list[Any]) -> bool:
    # Folding floats would put large constants into the program; indices must be known to follow
    # positions.
    """Return whether an equation computes integers from constants.

    Indices must be known to follow positions. Floats are not folded: that would put large constants
    into the program.
    """
    return (
        all(is_concrete(v) for v in vals)
        and all(
            np.issubdtype(v.aval.dtype, np.integer) or v.aval.dtype == np.bool_ for v in eqn.outvars
        )
        and not eqn.primitive.name.startswith(("random", "threefry", "rng"))
        and not eqn.effects
    )


def _is_contiguous(eqn: JaxprEqn) -> bool:
    return eqn.params["strides"] in (None, (1,) * len(eqn.outvars[0].aval.shape))


def _static_slice(x: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    begin = [int(np.clip(int(s), 0, n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return lax.slice(x, begin, [b + k for b, k in zip(begin, sizes, strict=True)])
