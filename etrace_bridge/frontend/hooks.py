"""Hooks that a model has on its parameters: torch runs them on the final gradient, so they are
applied there and not traced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def apply_parameter_hooks(
    model: nn.Module, gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Give gradients as torch would leave them in `.grad`: after the hooks that
    `parameter.register_hook` added.

    Args:
        model: The torch model.
        gradients: `{torch name: gradient}`; names that are not parameters are passed through.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    result = {}
    for name, gradient in gradients.items():
        for hook in (getattr(parameters.get(name), "_backward_hooks", None) or {}).values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        result[name] = gradient
    return result
