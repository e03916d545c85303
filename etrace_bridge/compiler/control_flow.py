"""Control flow in a step: `cond` becomes a select, short scans are unrolled.

A longer scan and a `while` loop stay one opaque equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax import lax

from etrace_bridge._errors import CompilationError
from etrace_bridge._jax_compat import JaxprEqn, scan_sizes
from etrace_bridge.compiler.diagnostics import DiagnosticKind, DiagnosticLevel, show_path
from etrace_bridge.compiler.moves import Value, as_data
from etrace_bridge.compiler.source_line import source_location

if TYPE_CHECKING:
    from etrace_bridge.compiler.normalise import Normaliser

UNROLL_LIMIT = 16


def cond(normaliser: Normaliser, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Run all branches and select the results of one."""
    index, *rest = operands
    branches = eqn.params["branches"]
    outs = [normaliser.run(b.jaxpr, b.consts, rest) for b in branches]
    normaliser.record(
        DiagnosticKind.COND_CONVERTED,
        eqn,
        f"`cond` with {len(branches)} branches became a select",
    )
    if index.val.dtype == np.bool_:
        index = Value(lax.convert_element_type(index.val, np.int32), index.paths, index.is_data)
    which = lax.clamp(np.int32(0), index.val.astype(np.int32), np.int32(len(branches) - 1))
    results = []
    for cases in zip(*outs, strict=True):
        shape = np.shape(cases[0].val)
        is_data = index.is_data or any(c.is_data for c in cases)
        if is_data:
            cases = [as_data(c) if c.is_weight else c for c in cases]
        paths = index.paths.union(*(c.paths for c in cases))
        selector = lax.broadcast_in_dim(which, shape, ())
        picked = cases[0].val
        for i, case in enumerate(cases[1:], 1):
            picked = lax.select_n(lax.eq(selector, np.int32(i)), picked, case.val)
        results.append(Value(picked, paths, is_data))
    return results


def scan(normaliser: Normaliser, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Run the body once per step, or leave a long scan as it is."""
    p = eqn.params
    (n_consts, n_carry), length = scan_sizes(eqn), p["length"]
    if length > UNROLL_LIMIT:
        weights = sorted({show_path(path) for v in operands for path in v.paths if v.is_weight})
        note = (
            f", and the parameters {', '.join(weights)} inside it get no trace" if weights else ""
        )
        level = DiagnosticLevel.WARNING if weights else DiagnosticLevel.INFO
        normaliser.record(
            DiagnosticKind.SCAN_OPAQUE,
            eqn,
            f"a scan of {length} steps stays one opaque node{note}",
            level,
        )
        return normaliser.bind(eqn, operands)
    normaliser.record(DiagnosticKind.SCAN_UNROLLED, eqn, f"a scan of {length} steps was unrolled")
    consts = operands[:n_consts]
    carry = operands[n_consts : n_consts + n_carry]
    xs = operands[n_consts + n_carry :]
    body = p["jaxpr"]
    stacks: list[list[Value]] = []
    order = range(length - 1, -1, -1) if p["reverse"] else range(length)
    for i in order:
        x_i = [Value(lax.index_in_dim(x.val, i, keepdims=False), x.paths, x.is_data) for x in xs]
        outs = normaliser.run(body.jaxpr, body.consts, [*consts, *carry, *x_i])
        carry = outs[:n_carry]
        stacks.append(outs[n_carry:])
    if p["reverse"]:
        stacks.reverse()
    return [*carry, *(_stack(column) for column in zip(*stacks, strict=True))]


def while_loop(normaliser: Normaliser, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Leave the loop as it is, without derivatives; raise if it uses a parameter."""
    weights = sorted({show_path(path) for v in operands for path in v.paths})
    if weights:
        raise CompilationError(
            f"The step has a `while` loop ({source_location(eqn)}) that uses the parameter "
            f"`{weights[0]}`. The number of its rounds depends on data, so no gradient can "
            "pass through it. Use `jax.lax.scan` or a `fori_loop` with a fixed number of "
            "rounds, or compute what needs the parameter outside the loop."
        )
    normaliser.record(
        DiagnosticKind.WHILE_OPAQUE,
        eqn,
        "a `while` loop stays one opaque node; no gradient passes through it",
    )
    stopped = [Value(lax.stop_gradient(v.val), v.paths, v.is_data) for v in operands]
    return normaliser.bind(eqn, stopped)


def _stack(values: Sequence[Value]) -> Value:
    """Stack values along a new first axis."""
    is_data = any(v.is_data for v in values)
    if is_data:
        values = [as_data(v) if v.is_weight else v for v in values]
    rows = [lax.expand_dims(v.val, (0,)) for v in values]
    return Value(lax.concatenate(rows, 0), frozenset().union(*(v.paths for v in values)), is_data)
