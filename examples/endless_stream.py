"""An adaptive filter on an endless stream: one step at a time, in memory that never grows.

A signal passes through an unknown channel with an echo. A GRU hears the signal and learns what
comes out of the channel while it listens: each sample is one call of `step`, with an update.
Half-way through, the channel changes and the filter has to adapt again. No sample is kept, so the
memory of the process after a million steps is that after a thousand.

The same model is then trained by torch on the first part of the stream: an update a sample too,
each by backpropagation through a window of the last samples, which is as close as BPTT gets to a
stream.

    python examples/endless_stream.py --steps 1000000
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from collections.abc import Iterator

import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge.learning.progress import resident_memory

HIDDEN, TAPS, WINDOW, BLOCK = 16, 8, 16, 1000
LEARNING_RATE = 0.05


class Filter(torch.nn.Module):
    """A GRU with a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(1, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, 1)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.gru(x, state)
        return self.out(y), state


def channel(change_at: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Samples (1, 1) that go into the channel and come out of it, for ever; the echo changes its
    sign at one moment.
    """
    made = torch.Generator().manual_seed(0)
    decay = 0.7 ** torch.arange(TAPS)
    memory, n = torch.zeros(TAPS - 1), 0
    while True:
        signal = torch.randn(BLOCK, generator=made)
        heard = torch.cat([memory, signal]).unfold(0, TAPS, 1).flip(1)  # newest first
        for x, past in zip(signal, heard, strict=True):
            response = decay * (1 if n < change_at else -1)
            response[0] = 1
            yield x.reshape(1, 1), torch.tanh(0.5 * (past @ response)).reshape(1, 1)
            n += 1
        memory = signal[1 - TAPS :]


def explained(errors: float, targets: float) -> float:
    """The part of the output's power that the filter predicts."""
    return 1 - errors / targets


def listen(learner: eb.OnlineLearner, steps: int, change_at: int, reports: int) -> list[float]:
    """Learns from the stream; the explained part in each interval between two reports."""
    interval, scores = max(steps // reports, 1), []
    errors = targets = 0.0
    begun = time.perf_counter()
    for n, (x, y) in enumerate(channel(change_at), start=1):
        errors += learner.step(x, y).loss
        targets += float(y) ** 2
        if n % interval == 0:
            scores.append(explained(errors, targets))
            speed = n / (time.perf_counter() - begun)
            memory = resident_memory() / 2**20
            print(
                f"  {n:>9,} steps: {scores[-1]:.4f} of the power explained, {memory:,.1f} MB held, "
                f"{speed:,.0f} steps/s"
            )
            errors = targets = 0.0
        if n == steps:
            return scores
    return scores


def windowed_bptt(model: Filter, steps: int, change_at: int, last: int) -> float:
    """An update a sample in torch, by BPTT through a window; the explained part over the last
    samples.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    past: deque = deque(maxlen=WINDOW)  # inputs, and the state before each
    state = torch.zeros(1, 1, HIDDEN)
    errors = targets = 0.0
    for n, (x, y) in enumerate(channel(change_at), start=1):
        past.append((x, state))
        outputs, _ = model(torch.stack([each for each, _ in past]), past[0][1])
        loss = mse_loss(outputs[-1], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            state = model(x[None], state)[1]
        if n > steps - last:
            errors += loss.item()
            targets += float(y) ** 2
        if n == steps:
            break
    return explained(errors, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="length of the stream")
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    options = parser.parse_args()
    steps = 2_000 if options.small else options.steps
    compared = min(steps // 2, 10_000)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Filter()
    reference = copy.deepcopy(model)

    print(f"Online, D-RTRL, {steps:,} steps; the channel changes after {steps // 2:,}:")
    learner = eb.OnlineLearner(
        model,
        rule="d_rtrl",
        loss=mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
    )
    listen(learner, steps, steps // 2, reports=10)

    print(f"The first {compared:,} steps again, for the comparison:")
    torch.manual_seed(0)
    again = Filter()
    learner = eb.OnlineLearner(
        again,
        rule="d_rtrl",
        loss=mse_loss,
        optimizer=torch.optim.SGD(again.parameters(), lr=LEARNING_RATE),
    )
    online = listen(learner, compared, steps, reports=4)[-1]
    bptt = windowed_bptt(reference, compared, steps, last=compared // 4)
    print(
        f"Explained in the last quarter: online {online:.4f}, torch BPTT through {WINDOW} steps "
        f"{bptt:.4f}."
    )
    print(f"Online reaches {100 * online / bptt:.1f}% of BPTT, without a window to keep.")


if __name__ == "__main__":
    main()
