"""One step as the engine runs it: what is known before tracing, and functions that evaluate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Var
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read
from etrace_bridge.lowering import Bind, Tuning, tuning_for
from etrace_bridge.step.equations import read_equations
from etrace_bridge.step.groups import StepGroups, read_groups
from etrace_bridge.step.taps import read_taps


@jax.custom_jvp
def with_value(computed: Any, value: Any) -> Any:
    """Return `value`, with the derivative of `computed`.

    What computes the latter is dead code after differentiation.
    """
    return value


@with_value.defjvp
def _with_value_jvp(primals, tangents):
    return primals[1], tangents[0]


@jax.custom_jvp
def tap(y: Any, delta: Any) -> Any:
    """Return `y`, with the derivative of `y + delta`: the cotangent of `delta` is that of `y`."""
    return y


@tap.defjvp
def _tap_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1]


@dataclass(frozen=True)
class StepProgram(StepGroups):
    """One step, ready to run.

    Attributes:
        tuning: how its programs are laid out for the device that they run on.
    """

    tuning: Tuning

    def step(
        self,
        theta: Sequence[jax.Array],
        hidden: Sequence[jax.Array],
        other: Sequence[jax.Array],
        args: Sequence[jax.Array],
    ):
        """Run the step as a pure function."""
        return self.step_from(self.weight_env(theta), hidden, other, args, self.tuning.bind)

    def step_from(
        self,
        env: dict[Var, Any],
        hidden: Sequence[jax.Array],
        other: Sequence[jax.Array],
        args: Sequence[jax.Array],
        bind: Bind,
    ):
        """Return `step` from values of the weight tier, each equation run by `bind`."""
        eqns = needed_equations(self.step_eqns, [*self.out_vars, *self.new_vars])
        done = evaluate(eqns, self.start_env(env, args, hidden, other), bind)
        new = [read(done, v) for v in self.new_vars]
        return (
            self.output_tree([read(done, v) for v in self.out_vars]),
            new[: len(self.leaves)],
            new[len(self.leaves) :],
        )

    def weight_env(self, theta: Sequence[jax.Array]) -> dict[Any, Any]:
        """Return values of the weight tier.

        A loop over blocks of steps computes them in its body: then all that the body differentiates
        visibly starts from the same values, and common parts are found; what does not change is
        taken out of the loop when the program is compiled.
        """
        env: dict[Any, Any] = dict(self.constants)
        env.update(zip(self.weight_vars, theta, strict=True))
        return evaluate(self.weight_eqns, env)

    def loop_env(self, theta: Sequence[jax.Array]) -> dict[Any, Any]:
        """Return the values that loops over time need beside the weight tier.

        They are in the layout that products in loops want.
        """
        return self.tuning.before_loops(self.step_eqns, self.weight_env(theta))

    def start_env(
        self,
        env: dict[Var, Any],
        args: Sequence[jax.Array],
        hidden: Sequence[jax.Array],
        other: Sequence[jax.Array],
    ) -> dict:
        """Return the values that one step starts from: weight tier, arguments and old states."""
        inner = {**env, **dict(zip(self.arg_vars, args, strict=True))}
        inner.update(zip(self.state_vars, (*hidden, *other), strict=True))
        return inner

    def run_step(
        self,
        env: dict[Var, Any],
        saved: Sequence[Any],
        deltas: dict[Var, Any],
        targets: Sequence[Any],
        held: dict[int, tuple[int, ...]] | None = None,
    ) -> dict[Var, Any]:
        """Run what `targets` need of one step, differentiably.

        Args:
            env: what the step starts from.
            saved: values of `saved_vars` from the forward pass; their derivative is still the
                product's.
            deltas: taps, by variable of a contact's piece; the contact's view is then held
                constant.
            targets: the variables wanted.
            held: operands to hold constant, by equation id.
        """
        tapped = (
            {id(c.eqn): c.traced_form.view_index for c in self.traced_contacts} if deltas else {}
        )
        held = held or {}
        known = dict(zip(self.saved_vars, saved, strict=True))

        def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            if id(eqn) in tapped:
                operands[tapped[id(eqn)]] = lax.stop_gradient(operands[tapped[id(eqn)]])
            for k in held.get(id(eqn), ()):
                operands[k] = lax.stop_gradient(operands[k])
            results = self.tuning.bind(eqn, operands)
            for n, v in enumerate(eqn.outvars):
                if v in known:
                    results[n] = with_value(results[n], known[v])
                if v in deltas:
                    results[n] = tap(results[n], deltas[v])
            return results

        return evaluate(needed_equations(self.step_eqns, targets), dict(env), on_equation)

    def values(
        self, env: dict[Var, Any], saved: Sequence[Any], targets: Sequence[Any]
    ) -> list[Any]:
        """Return values of `targets` in one step, nothing recomputed that `saved` has."""
        env = {**env, **dict(zip(self.saved_vars, saved, strict=True))}
        eqns = needed_equations(self.step_eqns, targets, given=list(env))
        env = evaluate(eqns, env, self.tuning.bind)
        return [read(env, v) for v in targets]

    def output_tree(self, flat: Sequence[Any]) -> Any:
        """Return the model's own output."""
        return jax.tree.unflatten(self.graph.module_info.out_tree, flat)

    def zero_taps(self, lead: tuple[int, ...]) -> dict[Var, Any]:
        """Return zeros for every tap, with leading axes."""
        return {
            t.part.var: jnp.zeros((*lead, *t.part.var.aval.shape), t.part.var.aval.dtype)
            for t in self.taps
        }


def make_program(graph: ETraceGraph, platform: str | None = None) -> StepProgram:
    """Make the program of a compiled model's step for a kind of device.

    The device is `"cpu"`, `"gpu"` or `"tpu"`; None for JAX's default.
    """
    groups = read_groups(read_taps(read_equations(graph)))
    return StepProgram(**vars(groups), tuning=tuning_for(platform))
