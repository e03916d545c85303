"""Where cotangents at contacts meet features: gradients of views, and the trace's two passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import Var, bind_equation
from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.compiler.views import Contact
from etrace_bridge.engine.convolution import is_product
from etrace_bridge.engine.forward import Forward
from etrace_bridge.engine.linearise import step_env
from etrace_bridge.engine.program import StepProgram, Tap

_TIME = "T"
_PLAIN = ("dot_general", "copy", "broadcast_in_dim")
LOOP_SIZE = 2**18  # elements of all traces from which they are read row by row


def contact_inputs(program: StepProgram, env: dict[Var, Any], forward: Forward, args: Sequence[Any]) -> dict[int, Any]:
    """The data operand of each traced contact at every step, by contact."""
    with_x = [c for c in program.traced_contacts if c.x is not None]

    def values(args_t, hidden_t, other_t, saved_t):
        start = step_env(program, env, args_t, hidden_t, other_t)
        return program.values(start, saved_t, [c.x for c in with_x])

    found = jax.vmap(values)(list(args), forward.hidden, forward.other, forward.saved)
    return {c.index: x for c, x in zip(with_x, found, strict=True)}


def features(form: ContactForm, x: Any) -> Any:
    """`phi(x)` at every step, one axis a letter."""
    lead = x.shape[0]
    return jax.vmap(form.phi)(x).reshape(lead, *form.shape(form.feature))


def view_gradients(
    program: StepProgram,
    env: dict[Var, Any],
    ybar: Sequence[Any],
    xs: dict[int, Any],
    before: tuple[Sequence[Any], dict[int, Any]] | None = None,
) -> dict[int, Any]:
    """Gradient of each traced contact's view, from cotangents (K, …) at its taps; `in_view_order` gives them their shapes.

    Args:
        program: the step.
        env: values of the weight tier.
        ybar: cotangents at all taps, of K steps.
        xs: data operands of K steps, by contact.
        before: the same of one more step, (1, …) each, but with features in place of data; a contact that has data and no features here
            is left out of it.
    """
    asked, earlier = before or (None, {})
    both = None  # of one step, one product; of many, that would copy all features
    if asked is not None and all(y.shape[0] == 1 for y in ybar):
        both = [jnp.concatenate(pair) for pair in zip(asked, ybar, strict=True)]
    result = {}
    for contact in program.traced_contacts:
        form, x, first = _form_of(program, contact), xs.get(contact.index), earlier.get(contact.index)
        has_past = asked is not None and (x is None) == (first is None)
        phi = features(form, x) if x is not None and _is_plain(contact) else None
        if has_past and both is not None and _is_plain(contact):
            result[contact.index] = _outer_gradient(program, contact, both, None if phi is None else jnp.concatenate([first, phi]))
            continue
        if _is_plain(contact):
            gradient = _outer_gradient(program, contact, ybar, phi)
        else:
            gradient = _transpose(contact, env, _whole(contact, program.taps_of(contact), ybar), x).reshape(form.shape(form.view))
        result[contact.index] = gradient + _outer_gradient(program, contact, asked, first) if has_past else gradient
    return result


def _outer_gradient(program: StepProgram, contact: Contact, ybar: Sequence[Any], phi: Any) -> Any:
    """`sum over t of ybar_t ⊗ phi_t` with the letters of `_summed`, from cotangents (K, …) at all taps; `phi` is None without features."""
    taps, form, letters = program.taps_of(contact), _form_of(program, contact), _summed(program, contact)
    joined = join_outputs(taps, [ybar[t.index] for t in taps])
    joined = joined.reshape(joined.shape[0], *form.shape(form.out))
    if phi is None:
        return jnp.einsum(f"{_TIME}{form.out}->{letters}", joined)
    if letters == form.view:
        return jnp.einsum(f"{_TIME}{form.out},{_TIME}{form.feature}->{letters}", joined, phi)
    turned = jnp.einsum(f"{_TIME}{form.feature},{_TIME}{form.out}->{letters}", phi, joined)
    # Without the barrier XLA takes the transpose that follows into the product. For one step it should: there the gradient is
    # best not written at all but goes straight into the weight's update.
    return turned if phi.shape[0] <= 2 else lax.optimization_barrier(turned)  # one step, and perhaps what came before it


def in_view_order(program: StepProgram, by_contact: dict[int, Any]) -> dict[int, Any]:
    """Gradients of views, added up as they are made, in the views' own letters."""
    result = dict(by_contact)
    for contact in program.traced_contacts:
        letters = _summed(program, contact)
        if contact.index in by_contact:
            result[contact.index] = jnp.transpose(by_contact[contact.index], [letters.index(c) for c in _form_of(program, contact).view])
    return result


