# %% [markdown]
# # A brainstate spiking network
#
# A model need not be torch's. Here is a recurrent network of leaky integrate-and-fire neurons as a
# plain `brainstate` module, in physical units: membranes in mV, a time constant in ms that is learned.

# %%
import brainstate
import braintools
import brainunit as u
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import etrace_bridge as eb

brainstate.random.seed(0)


class Spiking(brainstate.nn.Module):
    def __init__(self, inputs=8, hidden=32):
        super().__init__()
        draw = brainstate.random.randn
        self.inner = brainstate.ParamState(draw(inputs, hidden) * 0.6 * u.mV)
        self.recurrent = brainstate.ParamState(draw(hidden, hidden) * 0.05 * u.mV)
        self.tau = brainstate.ParamState(jnp.full(hidden, 10.0) * u.ms)
        self.readout = brainstate.nn.Linear(hidden, 1)
        self.hidden = hidden

    def init_state(self, batch_size, **_):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, self.hidden)) * u.mV)
        self.rate = brainstate.HiddenState(jnp.zeros((batch_size, self.hidden)))

    def update(self, x):  # one step of 1 ms
        spike = braintools.surrogate.sigmoid(self.V.value / u.mV - 1.0)
        V = self.V.value - spike * u.mV  # the reset
        drive = x @ self.inner.value + spike @ self.recurrent.value
        self.V.value = V * jnp.exp(-1.0 * u.ms / self.tau.value) + drive
        self.rate.value = 0.9 * self.rate.value + 0.1 * spike
        return self.readout(self.rate.value)


def squared(output, target):
    return jnp.mean((output - target) ** 2)


# %% [markdown]
# The task: eight input trains fire at a common rate, which changes in the middle; follow that rate.


# %%
def make_batch(key, steps=40, batch=16):
    rates = jax.random.uniform(key, (2, 1, batch, 1), minval=0.05, maxval=0.6)
    rate = jnp.concatenate([jnp.broadcast_to(r, (steps // 2, batch, 1)) for r in rates])
    spikes = jax.random.uniform(jax.random.fold_in(key, 1), (steps, batch, 8)) < rate
    return spikes.astype(jnp.float32), rate


model = Spiking()
learner = eb.OnlineLearner(model, "d_rtrl", squared, optax.adam(1e-2))
keys = jax.random.split(jax.random.key(0), 120)
losses = [learner.update(*make_batch(key)).loss for key in keys]
print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end")

# %% [markdown]
# The module itself holds the trained weights, with their units; gradients come back with units too,
# 1/ms for a time in ms.

# %%
xs, rate = make_batch(jax.random.key(9))
grads = learner.gradients(xs, rate).grads
print(model.tau.value.unit, "and its gradient", grads["tau"].unit)

# %%
outputs = learner.predict(xs)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), num="Loss, and rates followed")
left.semilogy(losses)
left.set(xlabel="update", ylabel="loss")
for n, colour in enumerate(("tab:blue", "tab:orange", "tab:green")):
    right.plot(rate[:, n, 0], color=colour, linestyle=":")
    right.plot(outputs[:, n, 0], color=colour)
right.set(xlabel="ms", ylabel="rate (dotted: true)")
figure.tight_layout()

# %% [markdown]
# `check_gradients` compares such a module with `jax.grad` through time. `rtrl` must be equal to it:

# %%
brainstate.random.seed(0)
small = make_batch(jax.random.key(1), steps=6, batch=2)
print(eb.check_gradients(Spiking(hidden=4), *small, squared, rule="rtrl").ok)

# %% [markdown]
# [From braintrace](../from-braintrace.md) has what else such modules may contain.
