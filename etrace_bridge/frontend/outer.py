"""What may stand around a model: wrappers that only say how it runs, and arguments that a step
cannot fill.
"""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from etrace_bridge._errors import InputError


def unwrapped(model: nn.Module) -> nn.Module:
    """Give the model inside `torch.compile`, `DataParallel` and `DistributedDataParallel`: its code
    and parameters are the same.
    """
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model


def check_arguments(model: nn.Module) -> None:
    """Raise if `forward` has a required argument that can be given by keyword only."""
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            kind = type(model).__name__
            raise InputError(
                f"`{kind}.forward` needs `{name}` as a keyword. A step gets its inputs by "
                "position: `net(x, ...)`. Put the model into a small one whose `forward(self, x, "
                f"{name})` calls `self.model(x, {name}={name})`, and wrap that."
            )
