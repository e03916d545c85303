"""Turn the model that a user passes into a brainstate module."""

from __future__ import annotations

import brainstate
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import wrap


def as_brainstate(
    model: torch.nn.Module | brainstate.nn.Module, seed: int | None, name: str
) -> brainstate.nn.Module:
    """Return a torch module wrapped, and a brainstate module as it is.

    Args:
        model: what the user gave.
        seed: seed of a torch module's random ops; None for 0.
        name: the argument's name, for error messages.
    """
    if isinstance(model, torch.nn.Module):
        return wrap(model, seed=0 if seed is None else seed)
    if not isinstance(model, brainstate.nn.Module):
        raise InputError(
            f"`{name}` is a {type(model).__name__}; it must be a torch or a brainstate module."
        )
    if seed is not None:
        raise InputError(
            f"`seed={seed!r}` would have no effect: `{name}` is a {type(model).__name__}, which has "
            "its random state already. Seed it when you make it: `wrap(model, seed=...)` for a "
            "torch model, `brainstate.random.seed(...)` for a brainstate module."
        )
    return model
