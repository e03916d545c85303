"""Rows beside the states of a hidden group: filtered eligibilities of its exits.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    ē_t   = kappa ē_(t-1) + U_t eps_(t-1) + du_t ⊗ x_t

`U_t` and `du_t` are the derivatives of the exits (see `step.exits`), position by position. Together
this is one recursion with `D = [[D, 0], [U, kappa]]` and `df = [df; du]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from etrace_bridge.step.exits import GroupExits, linearise_exits
from etrace_bridge.step.linearise import Blocks, ContactRows, CoreLinear, Grouped
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps


def with_filtered_rows(
    steps: Steps, core: CoreLinear, exits: Sequence[GroupExits], kappa: float
) -> tuple[Blocks, ContactRows]:
    """Return `D = [[D, 0], [U, kappa]]` and `df = [df; du]`.

    Args:
        steps: K steps.
        core: `D` and `df` of the states.
        exits: the exits of each group that are filtered.
        kappa: what is left of a filtered value after a step.
    """
    program, colours = steps.program, range(len(steps.program.colours))
    pulls = [linearise_exits(steps, g, of_group) for g, of_group in enumerate(exits)]
    D, du = [], []  # du: [group][exit][tap]
    for g, of_group in enumerate(exits):
        group, count = program.groups[g], len(of_group.exits)
        like = jnp.zeros((steps.length, *group.varshape), group.hidden_invars[0].aval.dtype)
        unit_rows = [[like + float(m == n) for n in range(count)] for m in range(count)]
        of_exits = [pulls[g](row) for row in unit_rows]
        decays = [[like + kappa if m == n else None for n in range(count)] for m in range(count)]
        states = [[*row, *[None] * count] for row in core.D[g]]
        filtered = [[*U, *decay] for (U, _), decay in zip(of_exits, decays, strict=True)]
        D.append(states + filtered)
        du.append([taps for _, taps in of_exits])
    units = [_units(program, core.df.units[c], du, c) for c in colours]
    pull = [partial(_pull, program, core.df.pulls[c], pulls, c) for c in colours]
    first_taps = tuple(t.index if t.legs else None for t in program.taps)
    return D, ContactRows(units, pull, first_taps)


def _pull(
    program: StepProgram, of_states: Callable, of_exits: Sequence[Callable], c: int, a: Grouped
) -> list[Any]:
    """Return `a df` at every tap, for the groups of colour c."""
    states = [rows[: group.num_state] for rows, group in zip(a, program.groups, strict=True)]
    taps = of_states(states)
    for g in program.colours[c]:
        _, more = of_exits[g](a[g][program.groups[g].num_state :])
        taps = [
            x if y is None else y if x is None else x + y for x, y in zip(taps, more, strict=True)
        ]
    return taps


def _units(
    program: StepProgram, states: list[list[Any]], du: Sequence[Sequence[Any]], c: int
) -> list[list[Any]]:
    """Return `df` of every row [row][tap], for the groups of colour c."""
    members = program.colours[c]
    count = max(program.groups[g].num_state + len(du[g]) for g in members)
    nothing = [[None] * len(program.taps) for _ in range(count - len(states))]
    table = [[*row] for row in states] + nothing
    for g in members:
        for m, taps in enumerate(du[g], program.groups[g].num_state):
            table[m] = [
                old if new is None else new for old, new in zip(table[m], taps, strict=True)
            ]
    return table
