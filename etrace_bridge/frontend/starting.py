"""Parameters that make the initial state: a learned `h0` gets no gradient through the state, and
the user must know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from etrace_bridge.frontend.calls import LOCK
from etrace_bridge.frontend.injector import native_call
from etrace_bridge.frontend.plan import StepPlan, begun
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.time_axis import add_time_axis


def find_start_parameters(
    model: nn.Module, inputs: tuple, plan: StepPlan, state: Any
) -> tuple[str, ...]:
    """Name the parameters that reach the first step's result only through the initial state.

    The first step is run twice, as torch would and from the plan's constant initial state, and
    differentiated by torch: where the two gradients differ, the initial state made the difference.

    Args:
        model: The torch model; it is left as it was.
        inputs: One time step of each input.
        plan: How the step runs.
        state: The user's own initial state, not detached; None if there is none.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named or not plan.leaves or plan.loop is not None:
        return ()
    start = [leaf.initial.clone() for leaf in plan.leaves]
    try:
        with LOCK, restored(model), torch.enable_grad():
            with restored(model, values=False), begun(plan):
                own = _gradients(_tensors(_call(model, inputs, plan, state)) + _held(model), named)
            with restored(model, values=False), begun(plan):
                ours = _gradients(
                    _tensors(plan.run(model, inputs, start, native_call(model))) + _held(model),
                    named,
                )
    except Exception:
        # not differentiable from here (a fused op, a write in place): nothing can be said, and the
        # step itself will tell
        return ()
    return tuple(name for name, a, b in zip(named, own, ours, strict=True) if a and not b)


def _call(model: nn.Module, inputs: tuple, plan: StepPlan, state: Any) -> Any:
    args = add_time_axis(inputs, plan.layout)
    names = () if plan.root is None else plan.root.arguments(model)
    if plan.root is None or not names:
        return plan.form.call(model, args)
    states = (state,) if len(names) == 1 else tuple(state or ())
    if state is None:
        states = plan.root.initial(model, plan.form.fill(args)[0])
    if states is None:
        return plan.form.call(model, args)
    return plan.form.call(model, args, names, plan.root.pack(model, states))


def _gradients(roots: Sequence[torch.Tensor], named: dict[str, nn.Parameter]) -> list[bool]:
    """Return for each parameter whether a result depends on it."""
    terms = [root.abs().sum() for root in roots if root.requires_grad]
    if not terms:
        return [False] * len(named)
    found = torch.autograd.grad(
        torch.stack([t.double() for t in terms]).sum(), list(named.values()), allow_unused=True
    )
    return [gradient is not None for gradient in found]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        tensor
        for _, tensor in flatten_state(value)[0]
        if tensor.is_floating_point() or tensor.is_complex()
    ]


def _held(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a step left in attributes, except parameters."""
    kinds = (torch.Tensor, tuple, list, dict)
    values = [
        v
        for m in model.modules()
        for v in (*vars(m).values(), *m._buffers.values())
        if isinstance(v, kinds)
    ]
    return [
        t
        for value in values
        for t in _tensors(value)
        if not isinstance(t, nn.Parameter) and t.grad_fn is not None
    ]
