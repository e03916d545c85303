"""A rule's gradient over a sequence, for many rules on one compiled step: no learner, one loop over
chunks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch import Tensor

from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.rules import Carry, Chunk, Rule
from etrace_bridge.schedule.chunk import run_chunk


def sequence_gradient(
    compiled: CompiledStep, rule: Rule, xs: Tensor, targets: Tensor, chunk: int
) -> list[Any]:
    """Gradient of the sum of `sin(output + target)` over all steps, in the program's order, by
    chunks of the given size.
    """
    count, theta = len(xs) // chunk, compiled.read()[0]
    assert count * chunk == len(xs)
    parts = tuple(jnp.asarray(a.numpy()).reshape(count, chunk, *a.shape[1:]) for a in (xs, targets))

    def body(state: Any, part: Any) -> tuple[Any, Any]:
        data = Chunk(
            [part[0]],
            part[1],
            jnp.ones(chunk),
            lambda output, target: jnp.sum(jnp.sin(output + target)),
        )
        made = run_chunk(rule, compiled.program, theta, Carry(*state), data, False, False)
        return (made.carry.hidden, made.carry.other, made.carry.trace), made.grads

    start = (*jax.tree.map(jnp.asarray, compiled.initial), rule.init(compiled.program))
    return [g.sum(0) for g in jax.lax.scan(body, start, parts)[1]]
