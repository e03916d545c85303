"""Exits: the values by which the rest of a step reads a hidden group.

An exit is a value that depends on the group's old states and contacts position by position (a new
state, a spike, an activation of it) and is read by something that does not: a product with a
readout or the next layer's weight, a loss. The step's loss depends on the group through its exits
alone, apart from paths that lead back into the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.aligner import Edge
from etrace_bridge.compiler.core_equations import held_operands
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read
from etrace_bridge.compiler.primitives import is_float
from etrace_bridge.step.aligned import follow_positions, sheets
from etrace_bridge.step.linearise import Grouped, LossGradient, group_states
from etrace_bridge.step.program import StepProgram, tap, with_value
from etrace_bridge.step.steps import Steps
from etrace_bridge.step.taps import derivative_sources


@dataclass(frozen=True)
class Exit:
    """One exit of a group.

    Attributes:
        var: the value.
        edges: where it is read, (equation, operand).
        outputs: which outputs of the step it is.
        sheet: for each position of the group, the element of the value (-1: none).
    """

    var: Var
    edges: tuple[Edge, ...]
    outputs: tuple[int, ...]
    sheet: np.ndarray


@dataclass(frozen=True)
class GroupExits:
    """The exits of one group.

    Attributes:
        exits: the exits.
        shared: for each, whether it is an exit of an earlier group too. A contact that feeds both
            groups reaches it once; that is counted with the earlier one.
        held: operands that keep the exits a position by position function of the group.
    """

    exits: tuple[Exit, ...]
    shared: tuple[bool, ...]
    held: dict[int, tuple[int, ...]]


def find_exits(program: StepProgram, broadcast: bool = False) -> list[GroupExits]:
    """Return the exits of every group.

    Args:
        program: the step.
        broadcast: also what only other groups read: the step's loss does not depend on that, but a
            signal of its own may go there.
    """
    pre_cuts = program.graph.structure.facts.pre_cuts
    readers = [
        *program.out_vars,
        *(v for group in program.groups for v in group.hidden_outvars if broadcast),
    ]
    is_read = derivative_sources(program.eqns, readers)
    result: list[GroupExits] = []
    for group in program.groups:
        aligned = follow_positions(program, group, with_contacts=True, stops=pre_cuts)
        back = derivative_sources(program.eqns, group.hidden_outvars)
        edges: dict[Var, list[Edge]] = {}
        for i, k in aligned.ends:
            outs, operand = program.eqns[i].outvars, _operand(program, (i, k))
            if (
                (i, k) not in pre_cuts
                and any(v in is_read for v in outs)
                and not any(v in back for v in outs)
            ):
                edges.setdefault(operand, []).append((i, k))
        outputs: dict[Var, list[int]] = {}
        for n, v in enumerate(program.out_vars):
            if not isinstance(v, Literal) and v in aligned.positions:
                outputs.setdefault(v, []).append(n)
        exits = [
            Exit(v, tuple(edges.get(v, ())), tuple(outputs.get(v, ())), sheet)
            for v in dict.fromkeys([*edges, *outputs])
            for sheet in sheets(aligned.positions[v], group.leaves[0].num_positions)
        ]
        earlier = {e.var for own in result for e in own.exits}
        result.append(
            GroupExits(tuple(exits), tuple(e.var in earlier for e in exits), aligned.held)
        )
    return result


def _operand(program: StepProgram, edge: Edge) -> Any:
    return program.eqns[edge[0]].invars[edge[1]]


def at_exit(program: StepProgram, g: int, exit_: Exit, value: Any) -> Any:
    """Return the exit's elements at the positions of its group; leading axes are kept."""
    lead = value.ndim - len(exit_.var.aval.shape)
    front, flat = value.shape[:lead], value.reshape(*value.shape[:lead], -1)
    if not np.array_equal(exit_.sheet, np.arange(flat.shape[-1])):
        flat = jnp.where(exit_.sheet >= 0, jnp.take(flat, np.maximum(exit_.sheet, 0), axis=lead), 0)
    return flat.reshape(*front, *program.groups[g].varshape)


def linearise_exits(steps: Steps, g: int, group_exits: GroupExits):
    """Return the pull-back of a group's exits for all steps.

    It maps cotangents of the exits to those of (states, taps).
    """
    program, exits = steps.program, group_exits.exits
    feeding = [
        t for t in program.taps if any(leg.group == program.groups[g].index for leg in t.legs)
    ]
    tap_vars, exit_vars = [t.part.var for t in feeding], [e.var for e in exits]

    def values(hidden: Sequence[jax.Array], deltas: Sequence[jax.Array]) -> list[Any]:
        def one(start: dict, saved: Any, deltas_t: Sequence[jax.Array]) -> list[Any]:
            done = program.run_step(
                start,
                saved,
                dict(zip(tap_vars, deltas_t, strict=True)),
                exit_vars,
                group_exits.held,
            )
            return [at_exit(program, g, e, done[e.var]) for e in exits]

        return steps.each(one, deltas, hidden=hidden)

    zeros = program.zero_taps((steps.length,))
    made, pull = jax.vjp(values, steps.forward.hidden, [zeros[v] for v in tap_vars])
    feeds_earlier = [any(program.group_index(leg) < g for leg in t.legs) for t in feeding]

    def run(cotangents: Sequence[jax.Array]) -> tuple[list[Any], list[Any]]:
        cotangents = [c.astype(e.dtype) for c, e in zip(cotangents, made, strict=True)]
        hidden, by_tap = pull(cotangents)
        if any(feeds_earlier) and any(group_exits.shared):
            alone = pull(
                [
                    jnp.zeros_like(c) if s else c
                    for c, s in zip(cotangents, group_exits.shared, strict=True)
                ]
            )[1]
            by_tap = [
                b if twice else a for a, b, twice in zip(by_tap, alone, feeds_earlier, strict=True)
            ]
        taps: list[Any] = [None] * len(program.taps)
        for t, x in zip(feeding, by_tap, strict=True):
            taps[t.index] = x
        return group_states(program, hidden)[g], taps

    return run


