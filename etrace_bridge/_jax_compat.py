"""The only file that touches JAX internals; everything else imports these names from here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.interpreters import partial_eval
from jax._src.lax.lax import copy_p
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

__all__ = [
    "Atom",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Var",
    "bind_equation",
    "called_jaxpr",
    "common_dtype",
    "copy_p",
    "evaluate_jaxpr",
    "is_concrete",
    "keep_source",
    "make_jaxpr_closed",
    "module_scope",
    "outputs_of",
    "remove_dead_equations",
    "same_trace",
    "scan_sizes",
    "sub_jaxpr",
    "user_line",
]

Atom = Var | Literal  # an operand of an equation


def bind_equation(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply an equation's primitive to operands; always returns a list."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def common_dtype(*dtypes: Any) -> Any:
    """Return the dtype that holds all of these, also where a user has forbidden promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.numpy.result_type(*dtypes)


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the jaxpr that a call (of `jit`, `custom_jvp_call`, …) runs."""
    inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def outputs_of(jaxpr: Jaxpr, variable: Var) -> list[int]:
    """Which outputs depend on an input."""
    position, count = jaxpr.invars.index(variable), len(jaxpr.outvars)
    return [
        n
        for n in range(count)
        if partial_eval.dce_jaxpr(jaxpr, [k == n for k in range(count)])[1][position]
    ]


def evaluate_jaxpr(closed: ClosedJaxpr, *values: Any) -> list[Any]:
    """Run a jaxpr equation by equation; inside a trace this inlines it, source lines and name
    scopes kept.
    """
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *values)


@contextlib.contextmanager
def keep_source(eqn: JaxprEqn) -> Iterator[None]:
    """New equations traced inside keep the source line and name scope of `eqn`.

    Equations from the body of a jitted library function know no line of the user's; they keep that
    of the call.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    if traceback is None or next(source_info_util.user_frames(traceback), None) is None:
        traceback = source_info_util.current().traceback
    with source_info_util.user_context(traceback, name_stack=stack):
        yield


def is_concrete(value: Any) -> bool:
    """Return whether a value is known now, rather than being traced."""
    return not isinstance(value, jax.core.Tracer)


def same_trace(value: Any, other: Any) -> bool:
    """Return whether two traced values belong to one trace, so that they can be outputs of one
    program.
    """
    return value._trace is other._trace


def module_scope(eqn: JaxprEqn) -> str:
    """The `jax.named_scope` path an equation was traced under; empty if none."""
    stack = eqn.source_info.name_stack.stack
    # no `vmap(...)`
    return "/".join(part.name for part in stack if isinstance(part, source_info_util.Scope))


def user_line(eqn: JaxprEqn, skip: Sequence[str] = ()) -> str:
    """`file:line (function)` of the innermost frame outside the folders in `skip`; empty if
    unknown.
    """
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    for frame in source_info_util.user_frames(traceback):
        if not any(part in frame.file_name for part in skip):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def make_jaxpr_closed(fun: Callable, *avals: Any) -> ClosedJaxpr:
    """Trace `fun` on flat arrays or shape structs."""
    return jax.make_jaxpr(fun)(*avals)


def remove_dead_equations(jaxpr: Jaxpr) -> Jaxpr:
    """Drop equations that no output needs; inputs stay as they are."""
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.11
    return len(consts), len(carry)


def sub_jaxpr(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    outvars: Sequence[Any],
    constvars: Sequence[Var] = (),
) -> Jaxpr:
    """A jaxpr made of some of another's equations; `constvars` are read by it and have no value
    yet.
    """
    opened = jaxpr.replace(
        constvars=list(constvars),
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    # Since JAX 0.11 a jaxpr holds the values of its constvars, and one without a value is a plain
    # input: avals stand for values.
    return ClosedJaxpr(opened, [v.aval for v in constvars]) if ClosedJaxpr is Jaxpr else opened
