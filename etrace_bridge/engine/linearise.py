"""The K steps of a chunk, linearised in parallel.

For step t, with loss `l_t` and old states `h_(t-1)`:

- `direct`: `dl_t/dtheta` with `h_(t-1)` fixed, except through traced contacts, whose cotangents come as `ybar`;
- `b_t = dl_t/dh_(t-1)`;
- `D_t`: the per-position Jacobian of the core, one array for each pair of states of a group;
- `pull(a)`: core cotangents at every tap, for cotangents `a_t` of the new states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._jax_compat import Var
from etrace_bridge.compiler.core import split_leaf
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.engine.forward import Forward
from etrace_bridge.engine.program import StepProgram

# States are held as [group][state] lists of arrays of the group's varshape, with the K steps in front.
Grouped = list[list[Any]]


@dataclass(frozen=True)
class LossGradient:
    """The one-step losses of a chunk and their derivatives.

    Attributes:
        losses: unweighted loss of each step.
        outputs: the model's output at each step.
        direct: gradient with respect to the weights, traced contacts left out.
        ybar: cotangent at each tap.
        b: cotangent of the old states.
    """

    losses: Any
    outputs: Any
    direct: list[Any]
    ybar: list[Any]
    b: Grouped


def step_env(program: StepProgram, env: dict[Var, Any], args: Sequence[Any], hidden: Sequence[Any], other) -> dict:
    """The values one step starts from."""
    inner = {**env, **dict(zip(program.arg_vars, args, strict=True))}
    inner.update((leaf.invar, h) for leaf, h in zip(program.leaves, hidden, strict=True))
    inner.update((i, o) for (i, _), o in zip(program.other_vars, other, strict=True))
    return inner


def group_states(program: StepProgram, hidden: Sequence[Any]) -> Grouped:
    """Hidden leaves -> [group][state]."""
    return [[part for leaf in g.leaves for part in split_leaf(leaf, hidden[leaf.index], g.varshape)] for g in program.groups]


def loss_gradient(
    program: StepProgram,
    theta: Sequence[Any],
    forward: Forward,
    args: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    targets: Any,
    weights: Any,
    credit: str,
) -> LossGradient:
    """Losses of the chunk's steps and their one-step derivatives, in parallel."""
    length = args[0].shape[0]
    tap_vars = [t.part.var for t in program.taps]

    def total(theta: Sequence[Any], hidden: Sequence[Any], deltas: Sequence[Any], held: dict | None):
        env = program.weight_env(theta)

        def one(args_t, hidden_t, other_t, saved_t, deltas_t, target_t):
            start = step_env(program, env, args_t, hidden_t, other_t)
            done = program.run_step(start, saved_t, dict(zip(tap_vars, deltas_t, strict=True)), program.out_vars, held)
            output = program.output_tree([read(done, v) for v in program.out_vars])
            return loss(output, target_t), output

        losses, outputs = jax.vmap(one)(list(args), hidden, forward.other, forward.saved, deltas, targets)
        return jnp.sum(losses * weights), (losses, outputs)

    deltas = list(program.zero_taps((length,)).values())
    # What stops at the cuts is b alone: where a held value depends on weights too, it takes a second derivative.
    core = program.pre_cut_operands if credit == "core" else None
    apart = core is not None and program.weights_reach_pre_cuts
    held = None if apart else core
    _, pull, (losses, outputs) = jax.vjp(
        lambda theta, hidden, deltas: total(theta, hidden, deltas, held), list(theta), forward.hidden, deltas, has_aux=True
    )
    direct, b, ybar = pull(jnp.ones_like(jnp.sum(losses * weights)))
    if apart:
        b = jax.grad(lambda hidden: total(theta, hidden, deltas, core)[0])(forward.hidden)
    return LossGradient(losses, outputs, direct, ybar, group_states(program, b))


def step_outputs(program: StepProgram, env: dict[Var, Any], forward: Forward, args: Sequence[Any]) -> Any:
    """The model's outputs at every step, in parallel."""

    def one(args_t, hidden_t, other_t, saved_t):
        start = step_env(program, env, args_t, hidden_t, other_t)
        return program.output_tree(program.values(start, saved_t, program.out_vars))

    return jax.vmap(one)(list(args), forward.hidden, forward.other, forward.saved)


def upstream_gradient(
    program: StepProgram, theta: Sequence[Any], forward: Forward, args: Sequence[Any], a: Grouped
) -> tuple[list[Any], list[Any]]:
    """`<a_t, h_t>` differentiated through the whole step, old states fixed: credit of weights without a trace.

    Returns:
        Gradient with respect to the weights, traced contacts left out; cotangent at each tap.
    """
    tap_vars = [t.part.var for t in program.taps]
    new_vars = [leaf.outvar for leaf in program.leaves]

    def total(theta: Sequence[Any], deltas: Sequence[Any]):
        env = program.weight_env(theta)

        def one(args_t, hidden_t, other_t, saved_t, deltas_t, a_t):
            start = step_env(program, env, args_t, hidden_t, other_t)
            done = program.run_step(start, saved_t, dict(zip(tap_vars, deltas_t, strict=True)), new_vars)
            states = group_states(program, [read(done, v) for v in new_vars])
            return sum(jnp.sum(x * h) for xs, hs in zip(a_t, states, strict=True) for x, h in zip(xs, hs, strict=True))

        return jnp.sum(jax.vmap(one)(list(args), forward.hidden, forward.other, forward.saved, deltas, a))

    return jax.grad(total, argnums=(0, 1))(list(theta), list(program.zero_taps((args[0].shape[0],)).values()))


