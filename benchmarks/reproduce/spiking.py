"""Tasks for spiking networks: accumulation of evidence (E) and delayed match to sample (G)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.reproduce.sequences import make_learner
from benchmarks.reproduce.tasks import Outcome, Size, Task
from benchmarks.reproduce.training import Method


class Spike(torch.autograd.Function):
    """A step, whose declared derivative is a triangle of height `DAMPENING`."""

    DAMPENING = 0.3

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grads[0] * Spike.DAMPENING * torch.clamp(1 - v.abs(), min=0)


class AdaptiveNet(nn.Module):
    """Recurrent spiking neurons, half of them with an adaptive threshold, and a leaky readout.

        v' = α v + W_in x + W_rec z - θ z,   a' = ρ a + z,   z' = H((v' - θ - β a') / θ) unless refractory

    with β = 1.7 (1 - ρ) / (1 - α) for the adaptive neurons and 0 for the others.

    Args:
        inputs: number of inputs.
        plain: neurons with a fixed threshold.
        adaptive: neurons whose threshold rises with every spike.
        outputs: number of outputs.
        tau_a: time constant of the adaptation in steps.
        refractory: steps without a spike after one.
    """

    def __init__(
        self, inputs: int, plain: int, adaptive: int, outputs: int, tau_a: float, refractory: int
    ) -> None:
        super().__init__()
        n = plain + adaptive
        self.w_in = nn.Parameter(torch.randn(n, inputs) / math.sqrt(inputs))
        self.w_rec = nn.Parameter(torch.randn(n, n) / math.sqrt(n))
        self.out = nn.Linear(n, outputs)
        self.alpha, self.kappa = math.exp(-1 / 20), math.exp(-1 / 20)
        self.rho, self.threshold, self.refractory = math.exp(-1 / tau_a), 0.6, float(refractory)
        is_adaptive = torch.cat([torch.zeros(plain), torch.ones(adaptive)])
        self.register_buffer("beta", 1.7 * (1 - self.rho) / (1 - self.alpha) * is_adaptive)
        self.register_buffer("no_self", 1 - torch.eye(n))

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        """(T, batch, inputs) to leaky sums of the spikes, and the spikes."""
        batch, n = xs.shape[1], self.w_rec.shape[0]
        v = a = z = rest = xs.new_zeros(batch, n)
        y = xs.new_zeros(batch, self.out.out_features)
        outputs, spikes = [], []
        for x in xs:
            current = x @ self.w_in.T + z @ (self.w_rec * self.no_self).T
            v = self.alpha * v + current - self.threshold * z
            a = self.rho * a + z
            rest = torch.where(z > 0, self.refractory, rest - 1)
            z = Spike.apply((v - self.threshold - self.beta * a) / self.threshold)
            z = z * (rest <= 0).to(z.dtype)
            y = self.kappa * y + self.out(z)
            outputs.append(y)
            spikes.append(z)
        return torch.stack(outputs), torch.stack(spikes)


RATE_TARGET, RATE_WEIGHT = 0.01, 1.0  # spikes per step (10 Hz), and the weight of the regulariser


def loss_with_rate(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy where `target[1]` is 1, and everywhere a pull of each neuron's rate towards 10
    Hz.
    """
    logits, spikes = output
    label, counts = target
    each = F.cross_entropy(logits, label, reduction="none")
    rate = spikes.mean(0)
    return (each * counts).mean() + RATE_WEIGHT * ((rate - RATE_TARGET) ** 2).mean()