def _summed(program: StepProgram, contact: Contact) -> str:
    """The letters of a view in the order in which its gradient is made and added up over time.

    XLA's CPU product writes its left factor transposed before it starts, and a few gates' cotangents are wider than the features: so
    these are the left factor, and the sum is transposed once, at the end.
    """
    form = _form_of(program, contact)
    width = math.prod(form.sizes[letter] for letter in form.contracted)
    if not form.contracted or not _is_plain(contact) or width**2 >= math.prod(form.shape(form.view)):
        return form.view
    return "".join(sorted(form.view, key=lambda letter: letter not in form.contracted))


def _is_plain(contact: Contact) -> bool:
    """Whether a view's gradient is an outer product of cotangents and features; otherwise the contact's own transpose gives it."""
    return contact.eqn.primitive.name in _PLAIN or is_product(contact.eqn)


def _form_of(program: StepProgram, contact: Contact) -> ContactForm:
    taps = program.taps_of(contact)
    return taps[0].part.form if len(taps) == 1 else contact.form


def _whole(contact: Contact, taps: Sequence[Tap], ybar: Sequence[Any]) -> Any:
    """The cotangent at the contact's own output, from those at its taps: gates side by side, a spread copy summed."""
    if len(taps) == 1:
        out, y = taps[0].part.form.out, ybar[taps[0].index]
        if taps[0].part.var is contact.y:
            return y
        spread = [n for n, c in enumerate(out, 1) if c not in contact.form.out]
        return y.sum(spread).reshape(y.shape[0], *contact.y.aval.shape)
    return join_outputs(taps, [ybar[t.index] for t in taps])


def _transpose(contact: Contact, env: dict[Var, Any], ybar: Any, x: Any) -> Any:
    """The contact's own transpose with respect to its view (convolutions, embeddings)."""
    form = contact.form
    view = env[contact.view.var]

    def apply(view: Any) -> Any:
        def one(x_t: Any) -> Any:
            operands = [env.get(v) if isinstance(v, Var) else v.val for v in contact.eqn.invars]
            operands[form.view_index], operands[form.x_index] = view, x_t
            return bind_equation(contact.eqn, operands)[0]

        return jax.vmap(one)(x)

    _, pull = jax.vjp(apply, view)
    return pull(ybar)[0]


def join_outputs(taps: Sequence[Tap], pieces: Sequence[Any]) -> Any:
    """Arrays (K, …) at the pieces of a contact's output, side by side."""
    if len(taps) == 1:
        return pieces[0]
    return jnp.concatenate(list(pieces), axis=taps[0].contact.form.out.index(taps[0].part.letter) + 1)


def join_pieces(taps: Sequence[Tap], pieces: Sequence[Any]) -> Any:
    """Gradients of gates, side by side along the split letter, make the gradient of the whole view."""
    if len(taps) == 1:
        return pieces[0]
    form = taps[0].part.form
    return jnp.concatenate(list(pieces), axis=form.view.index(taps[0].part.letter))


def weight_gradients(program: StepProgram, theta: Sequence[Any], by_contact: dict[int, Any]) -> list[Any]:
    """From the views back to the weights."""
    contacts = [c for c in program.traced_contacts if c.index in by_contact]

    def views(theta: Sequence[Any]) -> list[Any]:
        env = program.weight_env(theta)
        return [env[c.view.var] for c in contacts]

    values, pull = jax.vjp(views, list(theta))
    return pull([by_contact[c.index].reshape(v.shape).astype(v.dtype) for c, v in zip(contacts, values, strict=True)])[0]


# -- traces ------------------------------------------------------------------------------------------------------


def at_places(leg: Leg, array: Any, lead: int = 0) -> Any:
    """Values of a group's places, brought to the piece's elements and into the trace's order; `lead` axes kept."""
    form = leg.part.form
    spread = take_places(leg, array, lead).reshape(*array.shape[:lead], *form.shape(form.out))
    return _to_trace_order(form, spread, lead)


def take_places(leg: Leg, array: Any, lead: int) -> Any:
    """Values of a group's places for each of the piece's elements, zero where an element feeds none; `lead` axes kept."""
    places = leg.places.reshape(-1)
    size = int(np.prod(array.shape[lead:], dtype=np.int64))
    if places.size == size and (places == np.arange(size)).all():
        return array
    flat = array.reshape(*array.shape[:lead], size)
    return jnp.where(places >= 0, jnp.take(flat, np.maximum(places, 0), axis=lead), 0)


