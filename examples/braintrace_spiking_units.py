"""braintrace's spiking integrator, ported: neurons of brainpy.state with physical units, and
pp_prop.

Membranes are in mV, currents in mA, time constants in ms; weights carry the unit of what they make,
and keep it while they are trained. The readout adds up spikes of a random spike train.
"""

from __future__ import annotations

import argparse

import brainpy
import brainstate
import braintrace
import brainunit as u
import jax
import jax.numpy as jnp
import optax

import etrace_bridge as eb


class Spiking(brainstate.nn.Module):
    """A recurrent layer of leaky integrate-and-fire neurons, and a leaky readout."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        draw = weights_with_unit(2.0 * u.mA)
        self.neuron = brainpy.state.LIF(
            hidden,
            tau=20.0 * u.ms,
            V_th=1.0 * u.mV,
            V_reset=0.0 * u.mV,
            V_rest=0.0 * u.mV,
            R=1.0 * u.ohm,
        )
        self.current = braintrace.nn.Linear(inputs + hidden, hidden, w_init=draw, b_init=None)
        self.readout = braintrace.nn.LeakyRateReadout(hidden, outputs, tau=10.0 * u.ms)

    def update(self, x):
        """One time step of 1 ms."""
        spikes = self.neuron.get_spike()
        return self.readout(self.neuron(self.current(jnp.concatenate([x, spikes], axis=-1))))


def weights_with_unit(scale):
    """Weights with a unit."""

    def draw(shape, **_):
        return brainstate.random.randn(*shape) * scale / shape[0] ** 0.5

    return draw


def make_batch(key, steps: int = 40, batch: int = 32, inputs: int = 8):
    """Spike trains of different rates, and the running mean of their spikes."""
    rates = jax.random.uniform(key, (1, batch, 1), minval=0.05, maxval=0.5)
    xs = (jax.random.uniform(jax.random.fold_in(key, 1), (steps, batch, inputs)) < rates).astype(
        jnp.float32
    )
    return xs, jnp.cumsum(xs.mean(-1, keepdims=True), 0) / steps


def mean_squared_error(output, target):
    """The loss of one step."""
    return jnp.mean((output - target) ** 2)


def main(updates: int = 100, hidden: int = 32) -> tuple[float, float]:
    """Trains; returns the loss before and after."""
    brainstate.random.seed(0)
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Spiking(8, hidden, 1)
        learner = eb.OnlineLearner(model, "pp_prop", mean_squared_error, optax.adam(2e-2))
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
    main(5 if parser.parse_args().small else 100)
