"""What trace rules remember: a dense trace of weight size, its two factors, or filtered features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.weight_views import Contact
from etrace_bridge.step.program import StepProgram


@dataclass(frozen=True)
class Dense:
    """The trace itself: for each trace of the program and each row of its group B·P elements.

    Attributes:
        dtype: the dtype in which it is stored, e.g. `"bfloat16"`; None keeps the states' dtype.
    """

    schedule: ClassVar[str] = "backward"
    dtype: str | None = None

    def init(self, program: StepProgram, rows: Sequence[int]) -> list[list[Any]]:
        """Return zeros, [trace][row]; `rows` counts the rows of each group."""

        def zeros(leg: Leg) -> list[Any]:
            shape = leg.part.form.shape(leg.part.form.trace)
            dtype = self.dtype or leg.part.var.aval.dtype
            return [jnp.zeros(shape, dtype) for _ in range(rows[program.group_index(leg)])]

        return [zeros(leg) for leg in program.traces]

    def reset(
        self, program: StepProgram, memory: list[list[Any]], keep: jax.Array
    ) -> list[list[Any]]:
        """Return the traces with the rows of some batch elements set to zero."""
        cleared = []
        for leg, rows in zip(program.traces, memory, strict=True):
            form = leg.part.form
            mask = _batch_rows(program.groups[program.group_index(leg)], leg, keep)
            mask = mask.reshape(form.shape(form.out)).transpose(
                [form.out.index(c) for c in form.trace_out]
            )
            mask = mask.reshape(*mask.shape, *(1 for _ in form.contracted))
            cleared.append([eps * mask.astype(eps.dtype) for eps in rows])
        return cleared


@dataclass(frozen=True)
class Channel:
    """Legs whose outputs are only added up and feed the same positions: they share one filter.

    Attributes:
        legs: the legs.
        tap: index of the tap of one of them.
        group: index of the group in `program.groups`.
        colour: its colour.
    """

    legs: tuple[Leg, ...]
    tap: int
    group: int
    colour: int

    @property
    def has_product(self) -> bool:
        """Whether the filter is `f̄`, of products and of biases added to them.

        Otherwise it is `eps`, of element-wise contacts.
        """
        return any(leg.contact.x is not None for leg in self.legs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the filter: that of the contact's piece."""
        return self.legs[0].part.var.aval.shape

    def zeros(self, program: StepProgram) -> list[Any]:
        """Return a filter at its start, for each state of the group."""
        dtype = self.legs[0].part.var.aval.dtype
        return [jnp.zeros(self.shape, dtype) for _ in range(program.groups[self.group].num_state)]


def find_channels(program: StepProgram) -> tuple[list[Channel], list[Channel]]:
    """Return the channels with products, and the others."""
    found: dict[Any, list[Leg]] = {}
    for leg in program.legs:
        key = (program.roots[program.tap_index(leg)], leg.group, leg.positions.tobytes())
        found.setdefault(key, []).append(leg)
    channels = [
        Channel(
            tuple(legs),
            program.tap_index(legs[0]),
            program.group_index(legs[0]),
            program.colour_of(legs[0]),
        )
        for legs in found.values()
    ]
    return [c for c in channels if c.has_product], [c for c in channels if not c.has_product]


def contacts_with_data(program: StepProgram) -> list[Contact]:
    """Return the traced contacts that are products."""
    return [c for c in program.traced_contacts if c.x is not None]


class Filters:
    """Base of memories that are filters: how they are stored between chunks.

    Attributes:
        dtype: the dtype in which they are stored, e.g. `"bfloat16"`; None keeps the states' dtype.
    """

    schedule: ClassVar[str] = "forward"
    dtype: str | None = None

    def zeros(self, program: StepProgram) -> dict[str, Any]:
        """Return the filters before the first step, as a chunk computes them."""
        raise InputError(f"The memory `{type(self).__name__}` does not define `zeros(program)`.")

    def init(self, program: StepProgram, rows: Sequence[int]) -> dict[str, Any]:
        """Return the filters before the first step."""
        return self.stored(self.zeros(program))

    def stored(self, filters: dict[str, Any]) -> dict[str, Any]:
        """Convert filters to the dtype in which they are stored.

        The norms `n` are small and keep their dtype.
        """
        if self.dtype is None:
            return filters
        norms = {name: x for name, x in filters.items() if name == "n"}
        return {**jax.tree.map(lambda x: x.astype(self.dtype), filters), **norms}

    def computed(self, program: StepProgram, filters: dict[str, Any]) -> dict[str, Any]:
        """Convert stored filters to the dtype in which a chunk computes them."""
        if self.dtype is None:
            return filters
        like = jax.eval_shape(lambda: self.zeros(program))
        return jax.tree.map(lambda x, wanted: x.astype(wanted.dtype), filters, like)


