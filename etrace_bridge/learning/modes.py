"""Training and evaluation mode of a model's modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import brainstate
import torch

from etrace_bridge.frontend import BridgedModule

Modes = dict[torch.nn.Module, bool]


@contextlib.contextmanager
def evaluation_mode(net: brainstate.nn.Module) -> Iterator[None]:
    """Trace models as for evaluation in this context: without dropout, with running statistics."""
    modes = dict.fromkeys(modes_of(net), False)
    with in_modes(net, modes), brainstate.environ.context(fit=False):
        yield


def modes_of(net: brainstate.nn.Module) -> Modes:
    """Return, for each module of a torch model, whether it is in training mode."""
    modules = net.model.modules() if isinstance(net, BridgedModule) else ()
    return {m: m.training for m in modules}


@contextlib.contextmanager
def in_modes(net: brainstate.nn.Module, modes: Modes) -> Iterator[None]:
    """Give a model's modules these modes in this context."""
    before = modes_of(net)
    try:
        for m, training in modes.items():
            m.training = training
        yield
    finally:
        for m, training in before.items():
            m.training = training
