"""The influence of steps: Jacobians of new hidden values by old ones and by contact outputs."""

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
from etrace_bridge.step.time import scan_time
from etrace_bridge.step.unit_arrays import contact_data, flat_rows, to_units
from etrace_bridge.step.units import Layout


@dataclass(frozen=True)
class Influence:
    """Derivatives of K steps, n hidden values in each row (batch element).

    Attributes:
        F: `dh_K/dh_0`, (rows, n, n).
        G: `dh_K/dy_t` by variable of the sum `y`, (n, K, units): each unit by its own row's values.
        data: the data operand of each contact at each step, by index of the contact.
    """

    F: jax.Array
    G: dict[Var, jax.Array]
    data: dict[int, jax.Array]

    @property
    def of_one_step(self) -> Influence:
        """The same for K = 1, without an axis of steps."""
        G = {var: g[:, 0] for var, g in self.G.items()}
        return Influence(self.F, G, {n: x[0] for n, x in self.data.items()})


def step_influence(
    program: StepProgram, layout: Layout, theta: Sequence[jax.Array], hidden, other, args
) -> tuple[Influence, list[Any], list[Any]]:
    """Return the influence of one step, and hidden and other states after it."""
    lead = [a[None] for a in args]
    made, hidden, other = chunk_influence(program, layout, theta, hidden, other, lead)
    return made.of_one_step, hidden, other


def chunk_influence(
    program: StepProgram, layout: Layout, theta: Sequence[jax.Array], hidden, other, args
) -> tuple[Influence, list[Any], list[Any]]:
    """Return the influence of K steps, and hidden and other states after them.

    What goes through other states is not in it.

    By n reverse passes, since surrogate gradients have no forward mode.
    """
    env, length = program.weight_env(theta), args[0].shape[0]
    forward = run_forward(program, env, hidden, other, args)
    sums = [s for family in layout.families for s in family.sums]
    new_vars = [leaf.outvar for leaf in program.leaves]

    def run(hidden: Sequence[jax.Array], deltas: Sequence[jax.Array]) -> Any:
        def step(hidden: Sequence[jax.Array], each: Any) -> tuple[Any, None]:
            args, other, saved, deltas = each
            start = program.start_env(env, args, hidden, other)
            taps = dict(zip((s.var for s in sums), deltas, strict=True))
            done = program.run_step(start, saved, taps, new_vars)
            return [read(done, v) for v in new_vars], None

        steps = list(args), forward.other, forward.saved, list(deltas)
        return flat_rows(layout, scan_time(step, list(hidden), steps, length)[0])

    zeros = [jnp.zeros((length, *s.var.aval.shape), s.var.aval.dtype) for s in sums]
    new, pull = jax.vjp(run, list(hidden), zeros)
    basis = jnp.eye(layout.size, dtype=new.dtype)[:, None]
    by_hidden, by_sum = jax.vmap(pull)(jnp.broadcast_to(basis, (layout.size, *new.shape)))
    F = jnp.moveaxis(flat_rows(layout, by_hidden, 1), 0, 1)
    pairs = zip(sums, by_sum, strict=True)
    G = {s.var: to_units(s, g.reshape(layout.size, length, -1)) for s, g in pairs}

    def data(args: Any, hidden: Any, other: Any, saved: Any) -> dict[int, jax.Array]:
        return contact_data(program, layout, program.start_env(env, args, hidden, other), saved)

    xs = jax.vmap(data)(list(args), *forward.steps())
    return Influence(F, G, xs), forward.new_hidden, forward.new_other


def weights_of_views(
    program: StepProgram,
    theta: Sequence[jax.Array],
    by_part: dict[Any, Any],
    by_contact: dict[int, jax.Array] | None = None,
) -> dict[int, jax.Array]:
    """Return gradients of the weights by index, from those of views.

    Args:
        program: the step.
        theta: the weights.
        by_part: gradients of the pieces' views, by variable of the piece.
        by_contact: gradients of whole views, by index of the contact.
    """
    use, known = program.graph.structure.use, by_contact or {}
    contacts = [
        c for c in use.contacts if c.index in known or any(p.var in by_part for p in c.parts)
    ]

    def views(theta: Sequence[jax.Array]) -> list[Any]:
        env = program.weight_env(theta)
        return [env[c.view.var] for c in contacts]

    values, pull = jax.vjp(views, list(theta))
    wholes = []
    for contact, value in zip(contacts, values, strict=True):
        if contact.index in known:
            wholes.append(known[contact.index].reshape(value.shape).astype(value.dtype))
            continue
        zeros = [jnp.zeros(p.form.shape(p.form.view), value.dtype) for p in contact.parts]
        parts = [by_part.get(p.var, z) for p, z in zip(contact.parts, zeros, strict=True)]
        form, letter = contact.parts[0].form, contact.parts[0].letter
        whole = jnp.concatenate(parts, form.view.index(letter)) if len(parts) > 1 else parts[0]
        wholes.append(whole.reshape(value.shape).astype(value.dtype))
    return dict(enumerate(pull(wholes)[0]))
