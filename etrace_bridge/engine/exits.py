"""Exits: the values by which the rest of a step reads a hidden group.

An exit is a value that depends on the group's old states and contacts position by position (a new state, a spike, an
activation of it) and is read by something that does not: a product with a readout or the next layer's weight, a loss.
The step's loss depends on the group through its exits alone, apart from paths that lead back into the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var, bind_equation
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read, variables
from etrace_bridge.compiler.positions import Edge
from etrace_bridge.compiler.primitives import is_float, passes_derivative
from etrace_bridge.engine.aligned import follow_places, sheets
from etrace_bridge.engine.convolution import as_product
from etrace_bridge.engine.forward import Forward
from etrace_bridge.engine.linearise import group_states, step_env
from etrace_bridge.engine.program import StepProgram, tap, with_value


@dataclass(frozen=True)
class Exit:
    """One exit of a group.

    Attributes:
        var: the value.
        edges: where it is read, (equation, operand).
        outputs: which outputs of the step it is.
        sheet: for each place of the group, the element of the value (-1: none).
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
        shared: for each, whether it is an exit of an earlier group too. A contact that feeds both groups reaches it once;
            that is counted with the earlier one.
        held: operands that keep the exits a position by position function of the group.
    """

    exits: tuple[Exit, ...]
    shared: tuple[bool, ...]
    held: dict[int, tuple[int, ...]]


def find_exits(program: StepProgram, broadcast: bool = False) -> list[GroupExits]:
    """The exits of every group.

    Args:
        program: the step.
        broadcast: also what only other groups read: the step's loss does not depend on that, but a signal of its own may go there.
    """
    pre_cuts = program.graph.structure.facts.pre_cuts
    readers = [*program.out_vars, *(v for group in program.groups for v in group.hidden_outvars if broadcast)]
    is_read = _reaching(program.eqns, readers)
    result: list[GroupExits] = []
    for group in program.groups:
        aligned = follow_places(program, group, with_contacts=True, stops=pre_cuts)
        back = _reaching(program.eqns, group.hidden_outvars)
        edges: dict[Var, list[Edge]] = {}
        for i, k in aligned.ends:
            outs, operand = program.eqns[i].outvars, _operand(program, (i, k))
            if (i, k) not in pre_cuts and any(v in is_read for v in outs) and not any(v in back for v in outs):
                edges.setdefault(operand, []).append((i, k))
        outputs: dict[Var, list[int]] = {}
        for n, v in enumerate(program.out_vars):
            if not isinstance(v, Literal) and v in aligned.places:
                outputs.setdefault(v, []).append(n)
        exits = [
            Exit(v, tuple(edges.get(v, ())), tuple(outputs.get(v, ())), sheet)
            for v in dict.fromkeys([*edges, *outputs])
            for sheet in sheets(aligned.places[v], group.leaves[0].num_places)
        ]
        earlier = {e.var for own in result for e in own.exits}
        result.append(GroupExits(tuple(exits), tuple(e.var in earlier for e in exits), aligned.held))
    return result


def _operand(program: StepProgram, edge: Edge) -> Any:
    return program.eqns[edge[0]].invars[edge[1]]


def _reaching(eqns: Sequence[JaxprEqn], targets: Sequence[Any]) -> set[Var]:
    """Variables that a derivative can come back to from `targets`."""
    reach = {v for v in variables(targets) if is_float(v)}
    for eqn in reversed(eqns):
        if passes_derivative(eqn) and any(v in reach for v in eqn.outvars):
            reach.update(v for v in variables(eqn.invars) if is_float(v))
    return reach


def at_exit(program: StepProgram, g: int, exit_: Exit, value: Any) -> Any:
    """The exit's elements at the places of its group; leading axes are kept."""
    lead = value.ndim - len(exit_.var.aval.shape)
    front, flat = value.shape[:lead], value.reshape(*value.shape[:lead], -1)
    if not np.array_equal(exit_.sheet, np.arange(flat.shape[-1])):
        flat = jnp.where(exit_.sheet >= 0, jnp.take(flat, np.maximum(exit_.sheet, 0), axis=lead), 0)
    return flat.reshape(*front, *program.groups[g].varshape)


