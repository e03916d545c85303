"""Entries of weight products that keep a state's position: what a unit sends to itself.

For a contact `y = V x` whose data `x` is a function of a group's old states, position by position,
`V` has an entry from the element of `x` that belongs to position p to each element of `y` that
feeds position p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.compiler.weight_views import Contact
from etrace_bridge.step.aligned import follow_positions, pairs_of_positions
from etrace_bridge.step.linearise import group_states
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps
from etrace_bridge.step.taps import Tap


@dataclass(frozen=True)
class KeptEntries:
    """Entries of one contact's Jacobian `dy/dx` that stay at their position.

    Attributes:
        contact: the contact.
        tap: index of the tap whose piece of `y` this is.
        y: for each entry, the element of the piece.
        x: the element of `x`.
        view: the element of the weight view.
    """

    contact: Contact
    tap: int
    y: np.ndarray
    x: np.ndarray
    view: np.ndarray


@dataclass(frozen=True)
class KeptProducts:
    """The kept entries of one group's products.

    Attributes:
        group: index of the group in `program.groups`.
        states: which of its states the products read.
        held: operands to hold constant so that their data depends on the old states position by
            position.
        entries: one per piece of a contact.
    """

    group: int
    states: tuple[int, ...]
    held: dict[int, tuple[int, ...]]
    entries: tuple[KeptEntries, ...]


def kept_products(program: StepProgram) -> list[KeptProducts]:
    """Return the kept entries of every group that has some."""
    result = []
    for g, group in enumerate(program.groups):
        aligned = follow_positions(program, group, with_contacts=False)
        kept = []
        for t in program.taps:
            if t.contact.x is None or t.contact.x not in aligned.positions:
                continue
            feeding = [leg for leg in t.legs if leg.group == group.index]
            kept += [_entries(t, leg.positions, aligned.positions[t.contact.x]) for leg in feeding]
        kept = [entries for entries in kept if entries.y.size]
        reached = frozenset().union(*(aligned.origins[k.contact.x] for k in kept))
        owners = [leaf.index for leaf in group.leaves for _ in range(leaf.count)]
        if kept:
            states = tuple(j for j, owner in enumerate(owners) if owner in reached)
            result.append(KeptProducts(g, states, aligned.held, tuple(kept)))
    return result


def _entries(tap: Tap, y_positions: np.ndarray, x_positions: np.ndarray) -> KeptEntries:
    contact, part, form = tap.contact, tap.part, tap.part.form
    source = _feature_sources(form, contact.x.aval.shape)
    flat = x_positions.reshape(-1)
    feature_positions = np.where(source >= 0, flat[np.maximum(source, 0)], -1)
    y, feature = pairs_of_positions(y_positions, feature_positions)
    at = dict(zip(form.feature, np.unravel_index(feature, form.shape(form.feature)), strict=True))
    of_y = dict(zip(form.out, np.unravel_index(y, form.shape(form.out)), strict=True))
    fits = np.ones(y.shape, dtype=bool)
    for c in at:
        if c in of_y:
            fits &= at[c] == of_y[c]
    index = at | of_y
    if part.letter:
        index[part.letter] = index[part.letter] + part.start
    whole: Any = contact.form if part.letter else form
    view = (
        np.ravel_multi_index([index[c] for c in form.view], whole.shape(form.view))
        if form.view
        else y * 0
    )
    return KeptEntries(
        contact, tap.index, y[fits], source[feature][fits], np.broadcast_to(view, y.shape)[fits]
    )


def _feature_sources(form: ContactForm, shape: tuple[int, ...]) -> np.ndarray:
    """For each feature, the element of `x` that it is a copy of (-1: padding)."""
    numbers = np.arange(1, int(np.prod(shape, dtype=np.int64)) + 1, dtype=np.float32).reshape(shape)
    with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
        return np.asarray(form.features(jnp.asarray(numbers))).reshape(-1).astype(np.int64) - 1


def pull_through(steps: Steps, kept: KeptProducts) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function from cotangents at the taps to those of the group's old states.

    It passes through the kept entries only.
    """
    program, xs = steps.program, list(dict.fromkeys(k.contact.x for k in kept.entries))

    def operands(hidden: Sequence[jax.Array]) -> list[Any]:
        def one(start: dict, saved: Any) -> list[Any]:
            done = program.run_step(start, saved, {}, xs, kept.held)
            return [done[x] for x in xs]

        return steps.each(one, hidden=hidden)

    values, pull = jax.vjp(operands, steps.forward.hidden)

    def run(at_taps: Sequence[Any]) -> list[Any]:
        xbar = [jnp.zeros((v.shape[0], v[0].size), v.dtype) for v in values]
        for k in kept.entries:
            n = xs.index(k.contact.x)
            view = steps.env[k.contact.view.var].reshape(-1)[k.view]
            terms = _pick(at_taps[k.tap].reshape(xbar[n].shape[0], -1), k.y) * view[None]
            whole = np.array_equal(k.x, np.arange(xbar[n].shape[1]))
            xbar[n] = xbar[n] + terms if whole else xbar[n].at[:, k.x].add(terms)
        hidden = pull([x.reshape(v.shape) for x, v in zip(xbar, values, strict=True)])[0]
        return group_states(program, hidden)[kept.group]

    return run


def _pick(array: Any, elements: np.ndarray) -> Any:
    if np.array_equal(elements, np.arange(array.shape[1])):
        return array
    return jnp.take(array, elements, axis=1)