def evidence_batch(size: Size, generator: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Cues at the left and right, a delay, then the question at which side more were shown."""
    batch, cue, gap = size.pick(64, 8), size.pick(100, 4), size.pick(50, 2)
    cues, delay, ask = size.pick(7, 3), size.pick(1000, 6), size.pick(150, 6)
    steps = cues * (cue + gap) + delay + ask
    chance = torch.full((steps, batch, 40), 0.01)
    chance[:, :, :20] = 0
    chance[:, :, 20:30] = 0  # the question
    more = torch.rand(batch, generator=generator) < 0.5
    sides = torch.rand(cues, batch, generator=generator) < torch.where(more, 0.7, 0.3)
    for n in range(cues):
        part = slice(n * (cue + gap), n * (cue + gap) + cue)
        chance[part, :, :10] = torch.where(sides[n], 0.04, 0.0)[:, None]
        chance[part, :, 10:20] = torch.where(sides[n], 0.0, 0.04)[:, None]
    chance[-ask:, :, 20:30] = 0.04
    if size.small:
        chance = chance * 8
    xs = (torch.rand(steps, batch, 40, generator=generator) < chance).float()
    label = (2 * sides.sum(0) > cues).long()
    counts = (torch.arange(steps) >= steps - ask).float()[:, None].expand(-1, batch) * steps / ask
    return xs, (label.expand(steps, -1).contiguous(), counts.contiguous())


def accumulate(setting: str, method: Method, seed: int, size: Size) -> Outcome:
    """Train on fresh batches; the score is the share of wrong decisions in the last tenth."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = AdaptiveNet(
        40, size.pick(50, 12), size.pick(50, 12), 2, size.pick(2000, 40), size.pick(5, 2)
    )
    learner = make_learner(model, method, 5e-3, loss_with_rate)
    wrong = []
    for _ in range(size.steps(EVIDENCE.steps[setting], 2)):
        xs, targets = evidence_batch(size, generator)
        result = learner.update(xs, targets)
        ask = targets[1][:, 0] > 0
        decision = result.outputs[0][ask].mean(0).argmax(-1)
        wrong.append(float((decision != targets[0][-1]).float().mean()))
    return Outcome(float(np.mean(wrong[-max(len(wrong) // 10, 1) :])), np.array(wrong), len(wrong))


EVIDENCE = Task(
    key="E",
    title="Accumulation of evidence",
    measure="share of wrong decisions, last tenth of training",
    lower_is_better=True,
    steps={"50 LIF + 50 ALIF": 300},
    unit="batches",
    source="Bellec et al., e-prop",
    published={"eprop": (0.07,), "bptt": (0.07,)},
    setup=(
        "40 inputs, 50 LIF and 50 ALIF neurons, 7 cues of 100 ms at 40 Hz, a delay, 150 ms of "
        "question; τ_v 20, τ_a 2000, threshold 0.6, refractory 5, dampening 0.3, rates pulled to "
        "10 Hz, Adam 5e-3, batch of 64, 300 iterations; the loss in the last 150 steps. "
        "Published: an error below 0.07 after 200 to 500 iterations."
    ),
    run=accumulate,
    notes=(
        "One seed. `d_rtrl` and `eprop` are below the published error, and without credit through "
        "time nothing is learned. `bptt` learns fastest and is at 0.02 to 0.05 from a third to four "
        "fifths of training, then gets worse again; why was not looked into (the learning rate is "
        "constant and gradients are not clipped)."
    ),
    without={"tbptt 1": "is `immediate` with one update per sequence"},
)


def match_batch(
    delay: int, size: Size, generator: torch.Generator
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One of 8 directions, a delay, the same or another direction: is it the same?"""
    batch, sample, ask = size.pick(64, 8), size.pick(500, 8), size.pick(200, 6)
    inputs = 100
    centres = torch.arange(inputs) * 2 * math.pi / inputs
    first = torch.randint(8, (batch,), generator=generator)
    other = (first + torch.randint(1, 8, (batch,), generator=generator)) % 8
    same = torch.rand(batch, generator=generator) < 0.5
    second = torch.where(same, first, other)

    def rates(direction: Tensor) -> Tensor:
        angle = direction[:, None] * 2 * math.pi / 8
        return 0.1 * torch.exp(4 * (torch.cos(centres - angle) - 1))

    steps = sample + delay + sample + ask
    chance = torch.full((steps, batch, inputs), 0.001)
    chance[:sample] += rates(first)
    chance[sample + delay : sample + delay + sample] += rates(second)
    xs = (torch.rand(steps, batch, inputs, generator=generator) < chance).float()
    counts = (torch.arange(steps) >= steps - ask).float()[:, None].expand(-1, batch) * steps / ask
    return xs, (same.long().expand(steps, -1).contiguous(), counts.contiguous())


def match(setting: str, method: Method, seed: int, size: Size) -> Outcome:
    """Train on fresh batches; the score is the share of right answers in the last tenth."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    delay = size.pick(int(setting.split()[1]), 4)
    model = AdaptiveNet(100, size.pick(64, 12), size.pick(64, 12), 2, size.pick(1000, 40), 2)
    learner = make_learner(model, method, 3e-3, loss_with_rate)
    right = []
    for _ in range(size.steps(MATCH.steps[setting], 2)):
        xs, targets = match_batch(delay, size, generator)
        result = learner.update(xs, targets)
        asked = targets[1][:, 0] > 0
        answer = result.outputs[0][asked].mean(0).argmax(-1)
        right.append(float((answer == targets[0][-1]).float().mean()))
    return Outcome(float(np.mean(right[-max(len(right) // 10, 1) :])), np.array(right), len(right))


MATCH = Task(
    key="G",
    title="Delayed match to sample, shortened",
    measure="share of right answers, last tenth of training",
    lower_is_better=False,
    steps={"delay 300 ms": 300, "delay 1000 ms": 300},
    unit="batches",
    source="the D-RTRL and pp-prop project; its set-up reaches 95%",
    published={"d_rtrl": (0.95, None), "pp_prop": (0.95, None)},
    setup=(
        "8 directions, 100 Poisson inputs at up to 100 Hz over 1 Hz, 500 ms of sample, a delay of "
        "300 or 1000 ms (the original: longer), 500 ms of test, 200 ms for the answer; 64 LIF and "
        "64 ALIF neurons, Adam 3e-3, batch of 64, 300 iterations."
    ),
    run=match,
    notes=(
        "One seed; half is chance, and the standard error of a score is 0.018. In the full training "
        "`bptt` learns the task in good part, and the rules with a trace are still at chance: here "
        "the published 95% of the original's set-up is not reached. Why was not looked into."
    ),
    without={"tbptt 1": "is `immediate` with one update per sequence"},
)