def linearise_exits(program: StepProgram, env: dict[Var, Any], forward: Forward, args: Sequence[Any], g: int, own: GroupExits):
    """The pull-back of a group's exits for all steps of a chunk: cotangents of the exits -> (states, taps).

    States are the group's own; taps that do not feed it get None.
    """
    feeding = [t for t in program.taps if any(leg.group == program.groups[g].index for leg in t.legs)]
    tap_vars = [t.part.var for t in feeding]
    exit_vars = [e.var for e in own.exits]

    def values(hidden: Sequence[Any], deltas: Sequence[Any]) -> list[Any]:
        def one(args_t, hidden_t, other_t, saved_t, deltas_t):
            start = step_env(program, env, args_t, hidden_t, other_t)
            done = program.run_step(start, saved_t, dict(zip(tap_vars, deltas_t, strict=True)), exit_vars, own.held)
            return [at_exit(program, g, e, done[e.var]) for e in own.exits]

        return jax.vmap(one)(list(args), hidden, forward.other, forward.saved, deltas)

    zeros = program.zero_taps((args[0].shape[0],))
    exits, pull = jax.vjp(values, forward.hidden, [zeros[v] for v in tap_vars])

    feeds_earlier = [any(program.place_of(leg) < g for leg in t.legs) for t in feeding]

    def run(cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        cotangents = [c.astype(e.dtype) for c, e in zip(cotangents, exits, strict=True)]
        hidden, found = pull(cotangents)
        if any(feeds_earlier) and any(own.shared):
            alone = pull([jnp.zeros_like(c) if s else c for c, s in zip(cotangents, own.shared, strict=True)])[1]
            found = [b if twice else a for a, b, twice in zip(found, alone, feeds_earlier, strict=True)]
        taps: list[Any] = [None] * len(program.taps)
        for t, x in zip(feeding, found, strict=True):
            taps[t.index] = x
        return group_states(program, hidden)[g], taps

    return run


def exit_cotangents(program: StepProgram, env: dict[Var, Any], forward: Forward, data: Any, exits: Sequence[GroupExits]) -> list[list[Any]]:
    """Derivative of each step's loss by the exits, [group][exit], each at its group's places."""
    edges = sorted({edge for own in exits for e in own.exits for edge in e.edges})
    shapes = [_operand(program, edge).aval for edge in edges]
    length = data.args[0].shape[0]

    def total(deltas: Sequence[Any], shifts: Sequence[Any]) -> Any:
        def one(args_t, hidden_t, other_t, saved_t, deltas_t, shifts_t, target_t):
            start = step_env(program, env, args_t, hidden_t, other_t)
            flat = _run_tapped(program, start, saved_t, dict(zip(edges, deltas_t, strict=True)))
            flat = [o if s is None else o + s for o, s in zip(flat, shifts_t, strict=True)]
            return data.loss(program.output_tree(flat), target_t)

        losses = jax.vmap(one)(list(data.args), forward.hidden, forward.other, forward.saved, deltas, shifts, data.targets)
        return jnp.sum(losses * data.weights)

    deltas = [jnp.zeros((length, *a.shape), a.dtype) for a in shapes]
    shifts = [jnp.zeros((length, *v.aval.shape), v.aval.dtype) if is_float(v) else None for v in program.out_vars]
    by_edge, by_output = jax.grad(total, argnums=(0, 1))(deltas, shifts)
    found = dict(zip(edges, by_edge, strict=True))
    return [
        [at_exit(program, g, e, sum([found[edge] for edge in e.edges] + [by_output[n] for n in e.outputs])) for e in own.exits]
        for g, own in enumerate(exits)
    ]


def _run_tapped(program: StepProgram, env: dict[Var, Any], saved: Sequence[Any], deltas: dict[Edge, Any]) -> list[Any]:
    """The step's outputs, with taps on edges."""
    number = {id(eqn): i for i, eqn in enumerate(program.eqns)}
    known = dict(zip(program.saved_vars, saved, strict=True))

    def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        i = number[id(eqn)]
        operands = [tap(v, deltas[i, k]) if (i, k) in deltas else v for k, v in enumerate(operands)]
        results = as_product(eqn, operands) or bind_equation(eqn, operands)
        return [with_value(r, known[v]) if v in known else r for v, r in zip(eqn.outvars, results, strict=True)]

    done = evaluate(needed_equations(program.step_eqns, program.out_vars), dict(env), on_equation)
    return [read(done, v) for v in program.out_vars]
