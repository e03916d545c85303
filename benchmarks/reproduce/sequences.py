"""Tasks whose updates come once per sequence: copying (F, H) and digits (I)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import optax
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import etrace_bridge as eb
from benchmarks.reproduce.lru import LRUStack
from benchmarks.reproduce.programs import Stopwatch
from benchmarks.reproduce.tasks import Outcome, Piece, Size, Task
from benchmarks.reproduce.training import Loss, Method, Readout, cross_entropy
from etrace_bridge.rules import make_rule


def end(
    learner: eb.OnlineLearner, model: nn.Module, xs: Tensor, ys: Tensor, weights: Tensor, loss: Loss
) -> Piece:
    """The trained model and a batch on which gradients are compared."""
    learner.sync_to_torch()
    return Piece(model, xs.numpy(), ys.numpy(), weights.numpy(), loss)


def make_learner(model: nn.Module, method: Method, rate: float, loss=F.cross_entropy, **options):
    """A learner with Adam; a window is its chunk, a whole sequence for full BPTT.

    Rules with a trace give the same gradient in chunks of any length, as weights are fixed within a
    sequence, so those take the fastest. But for weights without a trace: `upstream="step"` keeps
    these from getting credit along a chunk, which they would not get on a stream.
    """
    rule = make_rule(method.rule)
    if hasattr(rule, "upstream"):
        rule = replace(rule, upstream="step")
    chunk = 10**6 if method.whole else "auto" if rule.schedule != "reverse" else method.window
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return eb.OnlineLearner(
        eb.wrap(model, sequence=True), rule, loss, optimizer, chunk=chunk, **options
    )


# -- F: copying with linear recurrent units -------------------------------------------------------


def pattern_batch(bits: int, length: int, pad: int, batch: int, generator: torch.Generator):
    """Bits to be repeated after a pause; with the mask of the steps that count."""
    pattern = torch.randint(2, (length, batch, bits), generator=generator).float()
    steps = 2 * length + pad + 1
    xs, ys = torch.zeros(steps, batch, bits + 1), torch.zeros(steps, batch, bits)
    xs[:length, :, :bits] = pattern
    xs[length + pad, :, bits] = 1
    ys[-length:] = pattern
    return xs, ys, (torch.arange(steps) >= steps - length).float()


def copy_with_lru(setting: str, method: Method, seed: int, size: Size) -> Outcome:
    """Train on fresh patterns; the score is the accuracy of bits at the end."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    bits, length = size.pick(7, 2), size.pick(20, 3)
    if setting == "GRU":
        model: nn.Module = Readout("gru", bits + 1, size.pick(134, 12), bits)
    else:
        layers = int(setting.split("×")[1])
        model = LRUStack(bits + 1, size.pick(128, 8), size.pick(64, 4), bits, layers)
    learner = make_learner(model, method, 1e-3, F.binary_cross_entropy_with_logits)
    batch = lambda: pattern_batch(bits, length, size.pick(7, 1), size.pick(50, 8), generator)
    curve, clock = [], Stopwatch()
    for _ in range(size.steps(COPY_WITH_LRU.steps[setting], 6)):
        xs, ys, mask = batch()
        result = learner.update(xs, ys, mask)
        right = (result.outputs > 0).float() == ys
        curve.append(float(right[mask > 0].float().mean()))
        clock.lap()
    score = float(np.mean(curve[-max(len(curve) // 20, 1) :]))
    piece = end(learner, model, *batch(), bit_error)
    return Outcome(score, np.array(curve), len(curve), clock.seconds, piece)


def bit_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy of the bits of each batch element."""
    return optax.sigmoid_binary_cross_entropy(outputs, targets).mean(-1)


COPY_WITH_LRU = Task(
    key="F",
    title="Copying patterns with linear recurrent units",
    measure="accuracy of bits, last twentieth of training",
    curve="accuracy of bits",
    lower_is_better=False,
    steps={"LRU ×1": 4_000, "LRU ×4": 4_000, "GRU": 4_000},
    unit="batches",
    source="Zucchet et al., online learning of long-range dependencies; curves without numbers",
    published={},
    setup=(
        "7 bits, patterns of 20, pause of 7, T = 48, batch of 50, Adam 1e-3; LRUs 128 wide with "
        "64 complex states, GRU of 134. 4,000 batches (the original: 20,000 samples, 25 epochs, "
        "10,000 batches). One update per sequence."
    ),
    run=copy_with_lru,
    notes=(
        "One seed, one layer, a quarter of the batches: nobody has solved it by then, and it is still "
        "rising slowly. An earlier run of `d_rtrl`, equal to `bptt` to four digits, was taken out: "
        "the whole sequence was one chunk, within which the encoder and the normalisation, which "
        "have no trace, got exact credit. D-RTRL is exact for the recurrence of one layer, not for what "
        "comes before it."
    ),
    without={"tbptt 1": "is `immediate` with one update per sequence"},
)


# -- H: copying with a curriculum -----------------------------------------------------------------


PADDING = 16  # sequences are a multiple of this long, as each length compiles anew, for seconds


def one_level(level: int, batch: int, generator: torch.Generator):
    """Random bits of length U[max(1, level - 5), level], repeated after a cue; one length per
    batch.
    """
    low = max(1, level - 5)
    length = int(torch.randint(low, level + 1, (), generator=generator))
    bits = torch.randint(2, (length, batch), generator=generator)
    steps = math.ceil((2 * level + 1) / PADDING) * PADDING
    xs, ys, mask = (
        torch.zeros(steps, batch, 3),
        torch.zeros(steps, batch, dtype=torch.long),
        torch.zeros(steps),
    )
    xs[:length, :, :2] = F.one_hot(bits, 2).float()
    xs[length, :, 2] = 1
    ys[length + 1 : 2 * length + 1] = bits
    mask[length + 1 : 2 * length + 1] = 1
    return xs, ys, mask


def climb(setting: str, method: Method, seed: int, size: Size) -> Outcome:
    """Raise the level when bits per symbol fall below 0.15; the score is the level reached."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Readout("gru", 3, size.pick(int(setting.split("-")[1]), 16), 2)
    learner = make_learner(model, method, size.pick(1e-3, 1e-2))
    level, average, levels, clock = 1, 1.0, [], Stopwatch()
    for _ in range(size.steps(CURRICULUM.steps[setting], 150)):
        xs, ys, mask = one_level(level, 16, generator)
        average = 0.9 * average + 0.1 * learner.update(xs, ys, mask).loss / math.log(2)
        if average < 0.15:
            level, average = level + 1, 1.0
        levels.append(level)
        clock.lap()
    piece = end(learner, model, *one_level(level, 16, generator), cross_entropy)
    return Outcome(float(level), np.array(levels), len(levels), clock.seconds, piece)


CURRICULUM = Task(
    key="H",
    title="Copying with a curriculum",
    measure="level reached",
    curve="level",
    lower_is_better=False,
    steps={"GRU-32": 10_000, "GRU-128": 10_000},
    unit="batches",
    source="Menick et al. (SnAp); curves without numbers",
    published={},
    setup=(
        "binary strings of length U[max(1, L - 5), L] to be repeated, batch of 16, Adam 1e-3; L "
        "grows when the running bits per symbol fall below 0.15; 10,000 batches, one update per "
        "sequence."
    ),
    run=climb,
    notes=(
        "Sequences are padded to a multiple of 16 steps, which count for nothing. After the short "
        "training the levels of `d_rtrl` and `bptt` are the same; a longer one may part them."
    ),
    without={"tbptt 1": "is `immediate` with one update per sequence"},
)


# -- I: sequential digits -------------------------------------------------------------------------


def digit_batches(seed: int) -> tuple[Iterator, tuple[Tensor, Tensor]]:
    """scikit-learn's 8 × 8 digits read row by row: training batches for ever, and the test part."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8).transpose(0, 1) / 16
    labels = torch.tensor(labels)
    order = torch.randperm(labels.numel(), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]

    def batches() -> Iterator:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for part in train[torch.randperm(1440, generator=generator)].split(48):
                yield images[:, part], labels[part].expand(8, -1), torch.eye(8)[-1]

    return batches(), (images[:, test], labels[test])


def read_digits(setting: str, method: Method, seed: int, size: Size) -> Outcome:
    """Train on digits; the score is the accuracy on the test part."""
    torch.manual_seed(seed)
    model = Readout("gru", 8, size.pick(48, 12), 10, layers=2)
    learner = make_learner(model, method, size.pick(5e-3, 1e-2))
    batches, (images, labels) = digit_batches(seed)
    losses, clock = [], Stopwatch()
    for _ in range(size.steps(DIGITS.steps[setting], 40)):
        losses.append(learner.update(*next(batches)).loss)
        clock.lap()
    found = learner.predict(images)[-1].argmax(-1)
    piece = end(learner, model, *next(batches), cross_entropy)
    score = float((found == labels).float().mean())
    return Outcome(score, np.array(losses), len(losses), clock.seconds, piece)


DIGITS = Task(
    key="I",
    title="Digits, row by row, two layers",
    measure="test accuracy",
    curve="loss",
    lower_is_better=False,
    steps={"2 GRU layers": 360},
    unit="batches",
    source="none; `bptt` is the ceiling",
    published={},
    setup="scikit-learn's digits, 8 rows of 8, two GRU layers of 48, Adam 5e-3, batches of 48, 12 epochs, the loss at the last row.",
    run=read_digits,
    notes=(
        "Eight steps are little to remember: `immediate` already has most of the digits right. "
        "`dni` and `fptt` are `immediate` to the digit here: the predictor of `dni` begins at zero "
        "in every sequence, and `fptt` goes step by step. The cosine of `low_rank 1` is far above "
        "that of `d_rtrl` and `snap1`, its accuracy the same: here a better gradient buys nothing."
    ),
    without={"tbptt 1": "is `immediate` with one update per sequence"},
)
