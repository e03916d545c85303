"""A step in evaluation mode: dropout off, running statistics used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.step.reverse import scan_steps


@dataclass(frozen=True)
class EvaluationStep:
    """Runs a model in evaluation mode, on the arrays of its step in training mode.

    Attributes:
        training: the step in training mode, whose order of arrays counts.
        compiled: the step in evaluation mode; the same one if nothing in it depends on the mode.
    """

    training: CompiledStep
    compiled: CompiledStep

    def tuned_for(self, platform: str) -> EvaluationStep:
        """Return the same step for another kind of device."""
        return EvaluationStep(self.training.tuned_for(platform), self.compiled.tuned_for(platform))

    def run(
        self, theta: Sequence[Any], hidden: Sequence[Any], other: Sequence[Any], args: Sequence[Any]
    ):
        """Return outputs of K steps, and hidden states and other arrays after them."""
        outer, inner = self.training, self.compiled
        known = outer.by_weight_name(theta) | outer.by_state_name(hidden, other)

        def pick(names: Sequence[str], instead: Sequence[Any]) -> list[Any]:
            return [
                known[n] if n in known else jnp.asarray(x)
                for n, x in zip(names, instead, strict=True)
            ]

        weights = [known[n] for n in inner.weight_names]
        states = (
            pick(inner.hidden_names, inner.initial[0]),
            pick(inner.other_names, inner.initial[1]),
        )
        outputs, *after = scan_steps(inner.program, weights, *states, list(args))
        known |= inner.by_state_name(*after)
        return (
            outputs,
            [known[n] for n in outer.hidden_names],
            [known[n] for n in outer.other_names],
        )
