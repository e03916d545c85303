"""The equations of torch's recurrent cells, and the adapters of `nn.RNNCell`, `nn.GRUCell` and
`nn.LSTMCell`.

Written in torch operations: one `linear` per weight, split into gates afterwards, so a traced cell
has one product per weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etrace_bridge.frontend.adapter import Adapter, register_adapter
from etrace_bridge.frontend.names import Path

# weight_ih, weight_hh, bias_ih, bias_hh
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def rnn_step(x: Tensor, h: Tensor, weights: Weights, nonlinearity: str) -> Tensor:
    """`h' = f(W_ih x + b_ih + W_hh h + b_hh)` with f = tanh or relu."""
    w_ih, w_hh, b_ih, b_hh = weights
    total = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    return torch.tanh(total) if nonlinearity == "tanh" else torch.relu(total)


def gru_step(x: Tensor, h: Tensor, weights: Weights) -> Tensor:
    """`h' = n + z (h - n)` with r, z = sigmoid(...) and `n = tanh(W_in x + b_in + r (W_hn h +
    b_hn))`.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    x_r, x_z, x_n = F.linear(x, w_ih, b_ih).chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, w_hh, b_hh).chunk(3, -1)
    r = torch.sigmoid(x_r + h_r)
    z = torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return n + z * (h - n)


def lstm_step(
    x: Tensor, h: Tensor, c: Tensor, weights: Weights, projection: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`c' = f c + i g`, `h' = o tanh(c')` (times `W_hr` with a projection), gates in torch's order
    i, f, g, o.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if projection is None else F.linear(h, projection)), c


class CellAdapter(Adapter):
    """`h = cell(x, h)`; the state is named `h`, and `c` for the LSTM's cell."""

    library = "torch"
    layers = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)

    def arguments(self, module: Any) -> tuple[str, ...]:
        """Return `hx`, the argument for the state."""
        return ("hx",)

    def split(self, module: Any, returned: Any) -> tuple[Any, tuple]:
        """Return the output and the state; the output of an LSTM cell is `h`."""
        return (returned[0] if isinstance(module, nn.LSTMCell) else returned), (returned,)

    def initial(self, module: Any, inputs: tuple) -> tuple:
        """Return zeros, as torch uses without `hx`."""
        zeros = inputs[0].new_zeros(*inputs[0].shape[:-1], module.hidden_size)
        return ((zeros, zeros.clone()),) if isinstance(module, nn.LSTMCell) else (zeros,)

    def state_path(self, module: Any, path: Path) -> Path:
        """Rename `hx` to `h`, or to `h` and `c`."""
        return ("c",) if path == ("hx", "1") else ("h",)

    def forward(self, module: Any, inputs: tuple, states: tuple) -> tuple[Any, tuple]:
        """Run the equations of the fused kernel."""
        (x,) = inputs
        hx = self.initial(module, inputs)[0] if states[0] is None else states[0]
        weights = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
        if isinstance(module, nn.LSTMCell):
            h, c = hx
            new = lstm_step(x, h, c, weights)
        elif isinstance(module, nn.GRUCell):
            new = gru_step(x, hx, weights)
        else:
            new = rnn_step(x, hx, weights, module.nonlinearity)
        return new, (new,)


register_adapter(CellAdapter())
