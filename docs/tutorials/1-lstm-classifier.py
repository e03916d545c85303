# %% [markdown]
# # An LSTM classifier
#
# A torch LSTM, a `DataLoader` with sequences of different lengths, one label for each sequence, and
# `torch.optim`: nothing of your training data or model changes. What changes is that the gradient is
# computed forwards in time, in memory that does not depend on the length.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import etrace_bridge as eb

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.readout = nn.LSTM(2, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.readout(self.lstm(x)[0])


# %% [markdown]
# The task: a sequence has a marked value at its start and noise after it. Was the marked value
# positive? The answer is asked for at the last step, which is a different one for each sequence.


# %%
def make_sequence(length):
    x = torch.randn(length, 2)
    x[:, 1] = 0.0
    x[0, 1] = 1.0  # the mark
    return x, int(x[0, 0] > 0)


def collate(items):
    lengths = torch.tensor([len(x) for x, _ in items])
    labels = torch.tensor([label for _, label in items])
    return pad_sequence([x for x, _ in items]), labels, eb.length_mask(lengths, steps=20)


lengths = torch.randint(8, 21, (320,)).tolist()
lengths[::32] = [20] * len(lengths[::32])  # one full length in every batch
data = [make_sequence(n) for n in lengths]
train = DataLoader(data[:256], batch_size=32, collate_fn=collate)
test = DataLoader(data[256:], batch_size=32, collate_fn=collate)

# %% [markdown]
# `length_mask` says which steps exist; `loss_at="last"` puts the loss at the last step that does.

# %%
model = Classifier()
learner = eb.OnlineLearner(
    model,
    rule="d_rtrl",
    loss=nn.functional.cross_entropy,
    optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
    loss_at="last",
)
history = learner.fit(train, epochs=12, validation=test, metrics="accuracy", progress=False)
print(history)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), num="Loss and accuracy by epoch")
epochs = [record["epoch"] for record in history.epochs]
for axes, name in ((left, "loss"), (right, "accuracy")):
    axes.plot(epochs, [r[name] for r in history.epochs], label="train")
    axes.plot(epochs, [r[f"validation_{name}"] for r in history.epochs], label="validation")
    axes.set(xlabel="epoch", ylabel=name)
    axes.grid(alpha=0.3)
right.axhline(0.5, color="grey", linestyle=":", label="chance")
right.legend()
figure.tight_layout()

# %% [markdown]
# The weights go back into the torch model, which then runs as any other:

# %%
learner.sync_to_torch()
x, label, mask = next(iter(test))
with torch.no_grad():
    outputs = model(x)
last = mask.sum(0).long() - 1
right_ones = (outputs[last, torch.arange(len(label))].argmax(1) == label).float().mean()
print(f"torch's own forward pass: {right_ones:.0%} of a test batch is right")

# %% [markdown]
# Next: [sequences as you have them](../howto/sequences.md) has `PackedSequence`, losses over a whole
# sequence and ignored labels; [the torch loop](../howto/torch-loop.md) keeps your own training loop.
