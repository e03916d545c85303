"""The K steps of a chunk, linearised in parallel.

For step t, with loss `l_t` and old states `h_(t-1)`:

- `direct`: `dl_t/dtheta` with `h_(t-1)` fixed, except through traced contacts, whose cotangents are
  `at_taps`;
- `b_t = dl_t/dh_(t-1)`;
- `D_t`: the per-position Jacobian of the core, one array for each pair of states of a group;
- `df_t`: how the new states depend on the contacts' outputs, through the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge.compiler.core_equations import split_leaf
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps

# Rows of a system are [group][row] lists of arrays of the group's varshape, with the K
# steps in front. The first rows of a group are its states.
Grouped = list[list[jax.Array]]
Blocks = list[list[list[Any]]]  # [group][row][row]; None for what is always zero


@dataclass(frozen=True)
class LossGradient:
    """The one-step losses of a chunk and their derivatives.

    Attributes:
        losses: unweighted loss of each step.
        outputs: the model's output at each step.
        direct: gradient with respect to the weights, traced contacts left out.
        at_taps: cotangent at each tap.
        b: cotangent of the old states.
    """

    losses: jax.Array
    outputs: Any
    direct: list[Any]
    at_taps: list[Any]
    b: Grouped


@dataclass(frozen=True)
class ContactRows:
    """`df_t`: how the rows of a trace system depend on the contacts' outputs, position by position.

    A contact that feeds two groups needs its cotangents apart, so groups come in *colours*: no two
    groups of one colour share a contact. Almost every model has one colour.

    Attributes:
        units: `units[colour][row][tap]`, cotangents at the taps for a cotangent of one at that row
            of the colour's groups.
        pulls: for each colour, cotangents of all rows -> cotangents at the taps, from its groups
            alone.
        first_taps: for each tap, the first tap with the same rows; None for taps that feed no
            group.
    """

    units: list[list[list[Any]]]
    pulls: list[Callable[[Grouped], list[Any]]]
    first_taps: tuple[int | None, ...]

    def pull(self, a: Grouped) -> list[Any]:
        """Return cotangents of the rows -> cotangents at the taps.

        None where a tap feeds no group.
        """
        parts = [pull(a) for pull in self.pulls]
        return [
            None if column[0] is None else sum(column[1:], column[0])
            for column in zip(*parts, strict=True)
        ]


@dataclass(frozen=True)
class CoreLinear:
    """The linearised core of a chunk.

    `D[g][i][j]` is the derivative of new state i by old state j.
    """

    D: Blocks
    df: ContactRows


def group_states(program: StepProgram, hidden: Sequence[jax.Array]) -> Grouped:
    """Return hidden leaves -> [group][state]."""
    return [
        [part for leaf in g.leaves for part in split_leaf(leaf, hidden[leaf.index], g.varshape)]
        for g in program.groups
    ]


def loss_gradient(steps: Steps, credit: str) -> LossGradient:
    """Return losses of the steps and their one-step derivatives, in parallel.

    Args:
        steps: the steps.
        credit: `"step"`: `b_t` is differentiated through the whole step; `"core"`: not through what
            leads back into a group.
    """
    program, weights, hidden = steps.program, steps.weights, steps.forward.hidden
    tap_vars = [t.part.var for t in program.taps]

    def total(
        theta: Sequence[jax.Array],
        hidden: Sequence[jax.Array],
        deltas: Sequence[jax.Array],
        held: dict | None,
    ):
        def one(start: dict, saved: Any, deltas_t: Sequence[jax.Array], target: Any):
            done = program.run_step(
                start, saved, dict(zip(tap_vars, deltas_t, strict=True)), program.out_vars, held
            )
            output = program.output_tree([read(done, v) for v in program.out_vars])
            return steps.loss(output, target), output

        losses, outputs = steps.with_weights(theta).each(one, deltas, steps.targets, hidden=hidden)
        return jnp.sum(losses * weights), (losses, outputs)

    deltas = list(program.zero_taps((steps.length,)).values())
    # Only b stops at the cuts: where a held value depends on weights too, the weights need a second
    # derivative.
    core = program.pre_cut_operands if credit == "core" else None
    apart = core is not None and program.weights_reach_pre_cuts
    held = None if apart else core
    _, pull, (losses, outputs) = jax.vjp(
        lambda theta, hidden, deltas: total(theta, hidden, deltas, held),
        list(steps.theta),
        hidden,
        deltas,
        has_aux=True,
    )
    direct, b, at_taps = pull(jnp.ones_like(jnp.sum(losses * weights)))
    if apart:
        b = jax.grad(lambda hidden: total(steps.theta, hidden, deltas, core)[0])(hidden)
    return LossGradient(losses, outputs, direct, at_taps, group_states(program, b))


def output_gradient(steps: Steps) -> dict[int, jax.Array]:
    """Return `dl_t/doutput_t` of the weighted losses for each floating-point output.

    The key is the output's index in `program.out_vars`.
    """
    flat, tree = jax.tree.flatten(steps.outputs())
    floats = [n for n, x in enumerate(flat) if jnp.issubdtype(x.dtype, jnp.floating)]

    def total(some: Sequence[Any]) -> Any:
        full = list(flat)
        for n, x in zip(floats, some, strict=True):
            full[n] = x
        return jnp.sum(
            jax.vmap(steps.loss)(jax.tree.unflatten(tree, full), steps.targets) * steps.weights
        )

    return dict(zip(floats, jax.grad(total)([flat[n] for n in floats]), strict=True))


def upstream_gradient(steps: Steps, a: Grouped) -> tuple[list[Any], list[Any]]:
    """Return `<a_t, h_t>` differentiated through the whole step, old states fixed.

    Credit of weights without a trace.

    Returns:
        Gradients of the weights, and cotangents at the taps.
    """
    program = steps.program
    tap_vars = [t.part.var for t in program.taps]
    new_vars = [leaf.outvar for leaf in program.leaves]

    def total(theta: Sequence[jax.Array], deltas: Sequence[jax.Array]) -> Any:
        def one(start: dict, saved: Any, deltas_t: Sequence[jax.Array], a_t: Grouped) -> Any:
            done = program.run_step(
                start, saved, dict(zip(tap_vars, deltas_t, strict=True)), new_vars
            )
            states = group_states(program, [read(done, v) for v in new_vars])
            pairs = [
                pair
                for xs, hs in zip(a_t, states, strict=True)
                for pair in zip(xs, hs, strict=True)
            ]
            return sum(jnp.sum(x * h) for x, h in pairs)

        return jnp.sum(steps.with_weights(theta).each(one, deltas, a))

    return jax.grad(total, argnums=(0, 1))(
        list(steps.theta), list(program.zero_taps((steps.length,)).values())
    )


def linearise_core(steps: Steps) -> CoreLinear:
    """Return `D_t` and `df_t` of all steps."""
    program, forward = steps.program, steps.forward
    core, entries = program.core, program.core_inputs
    hidden_vars = {leaf.invar for leaf in program.leaves}
    others = [
        v for v in core.reads if v not in hidden_vars and v not in entries and program.tier[v] > 0
    ]
    found = steps.each(lambda start, saved: program.values(start, saved, [*entries, *others]))
    ys, rest = found[: len(entries)], found[len(entries) :]

    def states_of(hidden: Sequence[jax.Array], ys: Sequence[Any]) -> Grouped:
        def one(hidden_t, ys_t, rest_t):
            inner = dict(steps.env)
            inner.update((leaf.invar, h) for leaf, h in zip(program.leaves, hidden_t, strict=True))
            inner.update(zip((*entries, *others), (*ys_t, *rest_t), strict=True))
            done = core.run(inner)
            after = list(hidden_t)
            for leaf in (leaf for g in program.groups for leaf in g.leaves):
                after[leaf.index] = read(done, leaf.outvar)
            return group_states(program, after)

        return jax.vmap(one)(list(hidden), list(ys), rest)

    D: Blocks = [[] for _ in program.groups]
    units: list[list[list[Any]]] = []
    pulls = []
    for colour in program.colours:
        width = max(program.groups[g].num_state for g in colour)
        rows = []
        for i in range(width):
            wide = [g for g in colour if program.groups[g].num_state > i]
            h_bar, y_bar = _pull_ones(
                lambda h, y, i=i, wide=wide: _pick(states_of(h, y), wide, i), forward.hidden, ys
            )
            grouped = group_states(program, h_bar)
            for g in wide:
                D[g].append(
                    [r if _depends(program, g, i, j) else None for j, r in enumerate(grouped[g])]
                )
            rows.append(_spread_taps(program, y_bar))
        units.append(rows)
        pulls.append(_pull_colour(program, colour, lambda y: states_of(forward.hidden, y), ys))
    return CoreLinear(D, ContactRows(units, pulls, program.first_taps))


def _pick(states: Grouped, groups: Sequence[int], i: int) -> list[Any]:
    return [states[g][i] for g in groups]


def _pull_ones(fun: Callable, *args: Any) -> tuple:
    out, pull = jax.vjp(fun, *args)
    return pull([jnp.ones_like(o) for o in out])


def _pull_colour(
    program: StepProgram, colour: Sequence[int], fun: Callable, ys: Sequence[Any]
) -> Callable:
    _, pull = jax.vjp(lambda y: [fun(y)[g] for g in colour], ys)
    return lambda a: _spread_taps(program, pull([a[g] for g in colour])[0])


def _depends(program: StepProgram, g: int, i: int, j: int) -> bool:
    leaves = program.groups[g].leaves
    owner = [leaf.index for leaf in leaves for _ in range(leaf.count)]
    return program.depends[owner[i], owner[j]]


def _spread_taps(program: StepProgram, values: Sequence[Any]) -> list[Any]:
    """Return values of the core's inputs -> one per tap, None for those without legs."""
    found = dict(zip(program.core_inputs, values, strict=True))
    return [
        found[v] if t.legs else None for t, v in zip(program.taps, program.entries, strict=True)
    ]
