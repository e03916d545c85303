"""Where Norse stores the state of its neurons: in the argument `state`, returned as the second
result.
"""

from __future__ import annotations

from typing import Any

import norse.torch as norse
import torch
from norse.torch.module.snn import SNN, SNNCell, SNNRecurrent, SNNRecurrentCell
from torch import nn

from etrace_bridge.frontend.adapter import Adapter, register_adapter
from etrace_bridge.frontend.names import Path
from etrace_bridge.frontend.state_values import flatten_state, unflatten_state

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

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        return (_initial_state(module, inputs[0]),)

    def constants(self, module: Any) -> tuple[torch.Tensor, ...]:
        # `IAFCell` sets `requires_grad` on the reset voltage of its default arguments, which all
        # cells share.
        kinds = (norse.IAFCell, norse.IAF)
        return (
            (module.p.v_reset,)
            if isinstance(module, kinds) and not isinstance(module.p.v_reset, nn.Parameter)
            else ()
        )


class ContainerAdapter(Adapter):
    """`SequentialState` and `RecurrentSequential`, whose state is made of their layers' states."""

    library = "norse"
    layers = (norse.SequentialState, norse.RecurrentSequential)

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("state",)

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        return (_initial_state(module, inputs[0]),)

    def state_path(self, module: nn.Module, path: Path) -> Path:
        """Name a layer's state by the layer's own path: a list of states is indexed like the list
        of layers.
        """
        if path[0] != "state":
            return path
        return ("module", *path[1:]) if isinstance(module, norse.RecurrentSequential) else path[1:]


def _initial_state(module: Any, x: torch.Tensor) -> Any:
    """Return the state before the first step, every tensor in the shape and dtype that it has after
    one.
    """
    if isinstance(module, norse.SequentialState):
        states = []
        for layer, stateful in zip(module, module.stateful_layers, strict=True):
            states.append(_initial_state(layer, x) if stateful else None)
            x = layer(x, states[-1])[0] if stateful else layer(x)
        return states
    if isinstance(module, norse.RecurrentSequential):
        output, _ = module(x)
        return norse.RecurrentSequentialState(
            torch.zeros_like(output), _initial_state(module.module, x)
        )
    leaves, skeleton = flatten_state(module(x)[1])
    if hasattr(module, "state_fallback"):
        start = [tensor for _, tensor in flatten_state(module.state_fallback(x))[0]]
    else:  # LILinearCell and CobaLIFCell make their state inside `forward`: zeros, but for v
        v_leak = getattr(module.p, "v_leak", torch.zeros(()))
        start = [v_leak if path == ("v",) else torch.zeros(()) for path, _ in leaves]
    # Norse starts some tensors as scalars or in float32 and lets the first step broadcast and
    # promote them.
    settled = [
        first.detach().to(leaf.dtype).expand(leaf.shape).clone()
        for first, (_, leaf) in zip(start, leaves, strict=True)
    ]
    return unflatten_state(skeleton, settled)


register_adapter(NeuronAdapter())
register_adapter(ContainerAdapter())
