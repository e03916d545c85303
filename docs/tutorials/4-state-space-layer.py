# %% [markdown]
# # A state-space layer, exact online
#
# State-space layers have a diagonal recurrence: each unit's state depends on its own past only. Then
# D-RTRL drops nothing, and online learning has the gradient of BPTT. Here is a linear recurrent unit
# (LRU) with complex weights.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import etrace_bridge as eb

torch.manual_seed(0)


class LRU(nn.Module):
    def __init__(self, inputs=1, hidden=16, outputs=1):
        super().__init__()
        size, angle = (
            torch.empty(hidden).uniform_(0.6, 0.98),
            torch.empty(hidden).uniform_(0.1, 1.5),
        )
        self.nu = nn.Parameter((-size.log()).log())
        self.theta = nn.Parameter(angle.log())
        self.B = nn.Parameter(torch.randn(hidden, inputs, dtype=torch.cfloat) / 4)
        self.C = nn.Parameter(torch.randn(outputs, hidden, dtype=torch.cfloat) / math.sqrt(hidden))

    def forward(self, x, h=None):  # one time step
        if h is None:
            h = torch.zeros(x.shape[0], len(self.nu), dtype=torch.cfloat)
        decay = torch.exp(torch.complex(-self.nu.exp(), self.theta.exp()))
        h = decay * h + x.to(torch.cfloat) @ self.B.T
        return (h @ self.C.T).real, h


# %% [markdown]
# The task: give back what came in ten steps ago.

# %%
DELAY = 10


def make_batch(steps=40, batch=16):
    x = torch.randn(steps, batch, 1)
    return x, torch.cat([torch.zeros(DELAY, batch, 1), x[:-DELAY]])


xs, targets = make_batch()
report = eb.check_gradients(LRU(), xs, targets, nn.functional.mse_loss, rule="d_rtrl")
print(f"{report.rule}: {report.verdict}, {len(report)} parameters")

# %% [markdown]
# The report above was made against torch's own `backward`, parameter by parameter. Training needs no
# `backward`:

# %%
model = LRU()
learner = eb.OnlineLearner(
    model,
    rule="d_rtrl",
    loss=nn.functional.mse_loss,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
)
losses = [learner.update(*make_batch()).loss for _ in range(250)]
print(f"mean squared error {losses[0]:.2f} at the start, {losses[-1]:.2f} at the end")

# %%
learner.sync_to_torch()
with torch.no_grad():
    state, response = None, []
    for n in range(40):  # the answer to a single pulse
        output, state = model(torch.full((1, 1), float(n == 0)), state)
        response.append(output.item())
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), num="Loss, and the answer to a pulse")
left.semilogy(losses)
left.set(xlabel="update", ylabel="mean squared error")
right.stem(response)
right.axvline(DELAY, color="tab:red", linestyle=":", label=f"asked for: {DELAY} steps later")
right.set(xlabel="step", ylabel="answer to a pulse")
right.legend()
figure.tight_layout()

# %% [markdown]
# `examples/state_space.py` has S4D, S5, Mamba's selective step, RWKV, xLSTM and others in the same
# form, and prints which of them are exact.
