"""SnAp-1: D-RTRL that also keeps the diagonal of the mixing products in the recurrent Jacobian.

    eps_t = D'_t eps_(t-1) + df_t ⊗ x_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · eps_(t-1)
    D'_t  = D_t + diag( df_t · V · dx_t/dh_(t-1) )

`D_t` is D-RTRL's: the core, position by position. The second term is new: for a contact `y = V x` whose data `x` is a
function of the group's old states, position by position, `V` has an entry from the element of `x` that belongs to
place p to each element of `y` that feeds place p; these entries are kept, all others dropped. `df_t` is how the new
states depend on `y`, `dx_t/dh_(t-1)` the derivative of `x` at its place. For one layer `h_t = tanh(W x_t + U h_(t-1))`
this is SnAp-1 of Menick et al. (2021): `D'_t = diag(1 - h_t²) diag(U)`. In a convolution the kept entries are the
kernel's centre, channel by channel. Paths through two products in one step are dropped, as they are in `D_t`.

`credit` is D-RTRL's; with `"core"`, `b_t` passes through the core and the kept entries, which is the textbook rule.

Memory: that of D-RTRL. Time a step: that of D-RTRL plus S products of B·H entries. Exact when D-RTRL is, and for
products whose weight view is diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.compiler.views import Contact
from etrace_bridge.engine.aligned import follow_places, pairs_of_places
from etrace_bridge.engine.forward import Forward
from etrace_bridge.engine.linearise import CoreLinear, LossGradient, group_states, linearise_core, step_env
from etrace_bridge.engine.program import StepProgram, Tap
from etrace_bridge.rules.base import Chunk, register_rule
from etrace_bridge.rules.d_rtrl import DRTRL


@dataclass(frozen=True)
class KeptEntries:
    """Entries of one contact's Jacobian `dy/dx` that stay at their place.

    Attributes:
        contact: the contact.
        tap: the place of the tap whose piece of `y` this is.
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
        group: the group's place in `program.groups`.
        states: which of its states the products read.
        held: operands to hold constant so that their data depends on the old states position by position.
        entries: one a piece of a contact.
    """

    group: int
    states: tuple[int, ...]
    held: dict[int, tuple[int, ...]]
    entries: tuple[KeptEntries, ...]


@register_rule
@dataclass(frozen=True)
class SnAp1(DRTRL):
    """SnAp-1; options as in `DRTRL`."""

    name: ClassVar[str] = "snap1"

    def linearise(self, program: StepProgram, env: dict, forward: Forward, args: Sequence[Any]) -> CoreLinear:
        core = linearise_core(program, env, forward, args)
        D = list(core.D)
        for kept in _kept_entries(program):
            colour = next(c for c, members in enumerate(program.colours) if kept.group in members)
            pull = _pull_through(program, env, forward, args, kept)
            D[kept.group] = [_add(row, pull(df), kept.states) for row, df in zip(D[kept.group], core.df[colour], strict=False)]
        return replace(core, D=D)

    def differentiate(self, program: StepProgram, theta, env: dict, forward: Forward, data: Chunk) -> LossGradient:
        found = super().differentiate(program, theta, env, forward, data)
        if self.credit != "core":
            return found
        b = list(found.b)
        for kept in _kept_entries(program):
            pull = _pull_through(program, env, forward, data.args, kept)
            b[kept.group] = _add(b[kept.group], pull(found.ybar), kept.states)
        return replace(found, b=b)


def _add(row: Sequence[Any], added: Sequence[Any], states: Sequence[int]) -> list[Any]:
    """Adds to the entries of the given states; None stands for zero."""
    return [(added[j] if old is None else old + added[j]) if j in states else old for j, old in enumerate(row)]


def _kept_entries(program: StepProgram) -> list[KeptProducts]:
    result = []
    for g, group in enumerate(program.groups):
        aligned = follow_places(program, group, with_contacts=False)
        kept = []
        for t in program.taps:
            if t.contact.x is None or t.contact.x not in aligned.places:
                continue
            feeding = [leg for leg in t.legs if leg.group == group.index]
            kept += [_entries(t, leg.places, aligned.places[t.contact.x]) for leg in feeding]
        kept = [entries for entries in kept if entries.y.size]
        reached = frozenset().union(*(aligned.origins[k.contact.x] for k in kept))
        owners = [leaf.index for leaf in group.leaves for _ in range(leaf.count)]
        if kept:
            states = tuple(j for j, owner in enumerate(owners) if owner in reached)
            result.append(KeptProducts(g, states, aligned.held, tuple(kept)))
    return result


def _entries(tap: Tap, y_places: np.ndarray, x_places: np.ndarray) -> KeptEntries:
    contact, part, form = tap.contact, tap.part, tap.part.form
    source = _feature_sources(form, contact.x.aval.shape)
    flat = x_places.reshape(-1)
    feature_places = np.where(source >= 0, flat[np.maximum(source, 0)], -1)
    y, feature = pairs_of_places(y_places, feature_places)
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
    view = np.ravel_multi_index([index[c] for c in form.view], whole.shape(form.view)) if form.view else y * 0
    return KeptEntries(contact, tap.index, y[fits], source[feature][fits], np.broadcast_to(view, y.shape)[fits])


def _feature_sources(form: Any, shape: tuple[int, ...]) -> np.ndarray:
    """For each feature, the element of `x` that it is a copy of (-1: padding)."""
    numbers = np.arange(1, int(np.prod(shape, dtype=np.int64)) + 1, dtype=np.float32).reshape(shape)
    with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
        return np.asarray(form.phi(numbers)).reshape(-1).astype(np.int64) - 1


def _pull_through(program: StepProgram, env: dict, forward: Forward, args: Sequence[Any], kept: KeptProducts):
    """A function: cotangents at the taps -> cotangents of the group's old states, through the kept entries alone."""
    xs = list(dict.fromkeys(k.contact.x for k in kept.entries))

    def operands(hidden: Sequence[Any]) -> list[Any]:
        def one(args_t, hidden_t, other_t, saved_t):
            done = program.run_step(step_env(program, env, args_t, hidden_t, other_t), saved_t, {}, xs, kept.held)
            return [done[x] for x in xs]

        return jax.vmap(one)(list(args), hidden, forward.other, forward.saved)

    values, pull = jax.vjp(operands, forward.hidden)

    def run(ybar: Sequence[Any]) -> list[Any]:
        xbar = [jnp.zeros((v.shape[0], v[0].size), v.dtype) for v in values]
        for k in kept.entries:
            n = xs.index(k.contact.x)
            terms = _pick(ybar[k.tap].reshape(xbar[n].shape[0], -1), k.y) * env[k.contact.view.var].reshape(-1)[k.view]
            whole = np.array_equal(k.x, np.arange(xbar[n].shape[1]))
            xbar[n] = xbar[n] + terms if whole else xbar[n].at[:, k.x].add(terms)
        hidden = pull([x.reshape(v.shape) for x, v in zip(xbar, values, strict=True)])[0]
        return group_states(program, hidden)[kept.group]

    return run


def _pick(array: Any, elements: np.ndarray) -> Any:
    if np.array_equal(elements, np.arange(array.shape[1])):
        return array
    return jnp.take(array, elements, axis=1)
