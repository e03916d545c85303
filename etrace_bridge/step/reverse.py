"""Exact reverse mode inside a chunk: a scan of the unmodified step, differentiated as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge.step.linearise import Grouped, group_states
from etrace_bridge.step.program import StepProgram


@dataclass(frozen=True)
class ChunkGradient:
    """Gradient of a chunk's losses.

    Attributes:
        grads: one array per weight.
        h0: cotangent of the hidden states before the chunk, one array per leaf.
        a0: the same as [group][state].
        losses: (K,) unweighted losses.
        outputs: outputs of the K steps.
        hidden: hidden states after the chunk.
        other: other states after the chunk.
    """

    grads: list[jax.Array]
    h0: list[jax.Array]
    a0: Grouped
    losses: jax.Array
    outputs: Any
    hidden: list[jax.Array]
    other: list[jax.Array]


def scan_steps(
    program: StepProgram,
    theta: Sequence[jax.Array],
    hidden: Sequence[jax.Array],
    other,
    args: Sequence[jax.Array],
):
    """Run K steps: outputs, hidden and other states after them.

    Differentiable in `theta` and `hidden`.
    """
    env = program.weight_env(theta) | program.loop_env(theta)
    bind = program.tuning.bind_in_loop(env, args[0].shape[0])

    def body(carry: Any, args_t: Sequence[Any]) -> tuple[Any, Any]:
        hidden, other = carry
        output, hidden, other = program.step_from(env, hidden, other, args_t, bind)
        return (hidden, other), output

    (hidden, other), outputs = lax.scan(body, (list(hidden), list(other)), list(args))
    return outputs, hidden, other


def chunk_gradient(
    program: StepProgram,
    theta: Sequence[jax.Array],
    carry: Any,
    data: Any,
    after: Callable[[Sequence[Any]], Sequence[Any] | None] | None = None,
) -> ChunkGradient:
    """Return gradient of the chunk's weighted losses by reverse mode through its K steps.

    Args:
        program: the step.
        theta: the weights.
        carry: states before the chunk.
        data: the chunk; without a loss, the losses count as zero.
        after: from the hidden states after the chunk to their cotangents; None for zero.
    """

    def total(theta: Sequence[jax.Array], hidden: Sequence[jax.Array]):
        outputs, new_hidden, new_other = scan_steps(program, theta, hidden, carry.other, data.args)
        losses = jnp.zeros(data.weights.shape, data.weights.dtype)
        if data.loss is not None:
            losses = jax.vmap(data.loss)(outputs, data.targets)
        result = jnp.sum(losses * data.weights)
        predicted = None if after is None else after([lax.stop_gradient(h) for h in new_hidden])
        if predicted is not None:
            result = result + sum(
                jnp.vdot(a, h) for a, h in zip(predicted, new_hidden, strict=True)
            )
        return result, (losses, outputs, new_hidden, new_other)

    (_, aux), (grads, h0) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        list(theta), list(carry.hidden)
    )
    losses, outputs, hidden, other = aux
    return ChunkGradient(grads, h0, group_states(program, h0), losses, outputs, hidden, other)
