"""Whole user modules: recurrent parts among other layers, and state kept in attributes and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, attributes, carried, sequence

BATCH, INPUT, HIDDEN = 2, 3, 4


# Modules whose forward takes a sequence.


class Readout(nn.Module):
    """GRU and linear readout, the module everybody writes first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(INPUT, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x)
        return self.fc(out)


class BatchFirstReadout(nn.Module):
    """Encoder, batch-first LSTM, dropout and readout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUT, 5), nn.ReLU(), nn.Dropout(0.4))
        self.lstm = nn.LSTM(5, HIDDEN, batch_first=True)
        self.decoder = nn.Sequential(nn.Dropout(0.4), nn.Linear(HIDDEN, 2), nn.LogSoftmax(dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.encoder(x))[0])


class LanguageModel(nn.Module):
    """Embedding, LSTM and a decoder tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)
        self.decoder = nn.Linear(HIDDEN, 6)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(tokens))[0])


class ResidualStack(nn.Module):
    """Pre-norm residual blocks around two GRUs of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUT, HIDDEN)
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.rnns = nn.ModuleList([nn.GRU(HIDDEN, HIDDEN), nn.GRU(HIDDEN, HIDDEN, bias=False)])
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 6), nn.GELU(), nn.Linear(6, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for norm, rnn in zip(self.norms, self.rnns, strict=True):
            x = x + rnn(norm(x))[0]
        return x + self.mlp(x)


class EncoderDecoder(nn.Module):
    """Two different recurrent layers in nested submodules, joined by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"gru": nn.GRU(INPUT, HIDDEN, num_layers=2)})
        self.decoder = nn.ModuleDict({"rnn": nn.RNN(HIDDEN, 3), "out": nn.Linear(3, 2)})
        self.gate = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder["gru"](x)[0]
        out = self.decoder["rnn"](F.silu(code) * torch.sigmoid(self.gate))[0]
        return self.decoder["out"](F.leaky_relu(out))


# Modules that step, with recurrent cells inside.


class ConvCell(nn.Module):
    """A convolutional encoder with GroupNorm and pooling in front of a GRU cell."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.cell, self.fc = nn.GRUCell(16, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(torch.flatten(self.conv(x), 1), h)
        return self.fc(h), h


class Conv1dCell(nn.Module):
    """A 1-d convolution over features, an LSTM cell and a residual readout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1, dilation=1)
        self.cell, self.fc = nn.LSTMCell(2 * INPUT, HIDDEN), nn.Linear(HIDDEN, INPUT)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        z = F.hardtanh(self.conv(x.unsqueeze(1))).reshape(x.shape[0], -1)
        state = self.cell(z, state)
        return x + self.fc(state[0]), state


class EmbeddingCell(nn.Module):
    """Token and position-free type embeddings summed into an RNN cell."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.kind = nn.Embedding(5, INPUT), nn.Embedding(2, INPUT)
        self.cell = nn.RNNCell(INPUT, HIDDEN)

    def forward(self, token: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(self.token(token) + self.kind(token % 2), h)
        return h.cos(), h


class BatchNormCell(nn.Module):
    """BatchNorm before a GRU cell; running statistics are carried in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(INPUT)
        self.cell = nn.GRUCell(INPUT, HIDDEN)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(self.norm(x), h)
        return h * 2.0 - 1.0, h


# State in attributes and buffers.


