"""Check the yardstick against D-RTRL's definition with dense Jacobians: `python -m
benchmarks.check_yardstick`.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import yardstick


def _cell(params: yardstick.Params, h_product: Array, h_direct: Array, x: Array) -> Array:
    """Run one GRU step; `h_product` enters through the recurrent matrix and `h_direct` through the
    interpolation.
    """
    i_r, i_z, i_n = jnp.split(x @ params["weight_ih"].T + params["bias_ih"], 3, -1)
    h_r, h_z, h_n = jnp.split(h_product @ params["weight_hh"].T + params["bias_hh"], 3, -1)
    r, z = jax.nn.sigmoid(i_r + h_r), jax.nn.sigmoid(i_z + h_z)
    n = jnp.tanh(i_n + r * h_n)
    return (1 - z) * n + z * h_direct


def _loss(params: yardstick.Params, h: Array, x: Array, target: Array) -> Array:
    output = _cell(params, h, h, x) @ params["weight_out"].T + params["bias_out"]
    return jnp.mean((output - target) ** 2)


def definition(
    params: yardstick.Params, h: Array, xs: Array, targets: Array
) -> yardstick.Gradients:
    """Return the D-RTRL gradient with credit "step", from a dense trace that is carried step by
    step.
    """
    total = jax.tree.map(jnp.zeros_like, params)
    trace = jax.tree.map(lambda value: jnp.zeros(h.shape + value.shape, h.dtype), params)
    for x, target in zip(xs, targets, strict=True):
        direct, b = jax.grad(_loss, argnums=(0, 1))(params, h, x, target)
        past = jax.tree.map(lambda e, b=b: jnp.tensordot(b, e, 2), trace)
        total = jax.tree.map(lambda t, d, p: t + (d + p) / len(xs), total, direct, past)
        jacobian = jax.jacobian(_cell, argnums=2)(params, h, h, x)
        added = jax.jacobian(_cell, argnums=0)(params, h, h, x)
        trace = jax.tree.map(lambda e, new, j=jacobian: jnp.tensordot(j, e, 2) + new, trace, added)
        h = _cell(params, h, h, x)
    return total


def worst_difference(first: yardstick.Gradients, second: yardstick.Gradients) -> float:
    """Return the largest difference, relative to each parameter's largest element; a zero gradient
    is an error.
    """
    worst = 0.0
    for name, expected in first.items():
        size = float(jnp.abs(expected).max())
        if size < 1e-8:
            raise AssertionError(f"the gradient of {name} is zero: nothing is compared")
        worst = max(worst, float(jnp.abs(expected - second[name]).max()) / size)
    return worst


def main() -> None:
    """Print the difference to the definition for every chunk size, and that of the online step."""
    jax.config.update("jax_enable_x64", True)
    steps, batch, inputs, hidden, outputs = 7, 2, 3, 5, 2
    params = yardstick.init_params(inputs, hidden, outputs, dtype=jnp.float64)
    keys = jax.random.split(jax.random.key(1), 3)
    xs = jax.random.normal(keys[0], (steps, batch, inputs), jnp.float64)
    targets = jax.random.normal(keys[1], (steps, batch, outputs), jnp.float64)
    h0 = jax.random.normal(keys[2], (batch, hidden), jnp.float64)
    expected = definition(params, h0, xs, targets)
    for size, feature_major, blocks in itertools.product(
        (1, 2, 3, 4, 6, 7, 100), (False, True), (1, 2)
    ):
        grads, _, _ = yardstick.sequence_gradients(
            params, h0, xs, targets, chunk_size=size, feature_major=feature_major, max_blocks=blocks
        )
        worst = worst_difference(expected, grads)
        print(
            f"chunks of {size:3d}, feature_major={feature_major!s:5}, blocks <= {blocks}: "
            f"difference {worst:.1e}"
        )
        if worst > 1e-10:
            raise AssertionError("the yardstick does not compute the D-RTRL gradient")

    # Each online step starts from the same weights, so what it subtracts at a rate of one is its
    # gradient.
    h, trace, total = h0, yardstick.zero_trace(params, batch), jax.tree.map(jnp.zeros_like, params)
    for x, target in zip(xs, targets, strict=True):
        copy = jax.tree.map(jnp.array, params)
        moved, h, trace, _, _ = yardstick.online_step(copy, h + 0, trace, x, target, 1.0)
        total = jax.tree.map(lambda t, new, old: t + (old - new) / steps, total, moved, params)
    worst = worst_difference(expected, total)
    print(f"online step: relative difference {worst:.1e}")
    if worst > 1e-10:
        raise AssertionError("the online step does not compute the D-RTRL gradient")


if __name__ == "__main__":
    main()
