"""One step's influence: the Jacobians of all new hidden values by old ones and by what weights
make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._jax_compat import Var
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.step.forward import run_forward
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.unit_arrays import contact_data, flat_rows, to_units
from etrace_bridge.step.units import Layout


@dataclass(frozen=True)
class Influence:
    """Derivatives of one step, n hidden values in each row (batch element).

    Attributes:
        F: `dh_t/dh_(t-1)`, (rows, n, n).
        G: `dh_t/dy` by variable of the sum `y`, (n, units): each unit by its own row's values.
        data: the data operand of each contact, by index of the contact.
    """

    F: Any
    G: dict[Var, Any]
    data: dict[int, Any]


def step_influence(
    program: StepProgram, layout: Layout, theta: Sequence[Any], hidden, other, args
) -> tuple[Influence, list[Any], list[Any]]:
    """The influence of one step, and hidden and other states after it.

    By n reverse passes, since surrogate gradients have no forward mode.
    """
    env, lead = program.weight_env(theta), [a[None] for a in args]
    forward = run_forward(program, env, hidden, other, lead)
    start, saved = program.start_env(env, args, hidden, other), [s[0] for s in forward.saved]
    sums = [s for family in layout.families for s in family.sums]
    old_vars = [leaf.invar for leaf in program.leaves]
    new_vars = [leaf.outvar for leaf in program.leaves]

    def run(hidden: Sequence[Any], deltas: Sequence[Any]) -> Any:
        values = {**start, **dict(zip(old_vars, hidden, strict=True))}
        taps = dict(zip((s.var for s in sums), deltas, strict=True))
        done = program.run_step(values, saved, taps, new_vars)
        return flat_rows(layout, [read(done, v) for v in new_vars])

    zeros = [jnp.zeros(s.var.aval.shape, s.var.aval.dtype) for s in sums]
    new, pull = jax.vjp(run, [start[v] for v in old_vars], zeros)
    basis = jnp.eye(layout.size, dtype=new.dtype)[:, None]
    by_hidden, by_sum = jax.vmap(pull)(jnp.broadcast_to(basis, (layout.size, *new.shape)))
    F = jnp.moveaxis(flat_rows(layout, by_hidden, 1), 0, 1)
    pairs = zip(sums, by_sum, strict=True)
    G = {s.var: to_units(s, g.reshape(layout.size, -1)) for s, g in pairs}
    made = Influence(F, G, contact_data(program, layout, start, saved))
    return made, forward.new_hidden, forward.new_other


def weights_of_views(
    program: StepProgram, theta: Sequence[Any], by_part: dict[Any, Any]
) -> dict[int, Any]:
    """Gradients of the weights by index, from those of the pieces' views, by variable of the piece."""
    use = program.graph.structure.use
    contacts = [c for c in use.contacts if any(p.var in by_part for p in c.parts)]

    def views(theta: Sequence[Any]) -> list[Any]:
        env = program.weight_env(theta)
        return [env[c.view.var] for c in contacts]

    values, pull = jax.vjp(views, list(theta))
    wholes = []
    for contact, value in zip(contacts, values, strict=True):
        zeros = [jnp.zeros(p.form.shape(p.form.view), value.dtype) for p in contact.parts]
        parts = [by_part.get(p.var, z) for p, z in zip(contact.parts, zeros, strict=True)]
        form, letter = contact.parts[0].form, contact.parts[0].letter
        whole = jnp.concatenate(parts, form.view.index(letter)) if len(parts) > 1 else parts[0]
        wholes.append(whole.reshape(value.shape).astype(value.dtype))
    return dict(enumerate(pull(wholes)[0]))
