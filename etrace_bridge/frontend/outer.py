"""Wrappers around a model that only say how it runs."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which
    share its code and parameters.
    """
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model
