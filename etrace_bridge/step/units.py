"""Units: what the weights of a step feed.

A *unit* is a position of a hidden group, with all weights that feed it. Where a contact's output
feeds no group position by position, or several groups, each of its elements is a unit by itself.
Hidden values are numbered row by row; a row is a batch element, or the whole batch where the step
mixes its elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import Literal, Var, common_dtype
from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.primitives import is_float, passes_derivative
from etrace_bridge.compiler.weight_views import Contact, Part
from etrace_bridge.step.batch_rows import independent_rows
from etrace_bridge.step.linearise import group_states
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.taps import find_roots


@dataclass(frozen=True)
class Piece:
    """A piece of a contact's output, and the groups that it feeds position by position.

    Attributes:
        contact: the contact.
        part: the piece.
        legs: one per group.
    """

    contact: Contact
    part: Part
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class Sum:
    """Pieces that are only ever added up: one derivative serves all of them.

    Attributes:
        var: their sum.
        pieces: the pieces.
        unit: the unit of each element of the sum, counted through all rows.
        crosses: whether it reaches a new state within the step by a path that is not in the core.
    """

    var: Var
    pieces: tuple[Piece, ...]
    unit: np.ndarray
    crosses: bool


@dataclass(frozen=True)
class Block:
    """Pieces of one contact that share an array: all gates of a fused product, or a single piece.

    Attributes:
        contact: the contact.
        pieces: the pieces with their sums, in the order of the contact's output.
        form: the linear form of all of them.
        letter: the output letter along which they lie; empty for one piece.
    """

    contact: Contact
    pieces: tuple[tuple[Sum, Piece], ...]
    form: ContactForm
    letter: str


@dataclass(frozen=True)
class Family:
    """Units of one kind.

    Attributes:
        rows: number of rows.
        groups: for each state of a unit, its group in `program.groups` and its number there.
        positions: for each unit, through all rows, and each of its states, the position in the
            group (-1: none); (units, S).
        states: for each unit of the first row and each of its states, the number of that hidden
            value in the row (-1: none); (units / rows, S).
        sums: what feeds the units.
    """

    rows: int
    groups: tuple[tuple[int, int], ...]
    positions: np.ndarray
    states: np.ndarray
    sums: tuple[Sum, ...]

    @property
    def units(self) -> int:
        """Units of all rows."""
        return len(self.positions)

    @property
    def pieces(self) -> list[tuple[Sum, Piece]]:
        """All pieces, with their sums."""
        return [(s, p) for s in self.sums for p in s.pieces]

    @property
    def blocks(self) -> list[Block]:
        """All pieces, those of one contact together where they are the whole of it."""
        by_contact: dict[int, list[tuple[Sum, Piece]]] = {}
        for summed, piece in self.pieces:
            by_contact.setdefault(piece.contact.index, []).append((summed, piece))
        return [block for pieces in by_contact.values() for block in _join_pieces(pieces)]


@dataclass(frozen=True)
class Layout:
    """The hidden values as rows of `size` numbers each, and the families of units.

    Attributes:
        rows: batch elements, or 1 where the step mixes them.
        size: n, the hidden values of a row.
        dtype: their common dtype.
        families: the units.
        untraced: whether a weight reaches a state by a contact that has no linear form.
    """

    rows: int
    size: int
    dtype: Any
    families: tuple[Family, ...]
    untraced: bool


def _join_pieces(pieces: list[tuple[Sum, Piece]]) -> list[Block]:
    pieces = sorted(pieces, key=lambda own: own[1].part.start)
    contact, letter = pieces[0][1].contact, pieces[0][1].part.letter
    tiles = [(p.part.letter, p.part.start) for _, p in pieces]
    if letter and len(pieces) > 1 and contact.form is not None:
        sizes = [p.part.form.sizes[letter] for _, p in pieces]
        starts = [0, *np.cumsum(sizes).tolist()]
        if (
            tiles == [(letter, at) for at in starts[:-1]]
            and starts[-1] == contact.form.sizes[letter]
        ):
            return [Block(contact, tuple(pieces), contact.form, letter)]
    return [single_block(*own) for own in pieces]


def single_block(summed: Sum, piece: Piece) -> Block:
    """One piece by itself."""
    return Block(piece.contact, ((summed, piece),), piece.part.form, "")


def find_layout(program: StepProgram) -> Layout:
    """Find the units of a step."""
    reach, crossing = _paths_to_states(program)
    sums = _find_sums(program, reach)
    rows = independent_rows(program, list(sums))
    size = sum(leaf.invar.aval.size for leaf in program.leaves) // rows
    numbers = state_numbers(program, rows, size)
    families: dict[Any, list[Sum]] = {}
    for var, pieces in sums.items():
        places = {program.group_index(leg): leg.positions.reshape(-1) for leg in pieces[0].legs}
        only = next(iter(places.values())) if len(places) == 1 else np.empty(0)
        is_group = len(only) > 0 and np.array_equal(np.sort(only), np.arange(only.size))
        unit = only if is_group else np.arange(var.aval.size)
        member = Sum(var, tuple(pieces), unit, var in crossing)
        families.setdefault(tuple(places) if is_group else var, []).append(member)
    return Layout(
        rows,
        size,
        common_dtype(*(leaf.invar.aval.dtype for leaf in program.leaves)),
        tuple(_family(program, f, rows, numbers) for f in families.values()),
        any(c.y in reach and not c.parts for c in program.graph.structure.use.contacts),
    )


def weight_unit_axes(program: StepProgram) -> dict[Var, int]:
    """Return the axis of a weight along which its units lie, of weights that meet data as they are."""
    axes: dict[Var, int] = {}
    for contact in program.traced_contacts:
        form: Any = contact.form
        shared = [n for n, letter in enumerate(form.view) if letter in form.out]
        if shared and contact.view.var in program.weight_vars:
            axes.setdefault(contact.view.var, shared[0])
    return axes


def _family(
    program: StepProgram, sums: list[Sum], rows: int, numbers: list[list[np.ndarray]]
) -> Family:
    first = sums[0]
    groups, positions, states = [], [], []
    for leg in first.pieces[0].legs:
        g, at = program.group_index(leg), np.full(first.var.aval.size, -1)
        at[first.unit] = leg.positions.reshape(-1)
        for s, number in enumerate(numbers[g]):
            groups.append((g, s))
            positions.append(at)
            states.append(np.where(at >= 0, number[np.maximum(at, 0)], -1)[: len(at) // rows])
    none = np.zeros((first.var.aval.size, 0), int)
    return Family(
        rows,
        tuple(groups),
        np.stack(positions, 1) if groups else none,
        np.stack(states, 1) if groups else none[: len(none) // rows],
        tuple(sums),
    )


def state_numbers(program: StepProgram, rows: int, size: int) -> list[list[np.ndarray]]:
    """For each group and state, the number in its row of the hidden value at every position."""
    numbers, offset = [], 0
    for leaf in program.leaves:
        per_row = leaf.invar.aval.size // rows
        each = np.broadcast_to(offset + np.arange(per_row), (rows, per_row))
        numbers.append(each.reshape(leaf.invar.aval.shape))
        offset += per_row
    with jax.ensure_compile_time_eval():
        grouped = group_states(program, [jnp.asarray(x) for x in numbers])
        return [[np.asarray(s).reshape(-1) for s in states] for states in grouped]


def _find_sums(program: StepProgram, reach: set[Var]) -> dict[Var, list[Piece]]:
    """Return every sum of pieces that reaches a state that matters."""
    contacts = program.graph.structure.use.contacts
    parts = [(c, p) for c in contacts for p in c.parts if p.var in reach]
    found: dict[Var, list[Piece]] = {}
    for (contact, part), root in zip(
        parts, find_roots(program, [p.var for _, p in parts]), strict=True
    ):
        legs = tuple(leg for leg in program.legs if leg.part is part)
        found.setdefault(root, []).append(Piece(contact, part, legs))
    return found


def _paths_to_states(program: StepProgram) -> tuple[set[Var], set[Var]]:
    """Return the variables whose derivative leads to a new state.

    The second set are those with a path outside the core.
    """
    structure = program.graph.structure
    core, cuts = set(structure.alignment.core), structure.alignment.cuts
    new = [leaf.outvar for leaf in program.leaves if leaf.invar in structure.matter]
    reach, crossing = {v for v in variables(new) if is_float(v)}, set()
    for i, eqn in reversed(list(enumerate(program.eqns))):
        outs = [v for v in eqn.outvars if v in reach]
        if not outs or not passes_derivative(eqn):
            continue
        for k, v in enumerate(eqn.invars):
            if isinstance(v, Literal) or not is_float(v):
                continue
            reach.add(v)
            if i not in core or (i, k) in cuts or not crossing.isdisjoint(outs):
                crossing.add(v)
    return reach, crossing
