"""A torch training loop in which only `backward` is replaced: gradients online, the rest as it was.

`gradients` computes what `loss.backward()` would, without keeping the sequence's activations;
`fill_grad` puts it into `.grad`. The optimizer, its scheduler, clipping and the model stay torch's,
so an existing loop changes in two lines. Here an Elman network learns to add up a noisy signal,
beside torch's own loop on the same data.

    python examples/torch_optim_loop.py
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb


class Adder(torch.nn.Module):
    """An RNN with a readout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn = torch.nn.RNN(1, hidden)
        self.out = torch.nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


def make_batch(seed: int, steps: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and its leaky sum."""
    xs = torch.randn(steps, batch, 1, generator=torch.Generator().manual_seed(seed))
    sums, total = [], torch.zeros(batch, 1)
    for x in xs:
        total = 0.9 * total + 0.2 * x
        sums.append(total)
    return xs, torch.stack(sums)


def train(model: Adder, updates: int, steps: int, batch: int, online: bool) -> list[float]:
    """The loop, with torch's `backward` or with a learner's gradients; the loss at every update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=mse_loss) if online else None
    losses = []
    for n in range(updates):
        xs, targets = make_batch(n, steps, batch)
        optimizer.zero_grad()
        if learner is not None:
            learner.sync_from_torch()  # the weights that torch's optimizer has changed
            found = learner.gradients(xs, targets)
            learner.fill_grad(found)
            losses.append(found.loss)
        else:
            loss = mse_loss(model(xs), targets)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    options = parser.parse_args()
    updates, steps, batch, hidden = (20, 15, 8, 16) if options.small else (400, 40, 32, 32)
    torch.manual_seed(0)
    model = Adder(hidden)
    reference = copy.deepcopy(model)
    online = train(model, updates, steps, batch, online=True)
    bptt = train(reference, updates, steps, batch, online=False)
    print(
        f"Leaky sum of noise, {updates} updates by torch.optim.AdamW; the first loss is "
        f"{online[0]:.4f} for both."
    )
    for n in range(updates // 4, updates + 1, updates // 4):
        print(f"  after {n:>4} updates: online {online[n - 1]:.5f}, torch BPTT {bptt[n - 1]:.5f}")


if __name__ == "__main__":
    main()