@dataclass(frozen=True)
class Factored(Filters):
    """`eps ≈ f̄ / n ⊗ x̄`, two low-pass filters of B·(I + S·H) elements in place of B·P·S.

    `rules/pp_prop.py` has the equations.

    Attributes:
        alpha: the share of the filters that is left after a step.
        dtype: the dtype in which the filters are stored between chunks, e.g. `"bfloat16"`; None keeps the
            states' dtype.
    """

    alpha: float
    dtype: str | None = None

    def zeros(self, program: StepProgram) -> dict[str, Any]:
        """Filters `x` by contact, `f` and `eps` [channel][state], and `n` by group, one per batch
        element.
        """
        products, others = find_channels(program)
        return {
            "x": {
                c.index: jnp.zeros(c.traced_form.shape(c.traced_form.feature), c.y.aval.dtype)
                for c in contacts_with_data(program)
            },
            "f": [c.zeros(program) for c in products],
            "n": [jnp.zeros(g.varshape[:1], g.hidden_invars[0].aval.dtype) for g in program.groups],
            "eps": [c.zeros(program) for c in others],
        }

    def reset(
        self, program: StepProgram, memory: dict[str, Any], keep: jax.Array
    ) -> dict[str, Any]:
        """Return the filters with the rows of some batch elements set to zero."""

        def cleared(channels: Sequence[Channel], filters: list[Any]) -> list[Any]:
            result = []
            for channel, states in zip(channels, filters, strict=True):
                mask = _batch_rows(program.groups[channel.group], channel.legs[0], keep).reshape(
                    channel.shape
                )
                result.append([s * mask.astype(s.dtype) for s in states])
            return result

        x = {c.index: _clear(program, c, memory["x"], keep) for c in contacts_with_data(program)}
        products, others = find_channels(program)
        n = [n * keep.astype(n.dtype) for n in memory["n"]]
        return {
            "x": x,
            "f": cleared(products, memory["f"]),
            "n": n,
            "eps": cleared(others, memory["eps"]),
        }


@dataclass(frozen=True)
class Presynaptic(Filters):
    """`x̄_t = leak x̄_(t-1) + x_t`, the filtered features of every product: B·I elements.

    The cotangent at the product's output meets `x̄_t` instead of `x_t`. A bias that is only added
    to a product is a column of it whose feature is always 1. Other element-wise contacts are not
    filtered.

    Attributes:
        leak: the share of the filter that is left after a step; with 0 nothing is remembered.
        dtype: as in `Factored`.
    """

    leak: float
    dtype: str | None = None

    def zeros(self, program: StepProgram) -> dict[str, Any]:
        """Filters `x` by contact, and `ones` by tap of a bias."""
        if not self.leak:
            return {"x": {}, "ones": {}}
        taps = [program.taps[n] for n in filtered_taps(program)]
        contacts = {t.contact.index: t.contact for t in taps if t.contact.x is not None}
        return {
            "x": {
                n: jnp.zeros(c.traced_form.shape(c.traced_form.feature), c.y.aval.dtype)
                for n, c in contacts.items()
            },
            "ones": {
                t.index: jnp.zeros(t.part.var.aval.shape, t.part.var.aval.dtype)
                for t in taps
                if t.contact.x is None
            },
        }

    def reset(
        self, program: StepProgram, memory: dict[str, Any], keep: jax.Array
    ) -> dict[str, Any]:
        """Return the filters with the rows of some batch elements set to zero."""
        contacts = [c for c in contacts_with_data(program) if c.index in memory["x"]]
        x = {c.index: _clear(program, c, memory["x"], keep) for c in contacts}
        ones = {}
        for n, old in memory["ones"].items():
            leg = program.taps[n].legs[0]
            mask = _batch_rows(program.groups[program.group_index(leg)], leg, keep)
            ones[n] = old * mask.reshape(old.shape).astype(old.dtype)
        return {"x": x, "ones": ones}


def filtered_taps(program: StepProgram) -> list[int]:
    """Return taps that feed a state by a product, and those of biases that are only added to one."""
    products = {program.roots[t.index] for t in program.taps if t.contact.x is not None}
    return [t.index for t in program.taps if t.legs and program.roots[t.index] in products]


def _clear(
    program: StepProgram, contact: Contact, filters: dict[int, jax.Array], keep: jax.Array
) -> Any:
    """Return filtered features with the rows of some batch elements set to zero."""
    axis, old = _batch_axis(program, contact), filters[contact.index]
    mask = keep.reshape([-1 if n == axis else 1 for n in range(old.ndim)])
    return old * mask.astype(old.dtype)


def _batch_rows(group: HiddenGroup, leg: Leg, keep: jax.Array) -> Any:
    """Return `keep` spread to the elements of a leg's piece.

    Elements that feed nothing get zero.
    """
    if not group.varshape or group.varshape[0] != keep.shape[0]:
        raise InputError(
            f"The hidden state `{group.name}` has shape {group.varshape}, so its first axis is not "
            f"the batch of {keep.shape[0]}. Single batch elements can only be reset where the "
            "batch comes first; call `reset()` without a mask."
        )
    positions = jnp.asarray(leg.positions)
    rows = positions // (group.leaves[0].num_positions // group.varshape[0])
    return jnp.where(positions >= 0, jnp.take(keep, jnp.maximum(rows, 0)), 0)


def _batch_axis(program: StepProgram, contact: Contact) -> int:
    """Return the axis of a contact's features that counts batch elements."""
    leg = next(leg for leg in program.legs if leg.contact is contact)
    group = program.groups[program.group_index(leg)]
    form = leg.part.form
    rows = leg.positions.reshape(form.shape(form.out)) // (
        group.leaves[0].num_positions // group.varshape[0]
    )
    for letter in form.feature:
        if letter in form.out and form.sizes[letter] == group.varshape[0]:
            axis = form.out.index(letter)
            shape = [-1 if n == axis else 1 for n in range(len(form.out))]
            if ((rows < 0) | (rows == np.arange(group.varshape[0]).reshape(shape))).all():
                return contact.traced_form.feature.index(letter)
    raise InputError(
        "`reset` for single batch elements needs a batch axis, and the data that meets "
        f"`{contact.view}` has none that its hidden states share. Reset the whole batch instead."
    )
