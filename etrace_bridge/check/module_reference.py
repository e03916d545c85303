"""The reference of a gradient check for a brainstate module: `jax.grad` through its own steps.

The step is brainstate's functional form of the module's call, before any pass of the compiler.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.check.torch_reference import Reference
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.extraction import fitting
from etrace_bridge.lowering import jit


@contextlib.contextmanager
def preserved_states(net: brainstate.nn.Module) -> Iterator[None]:
    """Restore the values of the module's States at the end of this context."""
    before = {path: state.value for path, state in net.states().items()}
    try:
        yield
    finally:
        for path, state in net.states().items():
            if path in before:
                state.value = before[path]


def flat_gradient(tree: Any) -> np.ndarray:
    """Join the arrays of one parameter's value into one vector."""
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


def module_reference(
    net: brainstate.nn.Module, xs: Sequence[Any], targets: Any, loss: Callable, weights: np.ndarray
) -> Reference:
    """Run BPTT.

    Args:
        net: the module; its current states are the initial ones.
        xs: inputs, time-major.
        targets: a tree of targets, time-major.
        loss: JAX callable `(output_t, target_t) -> scalar`.
        weights: (T,) factors of the steps' losses.
    """
    run = _PureSteps(net, xs)
    paths = {id(state): show_path(path) for path, state in net.states().items()}
    is_weight = [isinstance(s, brainstate.ParamState) and id(s) in paths for s in run.states]
    values = [s.value for s in run.states]
    theta = [v for v, w in zip(values, is_weight, strict=True) if w]

    def total(theta: list[Any], shifts: Any, xs: Sequence[Any]):
        given = iter(theta)
        outputs = run([next(given) if w else v for v, w in zip(values, is_weight, strict=True)], xs)
        shifted = jax.tree.map(
            lambda o, s: o + s if s is not None else o, outputs, shifts, is_leaf=lambda x: x is None
        )
        losses = jax.vmap(loss)(shifted, targets)
        return jnp.sum(jnp.where(weights != 0, losses, 0) * weights), outputs

    shapes = jax.eval_shape(run, values, xs)
    shifts = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype) if jnp.issubdtype(s.dtype, jnp.inexact) else None,
        shapes,
    )
    gradient = jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    begin = time.perf_counter()
    (value, outputs), (grads, by_output) = jax.block_until_ready(gradient(theta, shifts, list(xs)))
    seconds = time.perf_counter() - begin
    names = [paths[id(s)] for s, w in zip(run.states, is_weight, strict=True) if w]
    silent = jit(run)(values, [jnp.zeros_like(x) for x in xs])
    differs = any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(silent), strict=True)
    )
    count = len(jax.tree.leaves(outputs)[0])
    return Reference(
        grads={name: flat_gradient(g) for name, g in zip(names, grads, strict=True)},
        outputs=[[np.asarray(leaf)[t] for leaf in jax.tree.leaves(outputs)] for t in range(count)],
        loss=float(value),
        reaches_output=any(bool(jnp.any(g != 0)) for g in jax.tree.leaves(by_output)),
        reaches_parameter=any(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads)),
        responds_to_input=differs,
        seconds=seconds,
    )


def masked_loss(loss: Callable, output: Any, target: Any) -> Callable:
    """Return a loss of `(output, (target, factors))` in which batch elements count by their
    factors.

    Args:
        loss: a mean or a sum over the batch; a learner refuses any other.
        output: an output of one step, on which that is tried.
        target: its target.
    """
    pick = lambda tree, rows: jax.tree.map(lambda a: a[jnp.array(rows)] if a.ndim else a, tree)
    alone, twice = (loss(pick(output, rows), pick(target, rows)) for rows in ([0], [0, 0]))
    is_mean, batch = np.isclose(twice, alone, rtol=1e-4), len(jax.tree.leaves(output)[0])

    def run(output: Any, weighted: tuple[Any, Any]) -> Any:
        target, factors = weighted
        one = lambda o, y: loss(*jax.tree.map(lambda a: a[None], (o, y)))
        each = jax.vmap(one)(output, target)
        return jnp.sum(factors * each) / (batch if is_mean else 1)

    return run


class _PureSteps:
    """The module's call over a sequence as a pure function of its States' values."""

    def __init__(self, net: brainstate.nn.Module, xs: Sequence[Any]) -> None:
        self._call = brainstate.transform.StatefulFunction(net.__call__, return_only_write=False)
        first = [x[0] for x in xs]
        with fitting():
            self._call.make_jaxpr(*first)
        self.states = list(self._call.get_states(*first))

    def __call__(self, values: list[Any], xs: Sequence[Any]) -> Any:
        def step(values: list[Any], args: list[Any]) -> tuple[list[Any], Any]:
            new, output = self._call.jaxpr_call(values, *args)
            return list(new), output

        return jax.lax.scan(step, values, list(xs))[1]
