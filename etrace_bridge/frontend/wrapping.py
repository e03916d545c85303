"""`wrap`: a torch model as a brainstate module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import discover, messages
from etrace_bridge.frontend.borders import to_jax, to_torch
from etrace_bridge.frontend.canary import check_hooks
from etrace_bridge.frontend.core import WrapOptions
from etrace_bridge.frontend.inputs import PLAIN, missing_keywords, read_input
from etrace_bridge.frontend.module import BridgedModule
from etrace_bridge.frontend.names import check_dtypes
from etrace_bridge.frontend.outer import unwrapped
from etrace_bridge.lowering import announcing


@announcing()
def wrap(
    module: nn.Module,
    state: Any = None,
    *,
    example_input: Any = None,
    sequence: bool | None = None,
    batch_first: bool | None = None,
    seed: int = 0,
) -> BridgedModule:
    """Turn a torch module, as it is, into a brainstate module that runs one time step per call.

    The module's own `forward` code is traced, so what runs is what the user wrote; the module
    itself is never changed.

    Args:
        module: Any `torch.nn.Module`: recurrent layers, cells, spiking layers, or a model that
            contains them.
        state: The initial state, only for a module `forward(x, state)` that does not accept `None`
            as state: a callable `batch_size -> state` in torch tensors, or an example of a state.
        example_input: One time step of input `(batch, ...)`, a tuple for several inputs, or a dict
            (by argument names, or as the only argument). Needed only if states must exist before
            the first call and their shape depends on the input (convolutions, spiking layers
            without sizes).
        sequence: Whether `forward` consumes sequences; found out if None.
        batch_first: Where the batch axis of such sequences is; found out if None.
        seed: Seed of the random key for dropout and other random layers.

    Returns:
        The bridged module. Call `init_state(batch_size)` before the first step.
    """
    if not isinstance(module, nn.Module):
        raise InputError(
            f"`wrap` takes a `torch.nn.Module`, not `{type(module).__name__}`. For a stateless "
            "torch function use `eb.trace_function`."
        )
    module = unwrapped(module)
    check_hooks()
    discover.check_modules(module)
    check_dtypes(module)
    examples, form = None, PLAIN
    if example_input is not None:
        items, form = read_input(module.forward, example_input)
        examples = tuple(
            x.detach().clone() if isinstance(x, torch.Tensor) else to_torch(to_jax(x))
            for x in items
        )
        for name in missing_keywords(module.forward, form):
            raise messages.needs_keyword(type(module).__name__, name)
    return BridgedModule(module, WrapOptions(state, examples, form, sequence, batch_first, seed))
