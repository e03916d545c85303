"""Where SpikingJelly keeps state: in the memories of its modules, and in the arguments of its
spiking RNNs.
"""

from __future__ import annotations

from typing import Any

import torch
from spikingjelly.activation_based import base, layer, neuron, rnn
from torch import nn

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend.adapter import Adapter, register_adapter
from etrace_bridge.frontend.names import Path

# Every subclass of MemoryModule is found through its base; these are the ones to list as supported.
_NEURONS = (
    neuron.SimpleIFNode,
    neuron.SimpleLIFNode,
    neuron.IFNode,
    neuron.HalfThresholdIFNode,
    neuron.ActivationAwareIFNode,
    neuron.LIFNode,
    neuron.ParametricLIFNode,
    neuron.QIFNode,
    neuron.EIFNode,
    neuron.IzhikevichNode,
    neuron.KLIFNode,
    neuron.ComplementaryLIFNode,
    neuron.CUBALIFNode,
    neuron.LIAFNode,
    neuron.ILIFNode,
    neuron.RAFNode,
    neuron.TernaryIFNode,
    neuron.TernaryLIFNode,
    neuron.MPBNLIFNode,
)
_LAYERS = (layer.ElementWiseRecurrentContainer, layer.LinearRecurrentContainer, layer.SynapseFilter)

# The states of spiking RNNs under the names of torch's.
_STATE_NAMES: dict[Path, Path] = {
    ("hc", "0"): ("h",),
    ("hc", "1"): ("c",),
    ("states",): ("h",),
    ("states", "0"): ("h",),
    ("states", "1"): ("c",),
}


class MemoryAdapter(Adapter):
    """Modules with registered memories, which are entries of the dict attribute `_memories`."""

    library = "spikingjelly"
    layers = (base.MemoryModule, *_NEURONS, *_LAYERS)

    def reset(self, module: Any) -> None:
        module.reset()

    def sequence(self, module: nn.Module) -> str | None:
        return "time_major" if module.step_mode == "m" else None

    def state_path(self, module: nn.Module, path: Path) -> Path:
        return path[1:] if path[0] == "_memories" else path

    def is_hidden(self, module: nn.Module, path: Path) -> bool:
        # their memory is a random mask
        return not isinstance(module, (layer.Dropout, layer.DropConnectLinear))


class CellAdapter(Adapter):
    """Spiking RNN cells, which return their new state and nothing else."""

    library = "spikingjelly"
    layers = (rnn.SpikingVanillaRNNCell, rnn.SpikingGRUCell, rnn.SpikingLSTMCell)

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("hc",) if isinstance(module, rnn.SpikingLSTMCell) else ("h",)

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        return (returned[0] if isinstance(module, rnn.SpikingLSTMCell) else returned), (returned,)

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        x = inputs[0]
        h = torch.zeros(x.shape[0], module.hidden_size, dtype=x.dtype)
        return ((h, torch.zeros_like(h)),) if isinstance(module, rnn.SpikingLSTMCell) else (h,)

    def state_path(self, module: nn.Module, path: Path) -> Path:
        return _STATE_NAMES.get(path, path)


class LayerAdapter(Adapter):
    """Spiking RNN layers over `(T, B, I)`; each state stacks all layers, `(num_layers, B, H)`."""

    library = "spikingjelly"
    layers = (rnn.SpikingRNNBase, rnn.SpikingVanillaRNN, rnn.SpikingGRU, rnn.SpikingLSTM)
    limit = "not bidirectional"

    def check(self, module: nn.Module, path: str) -> None:
        if module.bidirectional:
            name = type(module).__name__
            raise NotSupportedError(
                f"`{path or name}` is a bidirectional {name}: its backward direction starts at the "
                "end of the sequence, which an online learner has not seen. Use "
                "bidirectional=False."
            )

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("states",)

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        x = inputs[0]
        h = torch.zeros(module.num_layers, x.shape[1], module.hidden_size, dtype=x.dtype)
        return (
            (h,)
            if module.states_num() == 1
            else (tuple(h.clone() for _ in range(module.states_num())),)
        )

    def sequence(self, module: nn.Module) -> str | None:
        return "time_major"

    def state_path(self, module: nn.Module, path: Path) -> Path:
        return _STATE_NAMES.get(path, path)


register_adapter(MemoryAdapter())
register_adapter(CellAdapter())
register_adapter(LayerAdapter())