def exit_cotangents(steps: Steps, exits: Sequence[GroupExits]) -> Grouped:
    """Return the derivative of each step's loss by the exits, [group][exit].

    Each one is at its group's positions.
    """
    program, length = steps.program, steps.length
    edges = sorted({edge for of_group in exits for e in of_group.exits for edge in e.edges})
    shapes = [_operand(program, edge).aval for edge in edges]

    def total(deltas: Sequence[jax.Array], shifts: Sequence[jax.Array]) -> Any:
        def one(
            start: dict,
            saved: Any,
            deltas_t: Sequence[jax.Array],
            shifts_t: Sequence[jax.Array],
            target: Any,
        ) -> Any:
            flat = _run_tapped(program, start, saved, dict(zip(edges, deltas_t, strict=True)))
            flat = [o if s is None else o + s for o, s in zip(flat, shifts_t, strict=True)]
            return steps.loss(program.output_tree(flat), target)

        return jnp.sum(steps.each(one, deltas, shifts, steps.targets) * steps.weights)

    deltas = [jnp.zeros((length, *a.shape), a.dtype) for a in shapes]
    shifts = [
        jnp.zeros((length, *v.aval.shape), v.aval.dtype) if is_float(v) else None
        for v in program.out_vars
    ]
    by_edge, by_output = jax.grad(total, argnums=(0, 1))(deltas, shifts)
    found = dict(zip(edges, by_edge, strict=True))

    def cotangent(e: Exit) -> Any:
        return sum([found[edge] for edge in e.edges] + [by_output[n] for n in e.outputs])

    return [
        [at_exit(program, g, e, cotangent(e)) for e in of_group.exits]
        for g, of_group in enumerate(exits)
    ]


def signal_gradient(
    steps: Steps, exits: Sequence[GroupExits], signals: dict[Var, jax.Array]
) -> LossGradient:
    """Return `loss_gradient` with `core` credit for given signals at the exits.

    The signals replace the loss's derivative by the exits.

    Args:
        steps: the steps.
        exits: the exits of every group.
        signals: for the variable of each exit, its signal (K, …).
    """
    program = steps.program
    held = held_operands(
        program.eqns, {edge for of_group in exits for e in of_group.exits for edge in e.edges}
    )
    core = {
        key: (*program.pre_cut_operands.get(key, ()), *held.get(key, ()))
        for key in {**program.pre_cut_operands, **held}
    }
    stopped = {n for of_group in exits for e in of_group.exits for n in e.outputs}
    exit_vars, tap_vars = list(signals), [t.part.var for t in program.taps]

    def total(
        theta: Sequence[jax.Array],
        hidden: Sequence[jax.Array],
        deltas: Sequence[jax.Array],
        held: dict,
    ):
        def one(
            start: dict,
            saved: Any,
            deltas_t: Sequence[jax.Array],
            target: Any,
            weight: Any,
            signals_t: Sequence[jax.Array],
        ):
            taps = dict(zip(tap_vars, deltas_t, strict=True))
            done = program.run_step(start, saved, taps, [*program.out_vars, *exit_vars], held)
            flat = [read(done, v) for v in program.out_vars]
            output = program.output_tree(
                [lax.stop_gradient(o) if n in stopped else o for n, o in enumerate(flat)]
            )
            loss = steps.loss(output, target)
            surrogate = sum(jnp.sum(s * done[v]) for s, v in zip(signals_t, exit_vars, strict=True))
            return weight * loss + surrogate, (loss, output)

        more = deltas, steps.targets, steps.weights, list(signals.values())
        summed, aux = steps.with_weights(theta).each(one, *more, hidden=hidden)
        return jnp.sum(summed), aux

    hidden, deltas = steps.forward.hidden, list(program.zero_taps((steps.length,)).values())
    grad = jax.grad(total, argnums=(0, 2), has_aux=True)
    (direct, at_taps), (losses, outputs) = grad(list(steps.theta), hidden, deltas, held)
    b = jax.grad(lambda hidden: total(steps.theta, hidden, deltas, core)[0])(hidden)
    return LossGradient(losses, outputs, direct, at_taps, group_states(program, b))


def _run_tapped(
    program: StepProgram, env: dict[Var, Any], saved: Sequence[jax.Array], deltas: dict[Edge, Any]
) -> list[Any]:
    """Return the step's outputs, with taps on edges."""
    number = {id(eqn): i for i, eqn in enumerate(program.eqns)}
    known = dict(zip(program.saved_vars, saved, strict=True))

    def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        i = number[id(eqn)]
        operands = [tap(v, deltas[i, k]) if (i, k) in deltas else v for k, v in enumerate(operands)]
        results = program.tuning.bind(eqn, operands)
        return [
            with_value(r, known[v]) if v in known else r
            for v, r in zip(eqn.outvars, results, strict=True)
        ]

    done = evaluate(needed_equations(program.step_eqns, program.out_vars), dict(env), on_equation)
    return [read(done, v) for v in program.out_vars]
