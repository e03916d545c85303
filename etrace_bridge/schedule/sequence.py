"""A whole sequence, chunk after chunk, as one program.

Many full chunks are one scan with one body. Outside it, a first chunk does not read a trace that is
known to be zero, and a last one does not write a trace that is not read afterwards: a sequence of
one chunk does no work on traces, one of two chunks writes and reads the trace once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge.lowering import traced_once
from etrace_bridge.schedule.chunk_plan import ChunkPlan

# From this number of full chunks on, all run in one loop: unrolled, the buffers of several would
# exist at once
LOOP_FROM = 3

# (carry, data of one chunk, fresh, final) -> (gradients, losses, outputs, carry)
ChunkFunction = Callable[[Any, Any, bool, bool], tuple[Any, Any, Any, Any]]


def run_sequence(
    run: ChunkFunction, carry: Any, data: Any, plan: ChunkPlan, fresh: bool, final: bool
):
    """Run a sequence.

    Args:
        run: runs one chunk.
        carry: states and memory before the sequence.
        data: a tree of arrays with time on the first axis.
        plan: how to divide it.
        fresh: the memory is zero.
        final: the memory is not wanted afterwards.

    Returns:
        Summed gradients, losses, outputs, carry.
    """
    total, at, made = None, 0, []
    sizes = [plan.steps] * plan.full + ([plan.rest] if plan.rest else [])
    if plan.full >= LOOP_FROM:
        total, losses, outputs, carry = _run_loop(run, carry, data, plan)
        made = [(losses, outputs)]
        at = plan.full * plan.steps
        sizes = sizes[plan.full :]
        fresh = False
    for n, steps in enumerate(sizes):
        part = jax.tree.map(lambda x, at=at, end=at + steps: lax.slice_in_dim(x, at, end), data)
        is_first, is_last = n == 0, n == len(sizes) - 1
        grads, losses, outputs, carry = run(carry, part, fresh and is_first, final and is_last)
        total, at = add_trees(total, grads), at + steps
        made.append((losses, outputs))
    losses, outputs = jax.tree.map(
        lambda *xs: xs[0] if len(xs) == 1 else jnp.concatenate(xs), *made
    )
    return total, losses, outputs, carry


def _run_loop(run: ChunkFunction, carry: Any, data: Any, plan: ChunkPlan):
    """Return the full chunks of a sequence, as one loop; results as in `run_sequence`."""
    count, span = plan.full, plan.full * plan.steps
    shape = count, plan.steps
    parts = jax.tree.map(lambda x: lax.slice_in_dim(x, 0, span).reshape(*shape, *x.shape[1:]), data)

    # Tracing a chunk is much of what a first call costs, and its gradients' shapes are needed first.
    run_once = traced_once(lambda carry, part: run(carry, part, False, False))

    def body(state: Any, part: Any) -> tuple[Any, Any]:
        inner, summed = state
        grads, losses, outputs, inner = run_once(inner, part)
        return (inner, add_trees(summed, grads)), (losses, outputs)

    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(lambda c, p: run_once(c, p)[0], carry, first)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (carry, total), made = lax.scan(body, (carry, zero), parts)
    losses, outputs = jax.tree.map(lambda x: x.reshape(span, *x.shape[2:]), made)
    return total, losses, outputs, carry


def add_trees(a: Any, b: Any) -> Any:
    """Return sum of two trees of one structure; None counts as zero."""
    if a is None or b is None:
        return b if a is None else a
    return jax.tree.map(jnp.add, a, b)


def step_weights(length: int, mask: Any, reduction: str) -> Any:
    """Return factors of the steps' losses: `mask` normalised to a mean, or as it is for a sum."""
    weights = jnp.ones(length) if mask is None else jnp.asarray(mask, dtype=float)
    return weights / jnp.sum(weights) if reduction == "mean" else weights
