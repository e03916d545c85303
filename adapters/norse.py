"""Where Norse keeps the state of its neurons: always in the argument `state`, which comes back as the second result."""

from __future__ import annotations

from typing import Any

import norse.torch as norse
import torch
from norse.torch.module.snn import SNN, SNNCell, SNNRecurrent, SNNRecurrentCell
from torch import nn

from etrace_bridge.frontend.state import Adapter, flatten_state, register_adapter, unflatten_state

_BASES = (SNNCell, SNNRecurrentCell, SNN, SNNRecurrent)


class NeuronAdapter(Adapter):
    """Norse's cells, and the layers that loop over the first axis of a sequence."""

    library = "norse"
    layers = (
        *_BASES,
        *(cls for cls in vars(norse).values() if isinstance(cls, type) and issubclass(cls, _BASES)),
        norse.LILinearCell,
        norse.CobaLIFCell,
    )

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("state",)

    def sequence(self, module: nn.Module) -> str | None:
        return "time_major" if isinstance(module, (SNN, SNNRecurrent)) else None

    def initial(self, module: nn.Module, inputs: tuple) -> tuple | None:
        return (_initial_state(module, inputs[0]),)


class ContainerAdapter(Adapter):
    """`SequentialState` and `RecurrentSequential`, whose state is made of their layers' states."""

    library = "norse"
    layers = (norse.SequentialState, norse.RecurrentSequential)

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("state",)

    def initial(self, module: nn.Module, inputs: tuple) -> tuple | None:
        return (_initial_state(module, inputs[0]),)

    def state_path(self, module: nn.Module, path: tuple[str, ...]) -> tuple[str, ...]:
        """Name a layer's state by the layer's own path: a list of states is indexed like the list of layers."""
        if path[0] != "state":
            return path
        return ("module", *path[1:]) if isinstance(module, norse.RecurrentSequential) else path[1:]


def _initial_state(module: nn.Module, x: torch.Tensor) -> Any:
    """The state before the first step, every tensor in the shape and dtype that it has after one."""
    if isinstance(module, norse.SequentialState):
        states = []
        for layer, stateful in zip(module, module.stateful_layers, strict=True):
            states.append(_initial_state(layer, x) if stateful else None)
            x = layer(x, states[-1])[0] if stateful else layer(x)
        return states
    if isinstance(module, norse.RecurrentSequential):
        output, _ = module(x)
        return norse.RecurrentSequentialState(torch.zeros_like(output), _initial_state(module.module, x))
    _, after = module(x)
    if not hasattr(
        module, "state_fallback"
    ):  # two cells make their state inside forward: all zeros but v, which is v_leak
        leaves, skeleton = flatten_state(after)
        v_leak = getattr(module.p, "v_leak", torch.zeros(()))
        start = [v_leak if path == ("v",) else torch.zeros(()) for path, _ in leaves]
    else:
        # Norse starts some tensors as scalars and in float32 and lets broadcasting fix them in the first step.
        start = [tensor for _, tensor in flatten_state(module.state_fallback(x))[0]]
        leaves, skeleton = flatten_state(after)
    settled = [
        first.detach().to(leaf.dtype).expand(leaf.shape).clone() for first, (_, leaf) in zip(start, leaves, strict=True)
    ]
    return unflatten_state(skeleton, settled)


register_adapter(NeuronAdapter())
register_adapter(ContainerAdapter())
