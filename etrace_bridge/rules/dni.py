"""DNI: synthetic gradients (Jaderberg et al. 2017), a model that predicts the derivative of later
losses.

With `h_0`, `h_K` the n hidden values of a batch element before and after a chunk of K steps,

    M(h) = W h + c                                           (W: n × n, one for the whole batch)
    g    = d(l_1 + … + l_K)/dtheta  +  M(h_K) · dh_K/dtheta            (h_0 fixed)
    d    = d(l_1 + … + l_K)/dh_0    +  M(h_K) · dh_K/dh_0
    e    = d - M(h_0)
    W   += rate  mean over the batch of  e ⊗ h_0 / (1 + |h_0|²),      c += the same with h_0 = 1

Nothing of the past is stored; the derivative of later losses by `h_K` is predicted instead, and `M`
learns from its own next prediction. The step of `M` is divided by the length of its input, so it
does not diverge for a rate up to 1. The end of a sequence is not known, so `M` is
used there too. `M` is the rule's memory: it begins at zero and learns as long as a stream lasts
(`learner.step`, `carry=True`). A new sequence starts with a new `M`, so the rule is of little use
for short, separate sequences.

Memory: n² + n. Time per step: a reverse pass, B·n² for `M`. Exact when one chunk covers the
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge._errors import InputError
from etrace_bridge.rules.base import (
    APPROXIMATE,
    EXACT,
    Carry,
    Chunk,
    Promise,
    ReverseRule,
    register_rule,
)
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.reverse import chunk_gradient
from etrace_bridge.step.unit_arrays import flat_rows
from etrace_bridge.step.units import find_layout

Memory = dict[str, Any]  # "W": (n, n), "c": (n,)


@register_rule
@dataclass(frozen=True)
class DNI(ReverseRule):
    """Synthetic gradients.

    Attributes:
        rate: how fast the predictor learns, above 0 and at most 1.
    """

    rate: float = 0.1
    name: ClassVar[str] = "dni"
    needs_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InputError(f"`rate` is {self.rate!r}; it must be above 0 and at most 1.")

    def init(self, program: StepProgram) -> Memory:
        layout = find_layout(program)
        n, dtype = layout.size, layout.dtype
        return {"W": jnp.zeros((n, n), dtype), "c": jnp.zeros(n, dtype)}

    def future(
        self, program: StepProgram, memory: Memory, hidden: Sequence[jax.Array]
    ) -> list[Any]:
        """Return `M(h)`, one array per hidden leaf."""
        layout, found, at = find_layout(program), [], 0
        rows = _predict(memory, flat_rows(layout, hidden))
        for h in hidden:
            size = h.size // layout.rows
            found.append(rows[:, at : at + size].reshape(h.shape).astype(h.dtype))
            at += size
        return found

    def advance(
        self, program: StepProgram, theta, carry: Carry, data: Chunk, memory: Memory | None
    ) -> Memory:
        layout, old = find_layout(program), memory or self.init(program)
        after = None if memory is None else partial(self.future, program, memory)
        d = flat_rows(layout, chunk_gradient(program, theta, carry, data, after).h0)
        h = flat_rows(layout, carry.hidden)
        e = (d - _predict(old, h)) / (1 + jnp.sum(h * h, -1, keepdims=True))
        step = self.rate / layout.rows
        new = {
            "W": old["W"] + step * jnp.einsum("ej,ek->jk", e, h),
            "c": old["c"] + step * jnp.sum(e, 0),
        }
        return {name: x.astype(old[name].dtype) for name, x in new.items()}

    def reset(self, program: StepProgram, memory: Memory, keep: jax.Array) -> Memory:
        return memory

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if chunk >= length:
            return Promise(EXACT, "one chunk covers the sequence")
        return Promise(APPROXIMATE, "what later chunks ask of a state is predicted, not known")


def _predict(memory: Memory, h: Any) -> Any:
    return jnp.einsum("jk,ek->ej", memory["W"], h) + memory["c"][None]
