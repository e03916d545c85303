"""The contacts of a step that have a trace, and which of their pieces share cotangents or a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.primitives import is_float, is_structural, passes_derivative
from etrace_bridge.compiler.weight_views import Contact, Part
from etrace_bridge.step.equations import StepEquations

SUMS = frozenset({"add", "add_any"})


@dataclass(frozen=True)
class Tap:
    """A piece of a traced contact's output, and the legs that start from it."""

    index: int
    contact: Contact
    part: Part
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class StepTaps(StepEquations):
    """A step's equations, and its contacts with a trace.

    Attributes:
        taps: the pieces of every contact that has a trace.
        legs: all legs, in the order of their taps.
        traced_contacts: the contacts of the taps.
        traces: one leg per trace: all pieces of a contact, as one leg, where each feeds the same
            group and no other; else a leg each.
        roots: for each tap, the sum that it ends up in: a piece that is only ever added to others
            has the cotangent of the sum. All gates' products and biases of one pre-activation share
            a root.
        only_traced: for each weight, whether all that reads it, as it is or in pieces, has a trace.
        upstream_taps: pieces of traced contacts that reach a state only through a cut.
        upstream: whether a weight without a trace, or one of `upstream_taps`, reaches a state that
            matters.
    """

    taps: tuple[Tap, ...]
    legs: tuple[Leg, ...]
    traced_contacts: tuple[Contact, ...]
    traces: tuple[Leg, ...]
    roots: tuple[Var, ...]
    only_traced: tuple[bool, ...]
    upstream_taps: frozenset[int]
    upstream: bool

    def taps_of(self, of: Contact | Leg) -> list[Tap]:
        """Return the pieces of a contact, or of a leg or trace."""
        if isinstance(of, Contact):
            return [t for t in self.taps if t.contact is of]
        return [
            t
            for t in self.taps
            if t.contact is of.contact and (t.part is of.part or of.part.var is of.contact.y)
        ]

    def tap_index(self, leg: Leg) -> int:
        """Return the index of the tap that a leg starts from."""
        return next(t.index for t in self.taps if t.part is leg.part)


def read_taps(step: StepEquations) -> StepTaps:
    """Find the contacts with a trace."""
    structure = step.graph.structure
    traced = {leg.contact.index for leg in structure.legs}
    pieces = [(c, p) for c in structure.use.contacts if c.index in traced for p in c.parts]
    taps = tuple(
        Tap(n, c, p, tuple(leg for leg in structure.legs if leg.part is p))
        for n, (c, p) in enumerate(pieces)
    )
    contacts = tuple({t.contact.index: t.contact for t in taps}.values())
    reach = _reaching_states(step)
    upstream_taps = frozenset(t.index for t in taps if not t.legs and t.part.var in reach)
    upstream_weights = any(c.index not in traced and c.y in reach for c in structure.use.contacts)
    return StepTaps(
        **vars(step),
        taps=taps,
        legs=tuple(leg for t in taps for leg in t.legs),
        traced_contacts=contacts,
        traces=_traces(contacts, taps),
        roots=find_roots(step, [t.part.var for t in taps]),
        only_traced=_only_traced(step, contacts),
        upstream_taps=upstream_taps,
        upstream=bool(upstream_taps) or upstream_weights,
    )


def _traces(contacts: Sequence[Contact], taps: Sequence[Tap]) -> tuple[Leg, ...]:
    traces: list[Leg] = []
    for contact in contacts:
        pieces = [t for t in taps if t.contact is contact]
        one_group = {tuple(leg.group for leg in t.legs) for t in pieces}
        if len(pieces) > 1 and len(one_group) == 1 and len(one_group.pop()) == 1:
            traces.append(_join_legs(contact, [t.legs[0] for t in pieces]))
        else:
            traces += [leg for t in pieces for leg in t.legs]
    return tuple(traces)


def _join_legs(contact: Contact, legs: Sequence[Leg]) -> Leg:
    form: Any = contact.form
    axis = form.out.index(legs[0].part.letter)
    places = np.concatenate(
        [leg.positions.reshape(leg.part.form.shape(form.out)) for leg in legs], axis
    )
    return Leg(contact, Part(contact.y, form), legs[0].group, places.reshape(contact.y.aval.shape))


def find_roots(step: StepEquations, some: Sequence[Var]) -> tuple[Var, ...]:
    """For each variable, the sum that it ends up in.

    Itself, if it is not only ever added to others.
    """
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in step.eqns:
        for v in variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    outputs = set(variables(step.graph.module_info.jaxpr.outvars))

    def root(v: Var) -> Var:
        while (
            v not in outputs
            and len(readers.get(v, ())) == 1
            and readers[v][0].primitive.name in SUMS
        ):
            v = readers[v][0].outvars[0]
        return v

    return tuple(map(root, some))


def _only_traced(step: StepEquations, contacts: Sequence[Contact]) -> tuple[bool, ...]:
    traced = {id(c.eqn) for c in contacts}
    others = [eqn for eqn in step.eqns if id(eqn) not in traced]
    read: set[Var] = set(variables([*step.out_vars, *step.new_vars]))
    for eqn in reversed(others):
        if (
            not is_structural(eqn)
            or step.tier[eqn.outvars[0]] > 0
            or any(v in read for v in eqn.outvars)
        ):
            read.update(variables(eqn.invars))
    return tuple(v not in read for v in step.weight_vars)


def _reaching_states(step: StepEquations) -> set[Var]:
    """Return variables from which a derivative leads to a state that matters."""
    matter = step.graph.structure.matter
    return derivative_sources(
        step.eqns,
        [
            leaf.outvar
            for leaf in step.leaves
            if leaf.invar in matter and not isinstance(leaf.outvar, Literal)
        ],
    )


def derivative_sources(eqns: Sequence[JaxprEqn], targets: Sequence[Any]) -> set[Var]:
    """Return variables that a derivative can come back to from `targets`."""
    reach = {v for v in variables(targets) if is_float(v)}
    for eqn in reversed(eqns):
        if passes_derivative(eqn) and any(v in reach for v in eqn.outvars):
            reach.update(v for v in variables(eqn.invars) if is_float(v))
    return reach
