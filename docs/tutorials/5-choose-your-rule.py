# %% [markdown]
# # Choose your rule, with the evidence
#
# Rules differ in what they leave out, in memory and in time. Which one fits depends on the model, so
# measure it on yours: one call compares the rules with torch's BPTT on your model and data.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import etrace_bridge as eb

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.readout = nn.GRU(4, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.readout(self.rnn(x)[0])


xs, targets = torch.randn(24, 4, 4), torch.randn(24, 4, 2)
rules = ["rtrl", "d_rtrl", "pp_prop"]
comparison = eb.check_gradients(Net(), xs, targets, nn.functional.mse_loss, rule=rules)
for report in comparison:
    print(f"{report.rule:10s} {report.verdict:13s} cosine {report.cosine:.3f}")

# %% [markdown]
# `exact` means equal to BPTT to rounding. `as certified` means that each parameter that is promised
# exact is so, and that the others are what the rule gives: look at the cosine.

# %%
figure, axes = plt.subplots(figsize=(6, 3.2), num="Fidelity against memory")
for report in comparison:
    axes.scatter(report.memory / 1e3, report.cosine, s=60)
    axes.annotate(
        report.rule, (report.memory / 1e3, report.cosine), (6, -12), textcoords="offset points"
    )
axes.set(
    xscale="log", xlabel="memory of the compiled program, kB", ylabel="cosine to BPTT's gradient"
)
axes.margins(x=0.25, y=0.2)
axes.grid(alpha=0.3)

# %% [markdown]
# With a budget, `recommend` compiles the rules, runs those that fit, and names the most faithful one:

# %%
found = eb.recommend(Net(), xs[0], "200kB", rules=rules, steps=24)
print(found.rule)

# %% [markdown]
# [The rules](../rules.md) has the equations and costs, [fidelity](../fidelity.md) measurements on
# more models, and the [fidelity meter](../howto/fidelity-meter.md) measures while you train.
