"""Hooks of parameters in torch's backward pass, and whether such a pass is running.

torch runs the hooks on the final gradient, so they are applied there and not traced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def apply_parameter_hooks(
    model: nn.Module, gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return gradients as torch would leave them in `.grad`, after the hooks of
    `parameter.register_hook`.

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


def is_in_backward() -> bool:
    """Return whether this thread is within torch's backward pass."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]
