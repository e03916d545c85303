"""Runs jaxprs equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var, bind_equation, keep_source


def evaluate(
    eqns: Sequence[JaxprEqn],
    env: dict[Var, Any],
    on_equation: Callable[[JaxprEqn, list[Any]], list[Any] | None] | None = None,
    skip: Callable[[JaxprEqn], bool] | None = None,
) -> dict[Var, Any]:
    """Run equations in order on the values in `env`, and add their results to it.

    Args:
        eqns: equations in topological order.
        env: values by variable; changed in place and returned.
        on_equation: may return an equation's results itself; None means the primitive runs as it
            is.
        skip: equations for which it is true are not run.
    """
    for eqn in eqns:
        if skip is not None and skip(eqn):
            continue
        operands = [read(env, v) for v in eqn.invars]
        with keep_source(eqn):
            results = on_equation(eqn, operands) if on_equation is not None else None
            if results is None:
                results = bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return env


def read(env: dict[Var, Any], atom: Any) -> Any:
    """Return the value of a variable or literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def variables(atoms: Sequence[Any]) -> Iterator[Var]:
    """Return the atoms that are variables, in order."""
    return (a for a in atoms if not isinstance(a, Literal))


def needed_equations(
    eqns: Sequence[JaxprEqn], targets: Sequence[Any], given: Sequence[Var] = ()
) -> list[JaxprEqn]:
    """Return the equations that `targets` need when `given` are known, in order."""
    wanted = set(variables(targets)) - set(given)
    known = set(given)
    chosen = []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars):
            chosen.append(eqn)
            wanted.update(v for v in variables(eqn.invars) if v not in known)
    return chosen[::-1]


def reads_of(eqns: Sequence[JaxprEqn], targets: Sequence[Any] = ()) -> list[Var]:
    """Return the variables that equations (and targets) read but do not make, in reading order."""
    made = {v for eqn in eqns for v in eqn.outvars}
    seen: dict[Var, None] = {}
    for eqn in eqns:
        seen.update((v, None) for v in variables(eqn.invars) if v not in made)
    seen.update((v, None) for v in variables(targets) if v not in made)
    return list(seen)
