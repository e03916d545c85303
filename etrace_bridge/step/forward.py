"""The forward pass over a chunk: scans that carry states and save what the parallel part needs.

Each level of states (`StepProgram.levels`) has its own scan. What it reads of inputs and of earlier
levels is computed before, for all steps at once: the input products of each layer of a stack are
one large product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read, reads_of, variables
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.time import scan_time


@dataclass(frozen=True)
class Forward:
    """What a chunk's forward pass leaves behind; every array has the K steps on its first axis.

    Attributes:
        hidden: old hidden states, one array per leaf.
        other: old values of other states.
        saved: values of the program's `saved_vars`.
        new_hidden: hidden states after the chunk.
        new_other: other states after the chunk.
    """

    hidden: list[jax.Array]
    other: list[jax.Array]
    saved: list[Any]
    new_hidden: list[jax.Array]
    new_other: list[jax.Array]

    def steps(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the arrays with a step axis, so that a loop can take them apart."""
        return self.hidden, self.other, self.saved

    def with_steps(self, steps: tuple[list[Any], list[Any], list[Any]]) -> Forward:
        """Return the same for some of the steps."""
        return Forward(*steps, self.new_hidden, self.new_other)


def run_forward(
    program: StepProgram,
    env: dict[Var, Any],
    hidden: Sequence[jax.Array],
    other: Sequence[jax.Array],
    args: Sequence[jax.Array],
) -> Forward:
    """Run K steps.

    Args:
        program: the step.
        env: its weight tier.
        hidden: hidden states before the chunk.
        other: other states before the chunk.
        args: the step's arguments, each with K steps on its first axis.
    """
    before, count = [*hidden, *other], len(program.leaves)
    known: dict[Var, Any] = dict(zip(program.arg_vars, args, strict=True))  # values at all K steps
    after: dict[int, jax.Array] = {}
    for level in program.levels:
        after |= _run_level(program, env, level, before, known, args[0].shape[0])
    known |= _in_parallel(program, env, known, program.saved_vars)
    old = [known[v] for v in program.state_vars]
    new = [after[n] for n in range(len(old))]
    return Forward(
        old[:count], old[count:], [known[v] for v in program.saved_vars], new[:count], new[count:]
    )


def _run_level(
    program: StepProgram,
    env: dict[Var, Any],
    level: Sequence[int],
    before: Sequence[Any],
    known: dict[Var, Any],
    length: int,
) -> dict[int, jax.Array]:
    """Run one level through all steps and add its values to `known`.

    Returns its states after them.
    """
    old_vars = [program.state_vars[n] for n in level]
    new_vars = [program.new_vars[n] for n in level]
    eqns = needed_equations(_depending(program.step_eqns, old_vars), new_vars)
    made = {v for eqn in eqns for v in eqn.outvars}
    saved = [v for v in program.saved_vars if v in made]
    wanted = [v for v in reads_of(eqns, new_vars) if program.tier[v] > 0 and v not in old_vars]
    known |= _in_parallel(program, env, known, wanted)
    bind = program.tuning.bind_in_loop(env, length)

    def body(carry: list[Any], values: list[Any]) -> tuple[list[Any], Any]:
        inner = {
            **env,
            **dict(zip(wanted, values, strict=True)),
            **dict(zip(old_vars, carry, strict=True)),
        }
        inner = evaluate(eqns, inner, bind)
        return [read(inner, v) for v in new_vars], (carry, [inner[v] for v in saved])

    ends, (old, kept) = scan_time(
        body, [before[n] for n in level], [known[v] for v in wanted], length
    )
    known |= zip((*old_vars, *saved), (*old, *kept), strict=True)
    for v, values, end in zip(new_vars, old, ends, strict=True):
        if not isinstance(v, Literal):
            known.setdefault(v, jnp.concatenate([values[1:], end[None]]))
    return dict(zip(level, ends, strict=True))


def _depending(eqns: Sequence[JaxprEqn], sources: Sequence[Var]) -> list[JaxprEqn]:
    """Return the equations that depend on `sources`."""
    reach, chosen = set(sources), []
    for eqn in eqns:
        if not reach.isdisjoint(variables(eqn.invars)):
            reach.update(eqn.outvars)
            chosen.append(eqn)
    return chosen


def _in_parallel(
    program: StepProgram, env: dict[Var, Any], known: dict[Var, Any], wanted: Sequence[Var]
) -> dict[Var, Any]:
    """Return values at all steps that follow from known ones."""
    missing = [v for v in wanted if v not in known]
    if not missing:
        return {}
    eqns = needed_equations(program.step_eqns, missing, [*env, *known])
    given = [v for v in reads_of(eqns, missing) if v in known]

    def one(values: Sequence[Any]) -> list[Any]:
        inner = evaluate(
            eqns, {**env, **dict(zip(given, values, strict=True))}, program.tuning.bind
        )
        return [read(inner, v) for v in missing]

    return dict(zip(missing, jax.vmap(one)([known[v] for v in given]), strict=True))
