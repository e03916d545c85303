"""Where snnTorch keeps the state of its neurons."""

from __future__ import annotations

from typing import Any

import snntorch
import torch
from torch import nn

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend.adapter import Adapter, register_adapter

# The state arguments of each neuron's `forward`; with `init_hidden=True` the same names are
# buffers.
_STATES: dict[type[nn.Module], tuple[str, ...]] = {
    snntorch.Leaky: ("mem",),
    snntorch.Lapicque: ("mem",),
    snntorch.Synaptic: ("syn", "mem"),
    snntorch.Alpha: ("syn_exc", "syn_inh", "mem"),
    snntorch.RLeaky: ("spk", "mem"),
    snntorch.RSynaptic: ("spk", "syn", "mem"),
    snntorch.SLSTM: ("syn", "mem"),
    snntorch.SConv2dLSTM: ("syn", "mem"),
}


class NeuronAdapter(Adapter):
    """Neurons called as `spk, *states = neuron(x, *states)`, or as `neuron(x)` with
    `init_hidden=True`.
    """

    library = "snntorch"
    layers = tuple(_STATES)

    def check(self, module: nn.Module, path: str) -> None:
        if isinstance(module, snntorch.SLSTM) and module.input_size != module.hidden_size:
            raise NotSupportedError(
                f"`{path or 'SLSTM'}` is a snntorch.SLSTM({module.input_size}, "
                f"{module.hidden_size}). snnTorch compares the shapes of state and input and, "
                "unless input_size == hidden_size, sets the state to zero at every step, so there "
                f"is no recurrence to train. Put nn.Linear({module.input_size}, "
                f"{module.hidden_size}) in front of an SLSTM({module.hidden_size}, "
                f"{module.hidden_size})."
            )

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        if module.init_hidden:
            return ()
        return next(_STATES[cls] for cls in type(module).__mro__ if cls in _STATES)

    def reset(self, module: Any) -> None:
        # Not `reset_mem`, which makes float32 zeros whatever the module's dtype is.
        for name in next(_STATES[cls] for cls in type(module).__mro__ if cls in _STATES):
            value = getattr(module, name, None)
            if (
                isinstance(value, torch.Tensor)
                and not isinstance(value, nn.Parameter)
                and value.any()
            ):
                setattr(module, name, torch.zeros_like(value))

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        spikes = returned[0]
        # the last spikes are a state too
        if isinstance(module, (snntorch.RLeaky, snntorch.RSynaptic)):
            return spikes, tuple(returned)
        return spikes, tuple(returned[1:])

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        x = inputs[0]
        shape = x.shape
        if isinstance(module, snntorch.SConv2dLSTM):
            shape = (x.shape[0], module.out_channels, *x.shape[2:])
        return tuple(torch.zeros(shape, dtype=x.dtype) for _ in self.arguments(module))


class ParallelAdapter(Adapter):
    """Neurons that compute all time steps at once and keep nothing between calls."""

    library = "snntorch"
    layers = (snntorch.StateLeaky, snntorch.AssociativeLeaky)
    refused = "computes a whole sequence at once"

    def check(self, module: nn.Module, path: str) -> None:
        name = type(module).__name__
        raise NotSupportedError(
            f"`{path or name}` is a snntorch.{name}, which computes a whole sequence at once and "
            "keeps no state between calls, so it cannot run one step at a time. Use "
            "snntorch.Leaky with the same beta."
        )


register_adapter(NeuronAdapter())
register_adapter(ParallelAdapter())
