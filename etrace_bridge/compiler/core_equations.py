"""The core: what maps old states and contact outputs to new states position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Var, bind_equation
from etrace_bridge.compiler.aligner import Alignment, Edge
from etrace_bridge.compiler.hidden_leaves import HiddenLeaf
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, reads_of


@dataclass(frozen=True)
class Core:
    """Equations of the core, with everything at cuts held constant.

    Attributes:
        eqns: the equations, in order.
        held: for an equation's id, the operands that are cuts.
        reads: variables that the core reads and does not make (old states, contact outputs,
            constants of the step).
        outvars: the new states' variables.
    """

    eqns: tuple[JaxprEqn, ...]
    held: dict[int, tuple[int, ...]]
    reads: tuple[Var, ...]
    outvars: tuple[Any, ...]

    def run(self, env: dict[Var, Any]) -> dict[Var, Any]:
        """Evaluate the core on the values of `reads`; gradients stop at the cuts.

        A value that is given stays, also where an equation makes it beside another one that is
        needed: one gate of a fused product.
        """

        def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            held = self.held.get(id(eqn), ())
            results = bind_equation(
                eqn, [lax.stop_gradient(v) if k in held else v for k, v in enumerate(operands)]
            )
            return [env.get(v, r) for v, r in zip(eqn.outvars, results, strict=True)]

        return evaluate(self.eqns, dict(env), on_equation)


def build_core(
    eqns: Sequence[JaxprEqn],
    alignment: Alignment,
    outvars: Sequence[Any],
    given: Sequence[Var] = (),
) -> Core:
    """Return the part of the core that makes the given new states.

    Values `given` from outside are not computed.
    """
    chosen = needed_equations([eqns[i] for i in alignment.core], outvars, given)
    held = held_operands(eqns, alignment.cuts)
    return Core(tuple(chosen), held, tuple(reads_of(chosen, outvars)), tuple(outvars))


def held_operands(eqns: Sequence[JaxprEqn], cuts: set[Edge]) -> dict[int, tuple[int, ...]]:
    """Return the cut operands by equation id."""
    held: dict[int, tuple[int, ...]] = {}
    for i, k in sorted(cuts):
        held[id(eqns[i])] = (*held.get(id(eqns[i]), ()), k)
    return held


def split_leaf(leaf: HiddenLeaf, value: Any, varshape: tuple[int, ...]) -> list[Any]:
    """Split a hidden state's value into its virtual states, each of shape `varshape`.

    Leading axes are kept.
    """
    if leaf.axis is None:
        return [_fit(value, leaf, varshape)]
    lead = value.ndim - len(leaf.invar.aval.shape)
    return [_fit(v, leaf, varshape) for v in jnp.split(value, leaf.count, axis=leaf.axis + lead)]


def join_leaf(leaf: HiddenLeaf, parts: Sequence[Any], varshape: tuple[int, ...]) -> Any:
    """Join virtual states into a hidden state's value: the inverse of `split_leaf`."""
    block = list(leaf.invar.aval.shape)
    if leaf.axis is not None:
        block[leaf.axis] //= leaf.count
    lead = parts[0].ndim - len(varshape)
    parts = [p.reshape(*p.shape[:lead], *block) for p in parts]
    return parts[0] if leaf.axis is None else jnp.concatenate(parts, axis=leaf.axis + lead)


def _fit(value: Any, leaf: HiddenLeaf, varshape: tuple[int, ...]) -> Any:
    lead = value.ndim - len(leaf.invar.aval.shape)
    shape = (*value.shape[:lead], *varshape)
    return value if value.shape == shape else value.reshape(shape)
