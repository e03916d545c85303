"""The forward pass over a chunk: a scan that carries states and keeps only what the parallel part needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from etrace_bridge._jax_compat import Var
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read, reads_of
from etrace_bridge.engine.convolution import as_product
from etrace_bridge.engine.loop import scan_time
from etrace_bridge.engine.program import StepProgram


@dataclass(frozen=True)
class Forward:
    """What a chunk's forward pass leaves behind; every array has the K steps on its first axis.

    Attributes:
        hidden: old hidden states, one array a leaf.
        other: old values of other states.
        saved: values of the program's `saved_vars`.
        new_hidden: hidden states after the chunk.
        new_other: other states after the chunk.
    """

    hidden: list[Any]
    other: list[Any]
    saved: list[Any]
    new_hidden: list[Any]
    new_other: list[Any]

    def steps(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The arrays with a step axis, so that a loop can take them apart."""
        return self.hidden, self.other, self.saved

    def with_steps(self, steps: tuple[list[Any], list[Any], list[Any]]) -> Forward:
        """The same for some of the steps."""
        return Forward(*steps, self.new_hidden, self.new_other)


def run_forward(program: StepProgram, env: dict[Var, Any], hidden: Sequence[Any], other: Sequence[Any], args: Sequence[Any]) -> Forward:
    """Runs K steps.

    Args:
        program: the step.
        env: its weight tier.
        hidden: hidden states before the chunk.
        other: other states before the chunk.
        args: the step's arguments, each with K steps on its first axis.
    """
    state_saved = [v for v in program.saved_vars if program.tier[v] == 2]
    body_eqns = needed_equations(program.tier_eqns(2), [*program.new_vars, *state_saved])
    input_saved = [v for v in program.saved_vars if program.tier[v] == 1]
    wanted = [v for v in reads_of(body_eqns, program.new_vars) if program.tier[v] == 1]
    input_vars = list(dict.fromkeys([*wanted, *input_saved]))
    input_eqns = needed_equations(program.tier_eqns(1), input_vars)

    def input_part(args_t: Sequence[Any]) -> list[Any]:
        inner = evaluate(input_eqns, {**env, **dict(zip(program.arg_vars, args_t, strict=True))}, as_product)
        return [read(inner, v) for v in input_vars]

    inputs = dict(zip(input_vars, jax.vmap(input_part)(list(args)), strict=True))

    def body(carry: Any, inputs_t: list[Any]) -> tuple[Any, Any]:
        old_hidden, old_other = carry
        inner = {**env, **dict(zip(wanted, inputs_t, strict=True))}
        inner.update((leaf.invar, h) for leaf, h in zip(program.leaves, old_hidden, strict=True))
        inner.update((i, o) for (i, _), o in zip(program.other_vars, old_other, strict=True))
        inner = evaluate(body_eqns, inner, as_product)
        new = [read(inner, v) for v in program.new_vars]
        n = len(program.leaves)
        return (new[:n], new[n:]), (old_hidden, old_other, [inner[v] for v in state_saved])

    carry = (list(hidden), list(other))
    xs = [inputs[v] for v in wanted]
    (new_hidden, new_other), (old_hidden, old_other, kept_saved) = scan_time(body, carry, xs, args[0].shape[0])
    saved = {v: inputs[v] for v in input_saved} | dict(zip(state_saved, kept_saved, strict=True))
    return Forward(old_hidden, old_other, [saved[v] for v in program.saved_vars], new_hidden, new_other)
