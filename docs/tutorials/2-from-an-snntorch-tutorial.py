# %% [markdown]
# # From an snnTorch tutorial to online
#
# snnTorch's tutorials train a network of leaky integrate-and-fire neurons by backpropagation through
# time (BPTT). Here is such a loop, before and after.

# %%
import matplotlib.pyplot as plt
import snntorch as snn
import torch
from snntorch import functional as SF
from torch import nn

import etrace_bridge as eb

STEPS = 25


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(20, 32), snn.Leaky(beta=0.9)
        self.fc2, self.lif2 = nn.Linear(32, 3), snn.Leaky(beta=0.9)

    def forward(self, x):  # (steps, batch, 20), as in the tutorials
        mem1, mem2 = self.lif1.init_leaky(), self.lif2.init_leaky()
        spikes = []
        for step in range(x.shape[0]):
            spk1, mem1 = self.lif1(self.fc1(x[step]), mem1)
            spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
            spikes.append(spk2)
        return torch.stack(spikes)


def make_batch(batch=64):
    """Spike trains: each of three classes has its own pattern of rates."""
    label = torch.randint(0, 3, (batch,))
    rate = 0.1 + 0.35 * (torch.arange(20) % 3 == label[:, None])
    return (torch.rand(STEPS, batch, 20) < rate).float(), label


def accuracy(spikes, label):
    return float((spikes.sum(0).argmax(1) == label).float().mean())


torch.manual_seed(0)
batches = [make_batch() for _ in range(30)]
loss = SF.ce_rate_loss()

# %% [markdown]
# **Before**: torch keeps every step of the sequence until `backward` is done.

# %%
torch.manual_seed(1)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
before = []
for x, label in batches:
    spikes = net(x)
    before.append(accuracy(spikes, label))
    optimizer.zero_grad()
    loss(spikes, label).backward()
    optimizer.step()

# %% [markdown]
# **After**: the same class, with its loop over time, and the same loss. The bridge reads the step
# out of the loop. The rate loss reads all spikes, so it is given as `seq_loss`.

# %%
torch.manual_seed(1)
net = Net()
learner = eb.OnlineLearner(
    net, "d_rtrl", seq_loss=loss, optimizer=torch.optim.Adam(net.parameters(), lr=5e-3)
)
after = [accuracy(learner.update(x, label).outputs, label) for x, label in batches]
learner.sync_to_torch()

# %%
figure, axes = plt.subplots(figsize=(6, 3), num="Accuracy by update, before and after")
axes.plot(before, label="before: torch BPTT")
axes.plot(after, label="after: online, d_rtrl")
axes.axhline(1 / 3, color="grey", linestyle=":", label="chance")
axes.set(xlabel="update", ylabel="accuracy on the batch")
axes.legend()
axes.grid(alpha=0.3)

# %% [markdown]
# What is left out? D-RTRL drops credit that crosses a product with weights between steps. The report
# says for which parameters that matters, by their torch names:

# %%
for path, certificate in learner.graph.certificate().items():
    print(".".join(path), "exact" if certificate.exact else "approximate")

# %% [markdown]
# `eb.rules.LowRankRTRL` keeps most of what `d_rtrl` drops between layers; see
# [the rules](../rules.md) and [from snnTorch](../from-snntorch.md).