class LazyAttribute(nn.Module):
    """State in an attribute that is None until the first call, then rebound."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.h is None:
            self.h = torch.zeros(x.shape[0], HIDDEN, dtype=x.dtype)
        self.h = torch.tanh(self.inp(x) + self.rec(self.h))
        return self.h


class ReboundBuffer(nn.Module):
    """State in a `(1, H)` buffer that broadcasts to the batch and is rebound."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUT, HIDDEN)
        self.decay = nn.Parameter(torch.rand(HIDDEN))
        self.register_buffer("v", torch.zeros(1, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.decay * self.v + self.fc(x)
        return F.softsign(self.v)


class InPlaceBuffer(nn.Module):
    """State in a buffer of the batch's shape, updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUT, HIDDEN)
        self.register_buffer("v", torch.zeros(BATCH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        self.v.mul_(0.8).add_(self.fc(x))
        return torch.tanh(self.v)


class CopiedBuffer(nn.Module):
    """State written back with `copy_`, one buffer through a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUT + HIDDEN, HIDDEN)
        self.register_buffer("h", torch.zeros(BATCH, HIDDEN))
        self.register_buffer("trace", torch.zeros(BATCH, 2, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(torch.cat([x, self.h.clone()], 1)))
        old = self.trace.clone()
        self.h.copy_(h)
        self.trace[:, 0] = 0.5 * old[:, 0] + h
        self.trace[:, 1] = old[:, 0]
        return self.trace.sum(1)


class StateInContainers(nn.Module):
    """States in a list and in a dict attribute, rebound item by item."""

    def __init__(self) -> None:
        super().__init__()
        self.fcs = nn.ModuleList([nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.hs = [torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)]
        self.extra = {"mean": torch.zeros(BATCH, HIDDEN)}

    def forward(self, x: Tensor) -> Tensor:
        for i, fc in enumerate(self.fcs):
            self.hs[i] = torch.tanh(fc(x) + 0.5 * self.hs[i].to(x.dtype))
            x = self.hs[i]
        self.extra["mean"] = 0.9 * self.extra["mean"] + 0.1 * x
        return x - self.extra["mean"]


class Leak(nn.Module):
    """A small stateful layer for `nn.Sequential`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.rand(size))
        self.v: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        a = torch.exp(-self.log_tau.exp())
        self.v = a * self.v + (1 - a) * x
        return self.v


def _leaky_sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUT, HIDDEN), Leak(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), Leak(HIDDEN)
    )


class OutputFeedback(nn.Module):
    """The last output fed back as input, next to a GRU cell whose state is an attribute too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.GRUCell(INPUT + 2, HIDDEN), nn.Linear(HIDDEN, 2)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = (x.new_zeros(x.shape[0], HIDDEN), x.new_zeros(x.shape[0], 2))
        h, y = self.state
        h = self.cell(torch.cat([x, y], dim=-1), h)
        y = self.fc(h).sin()
        self.state = (h, y)
        return y


class Attends(nn.Module):
    """A GRU cell whose state, read as two tokens, attends to itself between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.cell = nn.GRUCell(INPUT, 2 * HIDDEN)
        self.h: Tensor | None = None

    def mixed(self, tokens: Tensor) -> Tensor:
        return tokens + self.attention(tokens, tokens, tokens)[0]

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 2 * HIDDEN) if self.h is None else self.h
        self.h = self.cell(x, self.mixed(h.view(-1, 2, HIDDEN)).reshape(-1, 2 * HIDDEN))
        return self.h


class Encodes(Attends):
    """The same with a whole transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(
            HIDDEN, 2, dim_feedforward=5, dropout=0.0, batch_first=True
        )

    def mixed(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens)


def _net(make: Callable[[], nn.Module], rnn: str, **options: Any) -> Case:
    batch_first = options.pop("batch_first", False)
    run = sequence(rnn, batch_first=batch_first)
    shape = options.pop("shape", (BATCH, INPUT))
    return Case(f"torch-net-{make.__name__}", "torch", make, shape, run, **options)


def _held(make: Callable[[], nn.Module], *paths: str, **options: Any) -> Case:
    return Case(
        f"torch-held-{make.__name__}", "torch", make, (BATCH, INPUT), attributes(*paths), **options
    )


CASES = (
    _net(Readout, "gru"),
    _net(BatchFirstReadout, "lstm", batch_first=True),
    _net(LanguageModel, "lstm", shape=(3,), vocabulary=6),
    _net(ResidualStack, "rnns.0,rnns.1"),
    _net(EncoderDecoder, "encoder.gru,decoder.rnn"),
    Case("torch-net-ConvCell", "torch", ConvCell, (BATCH, 1, 6, 6), carried()),
    Case("torch-net-Conv1dCell", "torch", Conv1dCell, (BATCH, INPUT), carried()),
    Case("torch-net-EmbeddingCell", "torch", EmbeddingCell, (3,), carried(), vocabulary=5),
    Case("torch-net-BatchNormCell-eval", "torch", BatchNormCell, (3, INPUT), carried()),
    Case(
        "torch-net-BatchNormCell-train", "torch", BatchNormCell, (3, INPUT), carried(), train=True
    ),
    _held(LazyAttribute, "h"),
    _held(ReboundBuffer, "v"),
    _held(InPlaceBuffer, "v"),
    _held(CopiedBuffer, "h", "trace"),
    _held(StateInContainers, "hs/0", "hs/1", "extra/mean"),
    _held(_leaky_sequential, "1.v", "4.v"),
    _held(Attends, "h"),
    _held(Encodes, "h", train=True),
    _held(OutputFeedback, "state/0", "state/1"),
)
