"""braintrace's integrator example, ported: a minimal GRU of braintrace.nn sums up a noisy input.

The model is unchanged. What goes away: the learner that is built inside the training step, states
made per sample with `vmap_new_states`, the scan that adds up gradients. See docs/from-braintrace.md
for the list of changes.
"""

from __future__ import annotations

import argparse

import brainstate
import braintrace
import jax
import jax.numpy as jnp
import optax

import etrace_bridge as eb


class Integrator(brainstate.nn.Module):
    """A cell and a readout, one time step at a call."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cell = braintrace.nn.MiniGRU(1, hidden)
        self.readout = braintrace.nn.Linear(hidden, 1)

    def update(self, x):
        """One time step."""
        return self.readout(self.cell(x))


def make_batch(key, steps: int = 25, batch: int = 64):
    """Noise around a constant that differs from sequence to sequence, and its running sum."""
    key_bias, key_noise = jax.random.split(key)
    bias = 0.05 * (jax.random.normal(key_bias, (1, batch, 1)) - 0.5)
    xs = bias + 0.05 * jax.random.normal(key_noise, (steps, batch, 1))
    return xs, jnp.cumsum(xs, axis=0)


def mean_squared_error(output, target):
    """The loss of one step."""
    return jnp.mean((output - target) ** 2)


def main(updates: int = 150, hidden: int = 32) -> tuple[float, float]:
    """Trains; returns the loss before and after."""
    brainstate.random.seed(0)
    model = Integrator(hidden)
    learner = eb.OnlineLearner(model, "d_rtrl", mean_squared_error, optax.adam(3e-3))
    keys = jax.random.split(jax.random.key(0), updates + 1)
    test = make_batch(keys[-1])
    before = learner.evaluate([test])
    for key in keys[:-1]:
        learner.update(*make_batch(key))
    after = learner.evaluate([test])
    print(learner.graph.report())
    print(f"loss before {before:.4f}, after {updates} updates {after:.4f}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a few updates, as the tests run it")
    main(5 if parser.parse_args().small else 150)
