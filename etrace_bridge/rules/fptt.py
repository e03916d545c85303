"""FPTT: forward propagation through time (Kag and Saligrama 2021), a pull towards the weights'
mean.

Every step (or chunk of K) has an update, for the loss

    l_t(theta) + alpha/2 |theta - mean_t|² - lambda_t · theta

so that the weights, which see one step's loss at a time, do not follow each of them. Credit
stops where the chunk begins, and the gradient is

    g_t = dl_t/dtheta |_(h before the chunk fixed)  +  alpha (theta_t - mean_t)  -  lambda_t
    lambda_t = lambda_(t-1) - alpha (theta_t - mean_(t-1))
    mean_t   = (mean_(t-1) + theta_t) / 2  -  lambda_t / (2 alpha)

with `mean_1 = theta_1` and `lambda_1 = 0`. `lambda_t` stands for the last loss's gradient at the new
weights, which it would be if an update reached the minimum, as in the authors' program. While
weights are fixed, all of this is zero and the rule is `bptt` with the same chunks. The memory
belongs to the weights and the stream: a new sequence begins a new mean.

Memory: twice the weights, and K steps of activations. Time: forward and backward of each step.
Exact when one chunk covers the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge._errors import InputError
from etrace_bridge.rules.base import Carry, Chunk, register_rule
from etrace_bridge.rules.bptt import BPTT
from etrace_bridge.step.program import StepProgram

Memory = dict[str, Any]  # "mean", "slope" (lambda): an array per weight; "begun": 0 or 1


@register_rule
@dataclass(frozen=True)
class FPTT(BPTT):
    """Truncated BPTT with a pull towards the mean of the weights.

    Attributes:
        alpha: strength of the pull.
    """

    alpha: float = 0.5
    name: ClassVar[str] = "fptt"
    follows_states: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise InputError(f"`alpha` is {self.alpha!r}; it must be more than 0.")

    def init(self, program: StepProgram) -> Memory:
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in program.weight_vars]
        return {"mean": zeros, "slope": list(zeros), "begun": jnp.zeros((), zeros[0].dtype)}

    def past(self, program: StepProgram, theta, memory: Memory, h0) -> dict[int, Any]:
        """Return `alpha (theta - mean) - lambda`."""
        now = self._after_update(theta, memory)
        terms = zip(theta, now["mean"], now["slope"], strict=True)
        return {n: self.alpha * (w - mean) - slope for n, (w, mean, slope) in enumerate(terms)}

    def advance(
        self, program: StepProgram, theta, carry: Carry, data: Chunk, memory: Memory | None
    ) -> Memory:
        old = memory or self.init(program)
        return old if data.loss is None else self._after_update(theta, old)

    def _after_update(self, theta: Sequence[jax.Array], memory: Memory) -> Memory:
        """Return the memory that belongs to these weights, given that of the weights before them."""

        def moved(w: Any, mean: Any, slope: Any) -> tuple[Any, Any]:
            mean = jnp.where(memory["begun"] > 0, mean, w)
            slope = slope - self.alpha * (w - mean)
            return (mean + w) / 2 - slope / (2 * self.alpha), slope

        both = [moved(*x) for x in zip(theta, memory["mean"], memory["slope"], strict=True)]
        new = {
            "mean": [m for m, _ in both],
            "slope": [s for _, s in both],
            "begun": jnp.ones_like(memory["begun"]),
        }
        return jax.tree.map(lambda x, like: x.astype(like.dtype), new, memory)
