"""The parallel passes over a chunk, in blocks of steps.

A pass over all K steps at once keeps some twenty arrays of K hidden states each. In blocks, latest
first, only what the forward pass left and what the trace needs are of that size; the rest is small
and is used again soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import Var
from etrace_bridge.step.forward import Forward, run_forward
from etrace_bridge.step.program import StepProgram


def run_blocks(
    body: Callable[[Any, Any], tuple[Any, Any, Any]],
    carry: Any,
    steps: Any,
    size: int,
    reverse: bool,
):
    """Run `body(carry, steps of a block) -> (carry, summed, stacked)` over the blocks.

    Args:
        body: what to do with a block.
        carry: what the first block to run starts from.
        steps: a tree of arrays with the K steps on the first axis.
        size: steps in a block; those left over at the end are a block of their own.
        reverse: the last block runs first.

    Returns:
        The carry after all blocks; `summed` added up; `stacked` with all K steps on its first axis,
        in their order.
    """
    count, rest = divmod(jax.tree.leaves(steps)[0].shape[0], size)
    if count + bool(rest) == 1:
        return body(carry, steps)
    last = jax.tree.map(lambda x: x[count * size :], steps)
    blocks = jax.tree.map(lambda x: x[: count * size].reshape(count, size, *x.shape[1:]), steps)
    total = ended = None
    if rest and reverse:
        carry, total, ended = body(carry, last)
    if total is None:
        shapes = jax.eval_shape(
            lambda c, s: body(c, s)[1], carry, jax.tree.map(lambda x: x[0], blocks)
        )
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(state: tuple[Any, Any], block: Any) -> tuple[tuple[Any, Any], Any]:
        carry, total = state
        carry, summed, stacked = body(carry, block)
        return (carry, jax.tree.map(jnp.add, total, summed)), stacked

    (carry, total), stacked = lax.scan(add, (carry, total), blocks, reverse=reverse)
    stacked = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)
    if rest and not reverse:
        carry, summed, ended = body(carry, last)
        total = jax.tree.map(jnp.add, total, summed)
    return (
        carry,
        total,
        jax.tree.map(lambda *x: jnp.concatenate(x), stacked, ended) if rest else stacked,
    )


def forward_in_blocks(
    program: StepProgram,
    env: dict[Var, Any],
    hidden: Sequence[jax.Array],
    other: Sequence[jax.Array],
    args: Sequence[jax.Array],
    size: int,
) -> Forward:
    """Run `run_forward` block after block.

    What inputs alone determine then exists for one block at a time.
    """

    def block(carry: Any, args: list[jax.Array]) -> tuple[Any, None, Any]:
        hidden, other = carry
        done = run_forward(program, env, hidden, other, args)
        return (done.new_hidden, done.new_other), None, done.steps()

    after, _, steps = run_blocks(
        block, (list(hidden), list(other)), list(args), size, reverse=False
    )
    return Forward(*steps, *after)
