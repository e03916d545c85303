"""Exact reverse mode inside a chunk: a scan of the unmodified step, differentiated as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read
from etrace_bridge.engine.linearise import group_states, step_env
from etrace_bridge.engine.loop import products_in_loop
from etrace_bridge.engine.program import StepProgram


@dataclass(frozen=True)
class ChunkGradient:
    """Gradient of a chunk's losses.

    Attributes:
        grads: one array a weight.
        h0: cotangent of the hidden states before the chunk, one array a leaf.
        a0: the same as [group][state].
        losses: (K,) unweighted losses.
        outputs: outputs of the K steps.
        hidden: hidden states after the chunk.
        other: other states after the chunk.
    """

    grads: list[Any]
    h0: list[Any]
    a0: list[list[Any]]
    losses: Any
    outputs: Any
    hidden: list[Any]
    other: list[Any]


def scan_steps(program: StepProgram, theta: Sequence[Any], hidden: Sequence[Any], other, args: Sequence[Any]):
    """Runs K steps: outputs, hidden and other states after them. Differentiable in `theta` and `hidden`."""
    env = program.weight_env(theta) | program.turned(theta)
    eqns = needed_equations(program.step_eqns, [*program.out_vars, *program.new_vars])
    n = len(program.leaves)
    on_equation = products_in_loop(env, args[0].shape[0])

    def body(carry: Any, args_t: Sequence[Any]) -> tuple[Any, Any]:
        done = evaluate(eqns, step_env(program, env, args_t, *carry), on_equation)
        new = [read(done, v) for v in program.new_vars]
        return (new[:n], new[n:]), [read(done, v) for v in program.out_vars]

    (hidden, other), outs = lax.scan(body, (list(hidden), list(other)), list(args))
    return program.output_tree(outs), hidden, other


def chunk_gradient(program: StepProgram, theta: Sequence[Any], carry: Any, data: Any) -> ChunkGradient:
    """Gradient of the chunk's weighted losses by reverse mode through its K steps."""

    def total(theta: Sequence[Any], hidden: Sequence[Any]):
        outputs, new_hidden, new_other = scan_steps(program, theta, hidden, carry.other, data.args)
        losses = jax.vmap(data.loss)(outputs, data.targets)
        return jnp.sum(losses * data.weights), (losses, outputs, new_hidden, new_other)

    (_, aux), (grads, h0) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(list(theta), list(carry.hidden))
    losses, outputs, hidden, other = aux
    return ChunkGradient(grads, h0, group_states(program, h0), losses, outputs, hidden, other)