def _to_trace_order(form: ContactForm, array: Any, lead: int) -> Any:
    order = [form.out.index(c) + lead for c in form.trace_out]
    return jnp.transpose(array, [*range(lead), *order])


def contract_traces(legs: Sequence[Leg], a: Sequence[Sequence[Any]], traces: Sequence[Sequence[Any]], kept: Any):
    """`a · trace`, summed over states and to each view's letters; `kept` comes back unchanged.

    Args:
        legs: the legs.
        a: for each leg and state, what is asked of the piece's elements, in the trace's order.
        traces: for each leg and state, the trace.
        kept: arrays that are needed only after the traces were read, such as what the update multiplies them with.

    Large traces are read row by row of the batch: as one product and sum, XLA would write a broadcast of `a` as large as
    the trace. `kept` travels through that loop, so that the update depends on its end and XLA can overwrite the trace in
    place; without a real dependency it copies the whole trace first.
    """
    rows = {leg.part.form.shape(leg.part.form.trace)[0] for leg in legs}
    batched = all(leg.part.form.trace[0] not in leg.part.form.view for leg in legs if leg.part.form.trace)
    size = sum(x.size for states in traces for x in states)
    if len(rows) != 1 or not batched or size < LOOP_SIZE or min(rows) < 2:
        return [_contract_leg(leg, x, eps) for leg, x, eps in zip(legs, a, traces, strict=True)], kept
    (count,) = rows

    def add(n: Any, carry: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        sums, kept_rows = carry
        sums = [
            total + sum(_wide(leg, x[n]) * eps[n].astype(x.dtype) for x, eps in zip(xs, states, strict=True)).astype(total.dtype)
            for leg, total, xs, states in zip(legs, sums, a, traces, strict=True)
        ]
        return sums, jax.tree.map(lambda new, old: new.at[n].set(old[n]), kept_rows, kept)

    zeros = [jnp.zeros(states[0].shape[1:], xs[0].dtype) for xs, states in zip(a, traces, strict=True)]
    travels = all(x.ndim and x.shape[0] == count for x in jax.tree.leaves(kept))
    sums, carried = lax.fori_loop(0, count, add, (zeros, jax.tree.map(jnp.zeros_like, kept) if travels else None))
    return [_to_view(leg, total, leg.part.form.trace[1:]) for leg, total in zip(legs, sums, strict=True)], (carried if travels else kept)


def _contract_leg(leg: Leg, a: Sequence[Any], traces: Sequence[Any]) -> Any:
    product = sum(_wide(leg, x) * eps.astype(x.dtype) for x, eps in zip(a, traces, strict=True))
    return _to_view(leg, product, leg.part.form.trace)


def _wide(leg: Leg, x: Any) -> Any:
    return x.reshape(*x.shape, *(1 for _ in leg.part.form.contracted))


def _to_view(leg: Leg, array: Any, letters: str) -> Any:
    """Sums an array with these letters to those of the view, in the view's order."""
    form = leg.part.form
    axes = tuple(n for n, c in enumerate(letters) if c not in form.view)
    left = [c for c in letters if c in form.view]
    return jnp.transpose(jnp.sum(array, axis=axes), [left.index(c) for c in form.view])


def outer_sum(leg: Leg, g: Any, x: Any) -> Any:
    """`sum over t of g_t ⊗ phi(x_t)`: what K steps add to a trace."""
    form = leg.part.form
    g = _to_trace_order(form, g.reshape(g.shape[0], *form.shape(form.out)), 1)
    if x is None:
        return jnp.sum(g, axis=0)
    phi = features(form, x)
    shared = [c for c in form.out if c in form.feature]
    rest = [c for c in form.trace_out if c not in shared]
    if g.shape[0] == 1:
        letters = form.trace_out
        return jnp.einsum(f"{letters},{form.feature}->{form.trace}", g[0], phi[0])
    # Batched products want the shared axes first, then time: (B, K, ·).
    n = len(shared)
    g = jnp.moveaxis(g, 0, n)
    order = [form.feature.index(c) + 1 for c in shared] + [0] + [form.feature.index(c) + 1 for c in form.contracted]
    phi = jnp.transpose(phi, order)
    head = "".join(shared)
    return jnp.einsum(f"{head}{_TIME}{''.join(rest)},{head}{_TIME}{form.contracted}->{form.trace}", g, phi)
