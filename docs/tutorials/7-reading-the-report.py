# %% [markdown]
# # Reading the report until you trust it
#
# An online rule leaves something out unless the model lets it be exact. Three questions: what was
# read, what is promised, and is the promise kept?

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import etrace_bridge as eb

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.readout = nn.GRU(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.readout(self.gru(x)[0])


xs, targets = torch.randn(20, 4, 3), torch.randn(20, 4, 2)

# %% [markdown]
# **What was read.** The compiler lists every parameter, where it meets a state, and what a diagonal
# rule would drop:

# %%
net = eb.wrap(Net())
net.init_state(batch_size=4)
graph = eb.compile_etrace_graph(net, eb.to_jax(xs[0]))
print(graph.report())

# %% [markdown]
# **What is promised.** The certificate says for each parameter whether `d_rtrl` is exact. The readout
# is, since no state lies behind it. The recurrent weights are not: their effect on other units through
# `weight_hh` is dropped.
#
# **Is it kept?** `check_gradients` computes the same gradients by torch's BPTT, in float64:

# %%
report = eb.check_gradients(Net(), xs, targets, nn.functional.mse_loss, rule="d_rtrl")
print(report)

# %% [markdown]
# Read the columns from the left: a parameter that is certified must agree to rounding, or the report
# is not ok. For the others the *cosine* says whether the update points the right way, and the *norm
# ratio* whether it is too long or too short.

# %%
figure, axes = plt.subplots(figsize=(7, 3), num="Cosine and norm ratio by parameter")
names = [p.name for p in report]
places = range(len(names))
axes.bar([n - 0.2 for n in places], [p.cosine for p in report], 0.4, label="cosine")
axes.bar([n + 0.2 for n in places], [p.norm_ratio for p in report], 0.4, label="norm ratio")
axes.axhline(1.0, color="grey", linestyle=":")
axes.set_xticks(list(places), names, rotation=20, ha="right")
axes.legend(loc="lower right")
axes.set_ylim(0, 1.3)

# %% [markdown]
# **A check that cannot fail shows nothing.** With inputs of zero the input weights have no gradient at
# all, and agreement means nothing. The report says so instead of saying ok:

# %%
silent = eb.check_gradients(Net(), 0 * xs, targets, nn.functional.mse_loss, rule="d_rtrl")
print(silent.ok)

# %% [markdown]
# [Reading the gradient report](../reading-the-report.md) explains every column and verdict.