@dataclass(frozen=True)
class CoreLinear:
    """The linearised core of a chunk.

    A contact that feeds two groups needs its cotangents apart, so groups come in *colours*: no two groups of one
    colour share a contact. Almost every model has one colour.

    Attributes:
        D: `D[g][i][j]`, the derivative of new state i by old state j; None where there is none.
        df: `df[colour][i][tap]`, cotangents at the taps for a cotangent of one at state i of the colour's groups.
        pulls: for each colour, cotangents of all new states -> cotangents at the taps, from its groups alone.
    """

    D: list[list[list[Any]]]
    df: list[list[list[Any]]]
    pulls: list[Callable[[Grouped], list[Any]]]

    def pull(self, a: Grouped) -> list[Any]:
        """Cotangents of the new states -> cotangents at the taps."""
        parts = [pull(a) for pull in self.pulls]
        return [None if column[0] is None else sum(column[1:], column[0]) for column in zip(*parts, strict=True)]


def linearise_core(program: StepProgram, env: dict[Var, Any], forward: Forward, args: Sequence[Any]) -> CoreLinear:
    """`D_t`, `df_t` and the pull-back of the core, for all steps of a chunk."""
    core = program.core
    entries = program.core_inputs
    hidden_vars = {leaf.invar for leaf in program.leaves}
    others = [v for v in core.reads if v not in hidden_vars and v not in entries and program.tier[v] > 0]

    def values(args_t, hidden_t, other_t, saved_t):
        return program.values(step_env(program, env, args_t, hidden_t, other_t), saved_t, [*entries, *others])

    found = jax.vmap(values)(list(args), forward.hidden, forward.other, forward.saved)
    ys, rest = found[: len(entries)], found[len(entries) :]

    def states_of(hidden: Sequence[Any], ys: Sequence[Any]) -> Grouped:
        def one(hidden_t, ys_t, rest_t):
            inner = dict(env)
            inner.update((leaf.invar, h) for leaf, h in zip(program.leaves, hidden_t, strict=True))
            inner.update(zip((*entries, *others), (*ys_t, *rest_t), strict=True))
            done = core.run(inner)
            made = {leaf.index: read(done, leaf.outvar) for g in program.groups for leaf in g.leaves}
            return group_states(program, [made.get(leaf.index) for leaf in program.leaves])

        return jax.vmap(one)(list(hidden), list(ys), rest)

    D: list[list[list[Any]]] = [[] for _ in program.groups]
    df: list[list[list[Any]]] = []
    pulls = []
    for colour in program.colours:
        width = max(program.groups[g].num_state for g in colour)
        rows = []
        for i in range(width):
            wide = [g for g in colour if program.groups[g].num_state > i]
            h_bar, y_bar = _pull_ones(lambda h, y, i=i, wide=wide: _pick(states_of(h, y), wide, i), forward.hidden, ys)
            grouped = group_states(program, h_bar)
            for g in wide:
                D[g].append([r if _depends(program, g, i, j) else None for j, r in enumerate(grouped[g])])
            rows.append(_spread_taps(program, y_bar))
        df.append(rows)
        pulls.append(_pull_colour(program, colour, lambda y: states_of(forward.hidden, y), ys))
    return CoreLinear(D, df, pulls)


def _pick(states: Grouped, groups: Sequence[int], i: int) -> list[Any]:
    return [states[g][i] for g in groups]


def _pull_ones(fun: Callable, *args: Any) -> tuple:
    out, pull = jax.vjp(fun, *args)
    return pull([jnp.ones_like(o) for o in out])


def _pull_colour(program: StepProgram, colour: Sequence[int], fun: Callable, ys: Sequence[Any]) -> Callable:
    _, pull = jax.vjp(lambda y: [fun(y)[g] for g in colour], ys)
    return lambda a: _spread_taps(program, pull([a[g] for g in colour])[0])


def _depends(program: StepProgram, g: int, i: int, j: int) -> bool:
    leaves = program.groups[g].leaves
    owner = [leaf.index for leaf in leaves for _ in range(leaf.count)]
    return program.depends[owner[i], owner[j]]


def _spread_taps(program: StepProgram, values: Sequence[Any]) -> list[Any]:
    """Values of the core's inputs -> one a tap, None for those without legs."""
    found = dict(zip(program.core_inputs, values, strict=True))
    return [found[v] if t.legs else None for t, v in zip(program.taps, program.entries, strict=True)]
