"""Retraces a step so that the later passes meet plain equations only.

jit bodies are inlined, `cond` becomes a select of all branches, short scans are unrolled, and
broadcasting is made explicit. Calls with a custom derivative stay whole: inlining one would replace
its derivative by that of its body. Wherever a value computed from parameters alone meets data in an
element-wise or structural equation, it passes through an equation of its own (`copy` or
`broadcast_in_dim`), so that every contact is one equation.

Slices are moved up through element-wise equations, `split(x @ W + b)` becomes `split(x @ W) +
split(b)`: the product stays one matmul, and everything after it works gate by gate, which compiled
loops need to be fast. Likewise a value that comes from a contact is spread to many positions before
the element-wise equations, not after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from etrace_bridge._errors import CompilationError
from etrace_bridge._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bind_equation,
    copy_p,
    is_concrete,
    keep_source,
    make_jaxpr_closed,
    module_scope,
    remove_dead_equations,
    scan_sizes,
    user_line,
)
from etrace_bridge.compiler.aliases import is_alias, producers
from etrace_bridge.compiler.contacts import has_contact_rule
from etrace_bridge.compiler.diagnostics import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Path,
    show_path,
)
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.primitives import CUSTOM_DERIVATIVE, is_elementwise, is_structural
from etrace_bridge.compiler.rewrites import slices_to_splits
from etrace_bridge.compiler.sparse import dense_product, is_sparse_product

UNROLL_LIMIT = 16
# Braintrace's primitives: plain operations under a name of its own, whose `impl` says which
MARKED = "etp_"
_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_lin"}
)


@dataclass(eq=False)
class _Value:
    """A value with the parameters it depends on (`paths`) and whether data is part of it."""

    val: Any
    paths: frozenset[Path] = frozenset()
    is_data: bool = False
    spread_from: tuple[_Value, dict] | None = None  # the broadcast that made it
    maker: tuple[JaxprEqn, list[_Value]] | None = None  # the element-wise equation that made it
    from_product: bool = False  # made by a product with a weight, through element-wise equations
    contact: _Value | None = None
    slices: dict[tuple, _Value] = field(default_factory=dict)
    widths: dict[tuple, _Value] = field(default_factory=dict)

    @property
    def is_weight(self) -> bool:
        return bool(self.paths) and not self.is_data


class _Normaliser:
    def __init__(self, kept: set[Var]) -> None:
        self.records: list[CompilationRecord] = []
        self.kept = kept  # values of new states: what reads them must go on reading them

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[_Value]) -> list[_Value]:
        env: dict[Var, _Value] = {
            v: _Value(c) for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            if eqn.effects and not eqn.outvars:
                # Prints and run-time checks: they cannot run inside a select or a vmap over time
                continue
            with keep_source(eqn):
                results = self.equation(eqn, [read(v) for v in eqn.invars])
            for v, result in zip(eqn.outvars, results, strict=True):
                if v in self.kept and result.is_data:
                    result.maker = result.spread_from = None
                env[v] = result
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name in _INLINED:
            return self.run(_body(eqn).jaxpr, _body(eqn).consts, operands)
        if name.startswith(MARKED):
            return self.expand(lambda *args: eqn.primitive.impl(*args, **eqn.params), operands)
        if is_sparse_product(eqn, [v.val for v in operands]):
            first, *positions, last = operands
            fixed = [v.val for v in positions]
            return self.expand(
                lambda values, dense: dense_product(eqn, values, *fixed, dense), [first, last]
            )
        if name == "cond":
            return self.cond(eqn, operands)
        if name == "scan":
            return self.scan(eqn, operands)
        if name == "while":
            return self.while_loop(eqn, operands)
        if name == "scatter-add" and is_concrete(operands[1].val):
            return self.scatter_add(eqn, operands)
        if name == "optimization_barrier":
            return operands  # several values side by side, unchanged
        if (
            name == "slice"
            and operands[0].is_data
            and eqn.params["strides"] in (None, (1,) * np.ndim(operands[0].val))
        ):
            return [
                self.sliced(operands[0], eqn.params["start_indices"], eqn.params["limit_indices"])
            ]
        if name == "split" and operands[0].is_data:
            return self.split(operands[0], eqn.params["axis"], eqn.params["sizes"])
        if name == "broadcast_in_dim" and operands[0].from_product:
            return [self.widened(operands[0], dict(eqn.params))]
        if name in CUSTOM_DERIVATIVE or not is_elementwise(eqn):
            return self.bind(eqn, operands)
        shape = eqn.outvars[0].aval.shape
        return self.bind(eqn, [self.spread(v, shape) for v in operands])

    def expand(self, function: Callable, operands: list[_Value]) -> list[_Value]:
        """Return an equation of another library as the plain operations that it stands for."""
        body = make_jaxpr_closed(
            function, *(jax.ShapeDtypeStruct(np.shape(v.val), v.val.dtype) for v in operands)
        )
        return self.run(body.jaxpr, body.consts, operands)

    def bind(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        is_data = any(v.is_data for v in operands)
        given = operands
        if (
            is_data
            and (is_elementwise(eqn) or is_structural(eqn))
            and eqn.primitive.name not in ("gather", "dynamic_slice")
        ):
            operands = [self.contact(v) if v.is_weight else v for v in operands]
        paths = frozenset().union(*(v.paths for v in operands)) if operands else frozenset()
        vals = [v.val for v in operands]
        if not is_data and not paths and _is_index_arithmetic(eqn, vals):
            with jax.ensure_compile_time_eval():
                outs = [np.asarray(o) for o in bind_equation(eqn, vals)]
        elif eqn.primitive.name == "dynamic_slice" and all(is_concrete(v) for v in vals[1:]):
            outs = [_static_slice(vals[0], vals[1:], eqn.params["slice_sizes"])]
        else:
            outs = bind_equation(eqn, vals)
        results = [_Value(o, paths, is_data) for o in outs]
        if eqn.primitive.name == "broadcast_in_dim":
            results[0].spread_from = (operands[0], dict(eqn.params))
        if eqn.primitive.name == "reshape" and operands[0].from_product:
            results[0].spread_from = _as_broadcast(operands[0], eqn.outvars[0].aval.shape)
            results[0].from_product = results[0].spread_from is not None
        if is_data and is_elementwise(eqn):
            # The derivative of a custom call is traced for one shape: it cannot be applied to a
            # slice.
            if len(results) == 1 and eqn.primitive.name not in CUSTOM_DERIVATIVE:
                results[0].maker = (eqn, given)
            for r in results:
                r.from_product = any(v.from_product for v in operands)
        elif is_data and any(v.is_weight for v in operands) and has_contact_rule(eqn):
            results[0].from_product = True
        return results

    def sliced(self, v: _Value, start: Sequence[int], limit: Sequence[int]) -> _Value:
        """Return a slice, taken before the element-wise equations that made the value."""
        start, limit = tuple(int(i) for i in start), tuple(int(i) for i in limit)
        shape = np.shape(v.val)
        if start == (0,) * len(shape) and limit == shape:
            return v
        if (start, limit) not in v.slices:
            v.slices[start, limit] = self._slice(v, start, limit, shape)
        return v.slices[start, limit]

    def _slice(self, v: _Value, start: tuple, limit: tuple, shape: tuple) -> _Value:
        if v.maker is not None and v.is_data:
            eqn, operands = v.maker
            if all(np.shape(o.val) in ((), shape) for o in operands):
                parts = [self.sliced(o, start, limit) if np.ndim(o.val) else o for o in operands]
                with keep_source(eqn):
                    return self.bind(eqn, parts)[0]
        if v.spread_from is not None:
            source, params = v.spread_from
            dims = params["broadcast_dimensions"]
            full = [n == shape[d] for n, d in zip(np.shape(source.val), dims, strict=True)]
            low = [start[d] if f else 0 for d, f in zip(dims, full, strict=True)]
            high = [
                limit[d] if f else n
                for d, f, n in zip(dims, full, np.shape(source.val), strict=True)
            ]
            new_shape = tuple(b - a for a, b in zip(start, limit, strict=True))
            return self._broadcast(self.sliced(source, low, high), dict(params, shape=new_shape))
        return _Value(
            lax.slice(v.val, start, limit), v.paths, v.is_data, from_product=v.from_product
        )

    def split(self, v: _Value, axis: int, sizes: Sequence[int]) -> list[_Value]:
        shape, at, parts = np.shape(v.val), 0, []
        for size in sizes:
            start = [at if d == axis else 0 for d in range(len(shape))]
            limit = [at + int(size) if d == axis else n for d, n in enumerate(shape)]
            parts.append(self.sliced(v, start, limit))
            at += int(size)
        return parts

    def widened(self, v: _Value, params: dict) -> _Value:
        """Return a broadcast, done before the element-wise equations between a product with a
        weight and it.
        """
        key = (params["shape"], params["broadcast_dimensions"])
        if key not in v.widths:
            v.widths[key] = self._widen(v, params)
        return v.widths[key]

    def _widen(self, v: _Value, params: dict) -> _Value:
        if v.spread_from is not None:
            source, inner = v.spread_from
            return self.widened(source, _composed(inner, params))
        shape = np.shape(v.val)
        only_adds_axes = np.prod(shape) == np.prod(params["shape"])
        if (
            only_adds_axes
            or v.maker is None
            or any(np.shape(o.val) not in ((), shape) for o in v.maker[1])
        ):
            return self._broadcast(v, params)
        eqn, operands = v.maker
        parts = [
            self.widened(o, params) if np.ndim(o.val) or o.paths or o.is_data else o
            for o in operands
        ]
        with keep_source(eqn):
            return self.bind(eqn, parts)[0]

    def _broadcast(self, v: _Value, params: dict) -> _Value:
        if v.spread_from is not None:
            v, inner = v.spread_from
            params = _composed(inner, params)
        out = _Value(
            lax.broadcast_in_dim_p.bind(v.val, **params),
            v.paths,
            v.is_data,
            from_product=v.from_product,
        )
        out.spread_from = (v, params)
        return out

    def spread(self, v: _Value, shape: tuple[int, ...]) -> _Value:
        """Make implicit broadcasting explicit; constants stay scalars."""
        if np.shape(v.val) == shape or (not v.paths and not v.is_data and np.ndim(v.val) == 0):
            return v
        dims = tuple(range(len(shape) - np.ndim(v.val), len(shape)))
        params = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
        return self.widened(v, params) if v.from_product else self._broadcast(v, params)

    def contact(self, v: _Value) -> _Value:
        """Return the equation of its own through which a weight view meets data element by element."""
        if v.contact is None:
            if v.spread_from is not None:
                source, params = v.spread_from
                val = lax.broadcast_in_dim_p.bind(source.val, **params)
            else:
                val = copy_p.bind(v.val)
            v.contact = _Value(val, v.paths, is_data=True)
        return v.contact

    def scatter_add(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Return `x.at[i].add(u)` with fixed indices, none of them twice: `u` set among zeros, then
        a plain addition.
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
            x, updates = (self.contact(v) if v.is_weight else v for v in (x, updates))
        among = lax.scatter(
            lax.full_like(x.val, 0), indices.val, updates.val, p["dimension_numbers"], **options
        )
        return [_Value(lax.add(x.val, among), x.paths | updates.paths, is_data)]

    def cond(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        index, *rest = operands
        branches = eqn.params["branches"]
        outs = [self.run(b.jaxpr, b.consts, rest) for b in branches]
        self.record(
            DiagnosticKind.COND_CONVERTED,
            eqn,
            f"`cond` with {len(branches)} branches became a select",
        )
        if index.val.dtype == np.bool_:
            index = _Value(
                lax.convert_element_type(index.val, np.int32), index.paths, index.is_data
            )
        which = lax.clamp(np.int32(0), index.val.astype(np.int32), np.int32(len(branches) - 1))
        results = []
        for cases in zip(*outs, strict=True):
            shape = np.shape(cases[0].val)
            is_data = index.is_data or any(c.is_data for c in cases)
            if is_data:
                cases = [self.contact(c) if c.is_weight else c for c in cases]
            paths = index.paths.union(*(c.paths for c in cases))
            selector = lax.broadcast_in_dim(which, shape, ())
            picked = cases[0].val
            for i, case in enumerate(cases[1:], 1):
                picked = lax.select_n(lax.eq(selector, np.int32(i)), picked, case.val)
            results.append(_Value(picked, paths, is_data))
        return results

    def scan(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        p = eqn.params
        (n_consts, n_carry), length = scan_sizes(eqn), p["length"]
        if length > UNROLL_LIMIT:
            weights = sorted({show_path(path) for v in operands for path in v.paths if v.is_weight})
            note = (
                f", and the parameters {', '.join(weights)} inside it get no trace"
                if weights
                else ""
            )
            level = DiagnosticLevel.WARNING if weights else DiagnosticLevel.INFO
            self.record(
                DiagnosticKind.SCAN_OPAQUE,
                eqn,
                f"a scan of {length} steps stays one opaque node{note}",
                level,
            )
            return self.bind(eqn, operands)
        self.record(DiagnosticKind.SCAN_UNROLLED, eqn, f"a scan of {length} steps was unrolled")
        consts, carry, xs = (
            operands[:n_consts],
            operands[n_consts : n_consts + n_carry],
            operands[n_consts + n_carry :],
        )
        body = p["jaxpr"]
        stacks: list[list[_Value]] = []
        order = range(length - 1, -1, -1) if p["reverse"] else range(length)
        for i in order:
            x_i = [
                _Value(lax.index_in_dim(x.val, i, keepdims=False), x.paths, x.is_data) for x in xs
            ]
            outs = self.run(body.jaxpr, body.consts, [*consts, *carry, *x_i])
            carry = outs[:n_carry]
            stacks.append(outs[n_carry:])
        if p["reverse"]:
            stacks.reverse()
        return [*carry, *(self.stack(column) for column in zip(*stacks, strict=True))]

    def stack(self, values: Sequence[_Value]) -> _Value:
        is_data = any(v.is_data for v in values)
        if is_data:
            values = [self.contact(v) if v.is_weight else v for v in values]
        rows = [lax.expand_dims(v.val, (0,)) for v in values]
        return _Value(
            lax.concatenate(rows, 0), frozenset().union(*(v.paths for v in values)), is_data
        )

    def while_loop(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        weights = sorted({show_path(path) for v in operands for path in v.paths})
        if weights:
            raise CompilationError(
                f"The step has a `while` loop ({_where(eqn)}) that uses the parameter "
                f"`{weights[0]}`. The number of its rounds depends on data, so no gradient can "
                "pass through it. Use `jax.lax.scan` or a `fori_loop` with a fixed number of "
                "rounds, or compute what needs the parameter outside the loop."
            )
        self.record(
            DiagnosticKind.WHILE_OPAQUE,
            eqn,
            "a `while` loop stays one opaque node; no gradient passes through it",
        )
        stopped = [_Value(lax.stop_gradient(v.val), v.paths, v.is_data) for v in operands]
        return self.bind(eqn, stopped)

    def record(
        self, kind: DiagnosticKind, eqn: JaxprEqn, message: str, level=DiagnosticLevel.INFO
    ) -> None:
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
    worker = _Normaliser(_state_values(closed.jaxpr, new_states))

    def flat(*args: Any) -> list[Any]:
        values = [
            _Value(a, frozenset([p] if p else []), p is None)
            for a, p in zip(args, weight_paths, strict=True)
        ]
        return [v.val for v in worker.run(closed.jaxpr, closed.consts, values)]

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in closed.jaxpr.invars
    ]
    plain = make_jaxpr_closed(flat, *avals)
    plain = slices_to_splits(ClosedJaxpr(remove_dead_equations(plain.jaxpr), plain.consts))
    return plain, worker.records


def _as_broadcast(v: _Value, shape: tuple[int, ...]) -> tuple[_Value, dict] | None:
    """Return a reshape as a broadcast, if all it does is to add axes of size 1."""
    sizes, dims = list(np.shape(v.val)), []
    for d, n in enumerate(shape):
        if sizes and sizes[0] == n:
            dims.append(d)
            del sizes[0]
        elif n != 1:
            return None
    return (
        (v, {"shape": shape, "broadcast_dimensions": tuple(dims), "sharding": None})
        if not sizes
        else None
    )


def _composed(inner: dict, outer: dict) -> dict:
    """Return the parameters of one broadcast that does two."""
    dims = outer["broadcast_dimensions"]
    return dict(outer, broadcast_dimensions=tuple(dims[d] for d in inner["broadcast_dimensions"]))


def _state_values(jaxpr: Jaxpr, new_states: Sequence[Any]) -> set[Var]:
    """Return the variables, in the bodies of calls too, that are a new state or a rearrangement of
    one.
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
            found |= _state_values(
                _body(eqn).jaxpr, [_body(eqn).jaxpr.outvars[eqn.outvars.index(v)]]
            )
        elif is_alias(eqn):
            pending += variables(eqn.invars)
    return found


def _body(eqn: JaxprEqn) -> ClosedJaxpr:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def source_line(eqn: JaxprEqn) -> str:
    """Return the user's line an equation comes from; frames of the frameworks do not count."""
    return user_line(
        eqn,
        skip=(
            "/brainstate/",
            "/saiunit/",
            "/torch/",
            "/torch2jax/",
            "/etrace_bridge/",
            "/adapters/",
            "/jax/",
        ),
    )


def _where(eqn: JaxprEqn) -> str:
    return source_line(eqn) or module_scope(eqn) or "source line unknown"


def _is_index_arithmetic(eqn: JaxprEqn, vals: list[Any]) -> bool:
    # Folding floats would put large constants into the program; indices must be known to follow
    # positions.
    return (
        all(is_concrete(v) for v in vals)
        and all(
            np.issubdtype(v.aval.dtype, np.integer) or v.aval.dtype == np.bool_ for v in eqn.outvars
        )
        and not eqn.primitive.name.startswith(("random", "threefry", "rng"))
        and not eqn.effects
    )


def _static_slice(x: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    begin = [int(np.clip(int(s), 0, n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return lax.slice(x, begin, [b + k for b, k in zip(begin, sizes, strict=True)])
