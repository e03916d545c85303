"""State that an earlier run left in a model's attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.attributes import MODULE_OWN
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.state_values import flatten_state


def find_left_over(plan: StepPlan) -> dict[str, torch.Tensor]:
    """Name the states that start from values which an earlier run left in the model.

    Their tensors belong to torch's graph, or their elements differ. Libraries' own layers are reset
    before a plan is made. What a model's author sets before the first run is zeros or another
    constant, as a rule; but a registered buffer is part of the model's `state_dict`, and may start
    from any values.
    """
    slots = [(slot.path, slot.module, slot.name) for slot in plan.attributes]
    slots += [] if plan.loop is None else plan.loop.start_attributes
    by_value = [place for place in slots if place[2] not in place[1]._buffers]
    return {
        **{n: t.detach() for n, t in _own_tensors(slots) if t.grad_fn is not None},
        **{n: t.detach() for n, t in _own_tensors(by_value) if _elements_differ(t)},
    }


def tensors_of_a_run(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name the tensors in attributes that belong to torch's graph, so that an earlier run made
    them.
    """
    places = [
        (path, module, name)
        for path, module in model.named_modules()
        for name in {**vars(module), **module._buffers}
        if name not in MODULE_OWN
    ]
    return {n: t.detach() for n, t in _own_tensors(places) if t.grad_fn is not None}


def _own_tensors(
    places: Sequence[tuple[str, nn.Module, str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in attributes `(path, module, name)` of modules that no library resets."""
    for path, module, name in places:
        if find_adapter(module) is None:
            value = {**vars(module), **module._buffers}.get(name)
            for inner, tensor in flatten_state(value)[0]:
                yield ".".join((*([path] if path else []), name, *inner)), tensor


def _elements_differ(tensor: torch.Tensor) -> bool:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return is_float and tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())
