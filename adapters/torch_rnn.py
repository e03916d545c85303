"""The adapter of `nn.RNN`, `nn.GRU` and `nn.LSTM`: one step of the fused kernel, one hidden state
per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from etrace_bridge.adapters.torch_cells import gru_step, lstm_step, rnn_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from etrace_bridge.frontend import messages
from etrace_bridge.frontend.adapter import Adapter, register_adapter

States = dict[str, Tensor]  # h_l0, h_l1, ... and for an LSTM c_l0, c_l1, ...


class RecurrentAdapter(Adapter):
    """State of layer k is `h_lk` (and `c_lk`); torch's stacked `h_n` is assembled only where it is
    read.
    """

    library = "torch"
    layers = (nn.RNN, nn.GRU, nn.LSTM)
    limit = "not bidirectional"

    def check(self, module: Any, path: str) -> None:
        """Raise for a bidirectional layer, which needs the future."""
        if module.bidirectional:
            raise messages.not_online(
                f"nn.{type(module).__name__}",
                path,
                "it is bidirectional, so the output at one step depends on inputs that have not "
                "arrived yet.",
                "Use `bidirectional=False`, or train it offline with torch.",
            )

    def sequence(self, module: Any) -> str:
        """Return the layout of the sequences that `forward` consumes."""
        return "batch_first" if module.batch_first else "time_major"

    def arguments(self, module: Any) -> tuple[str, ...]:
        """Return `hx`, the argument for the state."""
        return ("hx",)

    def split(self, module: Any, returned: Any) -> tuple[Any, tuple]:
        """Split `(output, h_n)` or `(output, (h_n, c_n))`."""
        return returned[0], self.adopt(module, (returned[1],))

    def initial(self, module: Any, inputs: tuple) -> tuple[States]:
        """Return zeros, as torch uses without `hx`."""
        x = inputs[0]
        if isinstance(x, PackedSequence):
            raise _packed()
        batch = () if x.dim() == 2 else (x.shape[0] if module.batch_first else x.shape[1],)
        states: States = {}
        for layer in range(module.num_layers):
            states[f"h_l{layer}"] = x.new_zeros(*batch, module.proj_size or module.hidden_size)
            if isinstance(module, nn.LSTM):
                states[f"c_l{layer}"] = x.new_zeros(*batch, module.hidden_size)
        return (states,)

    def adopt(self, module: Any, given: tuple) -> tuple[States]:
        """Take torch's stacked `(layers, batch, hidden)` apart."""
        (hx,) = given
        h, c = hx if isinstance(module, nn.LSTM) else (hx, None)
        states: States = {}
        for layer in range(module.num_layers):
            states[f"h_l{layer}"] = h[layer]
            if c is not None:
                states[f"c_l{layer}"] = c[layer]
        return (states,)

    def pack(self, module: Any, states: tuple) -> tuple:
        """Stack the layers' states as torch takes them."""
        return (_stacked(module, states[0]),) if isinstance(states[0], dict) else states

    def forward(self, module: Any, inputs: tuple, states: tuple) -> tuple[Any, tuple]:
        """Run every layer over the sequence, which has length one in a bridged step."""
        x = inputs[0]
        if isinstance(x, PackedSequence):
            raise _packed()
        if states[0] is None:
            current = dict(self.initial(module, inputs)[0])
        else:
            current = dict(
                states[0] if isinstance(states[0], dict) else self.adopt(module, states)[0]
            )
        axis = 1 if module.batch_first and x.dim() == 3 else 0
        sequence = list(x.unbind(axis)) if x.shape[axis] != 1 else [x.squeeze(axis)]
        for layer in range(module.num_layers):
            sequence = [_step(module, layer, x_t, current) for x_t in sequence]
            if module.dropout and layer < module.num_layers - 1:
                sequence = [F.dropout(x_t, module.dropout, module.training) for x_t in sequence]
        output = torch.stack(sequence, axis) if len(sequence) > 1 else sequence[0].unsqueeze(axis)
        return (output, _stacked(module, current)), (current,)


def _step(module: Any, layer: int, x: Tensor, states: States) -> Tensor:
    """Run one layer for one step, and put its new state into `states`."""
    weights = tuple(
        getattr(module, f"{name}_l{layer}", None)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = states[f"h_l{layer}"]
    if isinstance(module, nn.LSTM):
        projection = getattr(module, f"weight_hr_l{layer}", None)
        h, states[f"c_l{layer}"] = lstm_step(x, h, states[f"c_l{layer}"], weights, projection)
    elif isinstance(module, nn.GRU):
        h = gru_step(x, h, weights)
    else:
        h = rnn_step(x, h, weights, module.nonlinearity)
    states[f"h_l{layer}"] = h
    return h


def _stacked(module: Any, states: States) -> Any:
    """Assemble torch's `h_n`, or `(h_n, c_n)`."""
    h = torch.stack([states[f"h_l{layer}"] for layer in range(module.num_layers)])
    if not isinstance(module, nn.LSTM):
        return h
    return h, torch.stack([states[f"c_l{layer}"] for layer in range(module.num_layers)])


def _packed() -> Exception:
    return messages.not_online(
        "PackedSequence",
        "",
        "a packed sequence interleaves the time steps of many sequences, and a step has none to "
        "unpack.",
        "Feed one padded time step at a time and pass a `mask` to the learner, or sort sequences "
        "into batches of equal length.",
    )


register_adapter(RecurrentAdapter())
