"""Multiplies cotangents at contacts with features.

The results are gradients of views, and from these gradients of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._jax_compat import Var, bind_equation
from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.compiler.weight_views import Contact
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.taps import Tap

TIME = "T"
_PLAIN = ("dot_general", "copy", "broadcast_in_dim")


def features(form: ContactForm, x: jax.Array) -> jax.Array:
    """Return `phi(x)` at every step, one axis per letter."""
    return jax.vmap(form.features)(x)


def view_gradients(
    program: StepProgram,
    env: dict[Var, Any],
    at_taps: Sequence[jax.Array],
    xs: dict[int, jax.Array],
    before: tuple[Sequence[Any], dict[int, jax.Array]] | None = None,
) -> dict[int, jax.Array]:
    """Return the gradient of each traced contact's view, from cotangents (K, …) at its taps.

    Args:
        program: the step.
        env: values of the weight tier.
        at_taps: cotangents at all taps, of K steps.
        xs: data operands of K steps, by contact.
        before: the same of one more step, (1, …) each, but with features in place of data; a
            contact that has data and no features here is left out of it.
    """
    earlier_taps, earlier = before or (None, {})
    both = None  # of one step, one product; of many, that would copy all features
    if earlier_taps is not None and all(y.shape[0] == 1 for y in at_taps):
        both = [jnp.concatenate(pair) for pair in zip(earlier_taps, at_taps, strict=True)]
    result = {}
    for contact in program.traced_contacts:
        form = _form_of(program, contact)
        x, first = xs.get(contact.index), earlier.get(contact.index)
        is_plain = _is_plain(program, contact)
        before_taps = earlier_taps if (x is None) == (first is None) else None
        phi = features(form, x) if x is not None and is_plain else None
        if before_taps is not None and both is not None and is_plain:
            joined = None if first is None or phi is None else jnp.concatenate([first, phi])
            result[contact.index] = _outer_gradient(program, contact, both, joined)
            continue
        if is_plain or x is None:
            gradient = _outer_gradient(program, contact, at_taps, phi)
        else:
            whole = _whole(contact, program.taps_of(contact), at_taps)
            gradient = _transpose(contact, env, whole, x).reshape(form.shape(form.view))
        if before_taps is not None:
            gradient = gradient + _outer_gradient(program, contact, before_taps, first)
        result[contact.index] = gradient
    return result


def _outer_gradient(
    program: StepProgram, contact: Contact, at_taps: Sequence[jax.Array], phi: jax.Array | None
) -> Any:
    """Return `sum over t of cotangent_t ⊗ phi_t` in the letters of `_letters`.

    The cotangents (K, …) are given at all taps.
    """
    taps = program.taps_of(contact)
    form = _form_of(program, contact)
    letters = _letters(program, contact)
    joined = join_outputs(taps, [at_taps[t.index] for t in taps])
    joined = joined.reshape(joined.shape[0], *form.shape(form.out))
    if phi is None:
        return jnp.einsum(f"{TIME}{form.out}->{letters}", joined)
    if letters == form.view:
        return jnp.einsum(f"{TIME}{form.out},{TIME}{form.feature}->{letters}", joined, phi)
    transposed = jnp.einsum(f"{TIME}{form.feature},{TIME}{form.out}->{letters}", phi, joined)
    return program.tuning.finish_gradient(transposed, phi.shape[0])


def in_view_order(program: StepProgram, by_contact: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return gradients of views, added up as they are made, in the views' own letters."""
    result = dict(by_contact)
    for contact in program.traced_contacts:
        if contact.index in by_contact:
            letters, view = _letters(program, contact), _form_of(program, contact).view
            result[contact.index] = jnp.transpose(
                by_contact[contact.index], [letters.index(c) for c in view]
            )
    return result


def _letters(program: StepProgram, contact: Contact) -> str:
    """Return a view's letters in the order in which its gradient is added up over time."""
    form = _form_of(program, contact)
    return program.tuning.gradient_letters(form) if _is_plain(program, contact) else form.view


def _is_plain(program: StepProgram, contact: Contact) -> bool:
    """Return whether a view's gradient is an outer product of cotangents and features.

    Otherwise the contact's own transpose gives it.
    """
    return contact.eqn.primitive.name in _PLAIN or program.tuning.is_patch_product(contact.eqn)


def _form_of(program: StepProgram, contact: Contact) -> ContactForm:
    taps = program.taps_of(contact)
    return taps[0].part.form if len(taps) == 1 else contact.traced_form


def _whole(contact: Contact, taps: Sequence[Tap], at_taps: Sequence[jax.Array]) -> jax.Array:
    """Return the cotangent at the contact's own output, from those at its taps.

    Gates side by side, a spread copy summed.
    """
    if len(taps) == 1:
        out, y = taps[0].part.form.out, at_taps[taps[0].index]
        if taps[0].part.var is contact.y:
            return y
        spread = [n for n, c in enumerate(out, 1) if c not in contact.traced_form.out]
        return y.sum(spread).reshape(y.shape[0], *contact.y.aval.shape)
    return join_outputs(taps, [at_taps[t.index] for t in taps])


def _transpose(
    contact: Contact, env: dict[Var, Any], cotangent: jax.Array, x: jax.Array
) -> jax.Array:
    """Return the contact's own transpose with respect to its view (convolutions, embeddings)."""
    form = contact.traced_form
    view = env[contact.view.var]

    def apply(view: Any) -> Any:
        def one(x_t: jax.Array) -> Any:
            operands = [env.get(v) if isinstance(v, Var) else v.val for v in contact.eqn.invars]
            operands[form.view_index] = view
            if form.x_index is not None:
                operands[form.x_index] = x_t
            return bind_equation(contact.eqn, operands)[0]

        return jax.vmap(one)(x)

    _, pull = jax.vjp(apply, view)
    return pull(cotangent)[0]


def join_outputs(taps: Sequence[Tap], pieces: Sequence[jax.Array]) -> jax.Array:
    """Return arrays (K, …) at the pieces of a contact's output, side by side."""
    if len(taps) == 1:
        return pieces[0]
    return jnp.concatenate(
        list(pieces), axis=taps[0].contact.traced_form.out.index(taps[0].part.letter) + 1
    )


def join_pieces(taps: Sequence[Tap], pieces: Sequence[jax.Array]) -> jax.Array:
    """Join gradients of gates along the split letter into the gradient of the whole view."""
    if len(taps) == 1:
        return pieces[0]
    form = taps[0].part.form
    return jnp.concatenate(list(pieces), axis=form.view.index(taps[0].part.letter))


def weight_gradients(
    program: StepProgram, theta: Sequence[jax.Array], by_contact: dict[int, jax.Array]
) -> list[Any]:
    """From the views back to the weights."""
    contacts = [c for c in program.traced_contacts if c.index in by_contact]

    def views(theta: Sequence[jax.Array]) -> list[Any]:
        env = program.weight_env(theta)
        return [env[c.view.var] for c in contacts]

    values, pull = jax.vjp(views, list(theta))
    return pull(
        [
            by_contact[c.index].reshape(v.shape).astype(v.dtype)
            for c, v in zip(contacts, values, strict=True)
        ]
    )[0]


def add_contacts(a: dict[int, jax.Array], b: dict[int, jax.Array]) -> dict[int, Any]:
    """Return gradients of views, by contact, added up."""
    return {n: a[n] + b[n] if n in a and n in b else a.get(n, b.get(n)) for n in {**a, **b}}
