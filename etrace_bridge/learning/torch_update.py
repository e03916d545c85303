"""The part of an update that must happen in torch: parameter hooks, and optimizers without a
translation.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend import to_real_jax, to_torch
from etrace_bridge.learning.translated_optimizers import group_indices


def has_hooks(parameters: Any) -> bool:
    """Return whether any parameter has a hook on its gradient."""
    for p in parameters:  # noqa: SIM110 - `any` of a generator is slower, and this runs at every step
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return True
    return False


def run_hooks(
    grads: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients as torch tensors, after the parameters' hooks."""
    done = {}
    for name, array in grads.items():
        parameter = parameters.get(name)
        grad = to_torch(array, parameter)
        if parameter is not None and parameter._post_accumulate_grad_hooks:
            raise NotSupportedError(
                f"The parameter `{name}` has a hook from `register_post_accumulate_grad_hook`, "
                "which runs inside torch's backward pass; there is none here. Use "
                "`register_hook`, or change `.grad` after `fill_grad`."
            )
        for hook in (
            list((parameter._backward_hooks or {}).values()) if parameter is not None else ()
        ):
            changed = hook(grad)
            grad = grad if changed is None else changed
        done[name] = grad
    return done


class TorchUpdate:
    """Runs a torch optimizer on the model's own parameters, through `.grad`.

    Args:
        optimizer: any torch optimizer whose `step` needs no closure.
        parameters: the model's parameters by torch name.
        clip_norm: most that the norm of all gradients may be.
        clip_value: most that the size of an element may be.
        accumulate: gradients averaged for one update.
        track_norm: keep the norm of the last gradients in `norm`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        clip_norm: float | None,
        clip_value: float | None,
        accumulate: int,
        track_norm: bool = False,
    ) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise NotSupportedError(
                f"`{type(optimizer).__name__}.step` evaluates the loss itself, through a closure. "
                "Online learning gives one gradient per step. Use another optimizer."
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise NotSupportedError(
                "`SparseAdam` takes sparse gradients only, and a learner's are dense. Use `Adam`."
            )
        self.optimizer, self.parameters = optimizer, parameters
        self.names = list(group_indices(optimizer, parameters))
        self.clip_norm, self.clip_value, self.accumulate = clip_norm, clip_value, accumulate
        self.waiting = 0
        self.track_norm, self.norm = track_norm, None

    def apply(
        self,
        grads: Mapping[str, torch.Tensor],
        theta: Mapping[str, Any],
        unreached: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return new weights, which the model's parameters also hold."""
        # torch too leaves alone what the step does not use, or no gradient can reach
        reached = [name for name in self.parameters if name in theta and name not in unreached]
        mine = [name for name in self.names if name in reached]
        with torch.no_grad():
            for name in mine:
                self.parameters[name].copy_(to_torch(theta[name], self.parameters[name]))
        if self.track_norm:
            self.norm = float(torch.nn.utils.get_total_norm([grads[name] for name in reached]))
        for name in reached:  # the norm is that of the optimizer's parameters and all others
            p, share = self.parameters[name], grads[name] / self.accumulate
            p.grad = share.clone() if self.waiting == 0 or p.grad is None else p.grad + share
        self.waiting += 1
        if self.waiting < self.accumulate:
            return dict(theta)
        self.waiting = 0
        clipped = [self.parameters[name] for name in reached]
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(clipped, self.clip_norm)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(clipped, self.clip_value)
        self.optimizer.step()
        return dict(theta) | {name: to_real_jax(self.parameters[name]) for name in mine}
