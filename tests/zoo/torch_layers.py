"""Torch's own recurrent cells and layers, with every option that can run online."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .case import Case, returned, sequence

BATCH, INPUT, HIDDEN = 2, 3, 4


def _cell(name: str, kind: type[nn.Module], **options: Any) -> Case:
    make = partial(kind, INPUT, HIDDEN, **options)
    names = ("h", "c") if kind is nn.LSTMCell else ("h",)
    return Case(f"torch-{name}", "torch", make, (BATCH, INPUT), returned(None, *names))


def _layer(name: str, kind: type[nn.Module], **options: Any) -> Case:
    make = partial(kind, INPUT, HIDDEN, **options)
    run = sequence(batch_first=options.get("batch_first", False))
    return Case(f"torch-{name}", "torch", make, (BATCH, INPUT), run)


CASES = (
    _cell("rnn_cell", nn.RNNCell),
    _cell("rnn_cell_relu", nn.RNNCell, nonlinearity="relu"),
    _cell("gru_cell", nn.GRUCell),
    _cell("gru_cell_no_bias", nn.GRUCell, bias=False),
    _cell("lstm_cell", nn.LSTMCell),
    _layer("rnn", nn.RNN),
    _layer("rnn_relu_2_layers", nn.RNN, nonlinearity="relu", num_layers=2),
    _layer("rnn_batch_first", nn.RNN, batch_first=True),
    _layer("gru", nn.GRU),
    _layer("gru_2_layers", nn.GRU, num_layers=2),
    _layer("gru_3_layers_no_bias", nn.GRU, num_layers=3, bias=False),
    _layer("gru_batch_first", nn.GRU, batch_first=True),
    _layer("gru_dropout_eval", nn.GRU, num_layers=2, dropout=0.5),
    _layer("lstm", nn.LSTM),
    _layer("lstm_2_layers_no_bias", nn.LSTM, num_layers=2, bias=False),
    _layer("lstm_3_layers_batch_first", nn.LSTM, num_layers=3, batch_first=True),
    _layer("lstm_proj", nn.LSTM, proj_size=2),
    _layer("lstm_proj_2_layers_no_bias", nn.LSTM, proj_size=2, num_layers=2, bias=False),
)
