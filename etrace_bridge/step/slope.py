"""The slope of the loss along one direction of weight space, carried forward in time.

Let every weight move along a fixed direction `v`. With `s_t = dh_t/dtheta · v`, as many numbers as
there are states,

    s_t = F_t s_(t-1) + (dh_t/dtheta at fixed h_(t-1)) v
    l'_t = (dl_t/dh_(t-1)) s_(t-1) + (dl_t/dtheta at fixed h_(t-1)) v

`F_t` is the whole step's Jacobian, so `l'_t` is the exact derivative of the step's loss along `v`:
nothing is dropped, and no past is stored.

A surrogate gradient defines only its reverse mode. Reverse mode is linear in its cotangent, so
transposing it gives forward mode: `push` does so for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import Var
from etrace_bridge.step.program import StepProgram


@dataclass(frozen=True)
class Slope:
    """What some steps give along a direction.

    Attributes:
        losses: (K,) unweighted losses; None without a loss.
        slopes: (K,) derivative of each weighted loss along the direction; None without a loss.
        tangent: how the carried states after the steps move along it, see `zero_tangent`.
        hidden: hidden states after the steps.
        other: other states after the steps.
    """

    losses: Any
    slopes: Any
    tangent: list[Any]
    hidden: list[jax.Array]
    other: list[jax.Array]


def push(
    function: Callable[..., tuple[Any, Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any, Any]:
    """Forward mode by transposing reverse mode.

    Args:
        function: gives `(result, aux)`; everything in the result is floating-point.
        primals: its arguments, trees of floating-point arrays.
        tangents: a direction for each of them.

    Returns:
        Result, its derivative along the tangents, and aux.
    """
    result, pull, aux = jax.vjp(function, *primals, has_aux=True)
    _, transposed = jax.vjp(pull, jax.tree.map(jnp.zeros_like, result))
    return result, transposed(tuple(tangents))[0], aux


def carried_states(program: StepProgram) -> list[int]:
    """Return the states that can carry a derivative to the next step, as indices of `state_vars`.

    Floating-point ones that the step changes: hidden states, and other ones such as a user's own.
    """
    return [
        n
        for n, (old, new) in enumerate(zip(program.state_vars, program.new_vars, strict=True))
        if new is not old and jnp.issubdtype(old.aval.dtype, jnp.floating)
    ]


def zero_tangent(program: StepProgram) -> list[Any]:
    """Return zeros for every carried state: states that do not depend on the weights yet."""
    avals = [program.state_vars[n].aval for n in carried_states(program)]
    return [jnp.zeros(a.shape, a.dtype) for a in avals]


def run_slope(
    program: StepProgram,
    theta: Sequence[jax.Array],
    direction: Sequence[jax.Array],
    states: tuple[Sequence[Any], Sequence[Any]],
    tangent: Sequence[jax.Array],
    data: tuple[Sequence[Any], Any, Any],
    loss: Callable[[Any, Any], Any] | None,
) -> Slope:
    """Run K steps forward, and the slopes of their losses along a direction with them.

    Args:
        program: the step.
        theta: the weights.
        direction: one array per weight.
        states: hidden and other states before the steps.
        tangent: how the carried states before the steps move along the direction.
        data: arguments, targets and (K,) weights of the losses, K steps on the first axis.
        loss: `(output, target) -> scalar`; None for steps without a loss.
    """
    moving, fixed = _weight_tier(program)

    def weight_tier(theta: Sequence[jax.Array]) -> tuple[Any, Any]:
        env = program.weight_env(theta)
        return [env[v] for v in moving], [env[v] for v in fixed]

    views, view_tangents, rest = push(weight_tier, [list(theta)], [list(direction)])
    constants = dict(zip(fixed, rest, strict=True))
    carried = carried_states(program)
    count = len(program.leaves)

    def body(carry: Any, now: Any) -> tuple[Any, Any]:
        old, old_tangent = carry
        args, target, weight = now

        def step(views: Sequence[jax.Array], chosen: Sequence[Any]) -> tuple[Any, Any]:
            start, env = list(old), {**constants, **dict(zip(moving, views, strict=True))}
            for n, value in zip(carried, chosen, strict=True):
                start[n] = value
            output, hidden, other = program.step_from(
                env, start[:count], start[count:], args, program.tuning.bind
            )
            new = [*hidden, *other]
            own = None if loss is None else loss(output, target)
            weighted = None if own is None else own * weight.astype(own.dtype)
            return (weighted, [new[n] for n in carried]), (own, new)

        chosen = [old[n] for n in carried]
        _, (slope, moved), (own, new) = push(step, (views, chosen), (view_tangents, old_tangent))
        return (new, moved), (own, slope)

    begin = [*states[0], *states[1]], list(tangent)
    (new, moved), (losses, slopes) = lax.scan(body, begin, (list(data[0]), data[1], data[2]))
    return Slope(losses, slopes, moved, new[:count], new[count:])


def _weight_tier(program: StepProgram) -> tuple[list[Var], list[Var]]:
    """Return variables of the weight tier: those that can move with the weights, and the others."""
    made = [v for eqn in program.weight_eqns for v in eqn.outvars]
    moving, fixed = [], list(program.constants)
    for v in (*program.weight_vars, *made):
        (moving if jnp.issubdtype(v.aval.dtype, jnp.floating) else fixed).append(v)
    return moving, fixed
