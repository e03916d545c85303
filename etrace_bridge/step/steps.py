"""A run of steps after their forward pass: what rules and the scheduler linearise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._jax_compat import Var
from etrace_bridge.step.forward import Forward
from etrace_bridge.step.program import StepProgram


def no_loss(output: Any, target: Any) -> Any:
    """Return the loss of steps without one."""
    return jnp.zeros(())


@dataclass(frozen=True)
class Steps:
    """K steps with fixed weights.

    Every array of `forward`, `args`, `targets` and `weights` has them on its first axis.

    Attributes:
        program: the step.
        theta: the weights.
        env: values of the weight tier.
        forward: what the forward pass left.
        args: the step's arguments, flat.
        targets: the targets, a tree.
        weights: (K,) factors of the steps' losses.
        loss: `(output, target) -> scalar`.
    """

    program: StepProgram
    theta: Sequence[jax.Array]
    env: dict[Var, Any]
    forward: Forward
    args: Sequence[jax.Array]
    targets: Any
    weights: jax.Array
    loss: Callable[[Any, Any], Any]

    @property
    def length(self) -> int:
        """K."""
        return self.args[0].shape[0]

    def parts(self) -> tuple[Any, ...]:
        """Return the arrays with a step axis, so that a loop can take them apart."""
        return self.forward.steps(), list(self.args), self.targets, self.weights

    def part(self, forward: Any, args: Any, targets: Any, weights: Any) -> Steps:
        """Some of the steps, from their share of `parts`.

        The weight tier is computed anew (see `StepProgram.weight_env`).
        """
        kept = {
            "forward": self.forward.with_steps(forward),
            "args": args,
            "targets": targets,
            "weights": weights,
        }
        return replace(self, env=self.program.weight_env(self.theta), **kept)

    def with_weights(self, theta: Sequence[jax.Array]) -> Steps:
        """Return the same steps under other weights, or the same ones to be differentiated.

        States stay.
        """
        return replace(self, theta=theta, env=self.program.weight_env(theta))

    def each(
        self, run: Callable[..., Any], *more: Any, hidden: Sequence[jax.Array] | None = None
    ) -> Any:
        """Return `run(start, saved, *more)` for all steps in parallel.

        Args:
            run: gets the values that a step starts from, its saved values, and that step of each of
                `more`.
            more: trees of arrays with the K steps in front.
            hidden: old hidden states, if not the forward pass's own: to be differentiated.
        """
        program, forward = self.program, self.forward

        def one(args: Any, hidden: Any, other: Any, saved: Any, *rest: Any) -> Any:
            return run(program.start_env(self.env, args, hidden, other), saved, *rest)

        states = forward.hidden if hidden is None else hidden
        return jax.vmap(one)(list(self.args), states, forward.other, forward.saved, *more)

    def outputs(self) -> Any:
        """Return the model's outputs."""
        program = self.program
        return self.each(
            lambda start, saved: program.output_tree(program.values(start, saved, program.out_vars))
        )

    def contact_data(self) -> dict[int, jax.Array]:
        """Return the data operand of each traced contact, by contact."""
        with_x = [c for c in self.program.traced_contacts if c.x is not None]
        found = self.each(
            lambda start, saved: self.program.values(start, saved, [c.x for c in with_x])
        )
        return {c.index: x for c, x in zip(with_x, found, strict=True)}
