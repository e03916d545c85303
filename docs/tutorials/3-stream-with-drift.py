# %% [markdown]
# # An endless stream with drift
#
# A filter listens to a signal and learns, sample by sample, what comes out of an unknown channel.
# Half-way the channel changes. Nothing is kept but the weights, the state and the trace, so the stream
# may go on for ever.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import etrace_bridge as eb

torch.manual_seed(0)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.readout = nn.GRU(1, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.readout(self.gru(x)[0])


def channel(steps, change_at):
    """Yields what goes into the channel and what comes out; its echo changes sign."""
    past = torch.zeros(6)
    response = 0.7 ** torch.arange(6)
    for n in range(steps):
        past = torch.cat([torch.randn(1), past[:-1]])
        sign = torch.ones(6)
        sign[1:] = 1.0 if n < change_at else -1.0
        yield past[:1].reshape(1, 1), torch.tanh(0.5 * (past @ (sign * response))).reshape(1, 1)


# %% [markdown]
# `step` runs one sample: output, trace, gradient, update.

# %%
STEPS, CHANGE = 3000, 1500
model = Filter()
learner = eb.OnlineLearner(
    model,
    rule="d_rtrl",
    loss=nn.functional.mse_loss,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
)
errors, power = [], []
for x, y in channel(STEPS, CHANGE):
    errors.append(learner.step(x, y).loss)
    power.append(float(y) ** 2)

# %% [markdown]
# The part of the output's power that the filter predicts, over the last 100 samples. It falls when
# the channel changes and comes back, without anybody telling the filter.

# %%
WINDOW = 100
sums = [torch.tensor(values).unfold(0, WINDOW, 1).sum(1) for values in (errors, power)]
explained = 1 - sums[0] / sums[1]
figure, axes = plt.subplots(figsize=(7, 3), num="Explained power along the stream")
axes.plot(range(WINDOW, STEPS + 1), explained)
axes.axvline(CHANGE, color="tab:red", linestyle=":", label="the channel changes")
axes.set(xlabel="step", ylabel="explained", ylim=(-1.0, 1.05))
axes.legend(loc="lower right")
axes.grid(alpha=0.3)

# %%
before, dip, after = explained[CHANGE - WINDOW], explained[CHANGE - WINDOW :].min(), explained[-1]
print(f"explained before the change {before:.2f}, at worst {dip:.2f}, at the end {after:.2f}")

# %% [markdown]
# More: [long streams](../howto/long-streams.md) on saving, resetting and measuring;
# [the fidelity meter](../howto/fidelity-meter.md) on whether updates go downhill on the true loss,
# which a stream has no other way to know.
