"""The slots of a plan for states that are passed as arguments, and the values that they start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import StateError
from etrace_bridge.frontend.later_steps import after_very_many, first_unlike_step
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.recorder import Call, Recorder, call_root
from etrace_bridge.frontend.returned import same_tensors
from etrace_bridge.frontend.slots import ArgumentSlot, StateLeaf
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_arguments import call_with_state
from etrace_bridge.frontend.state_values import flatten_state, state_names, unflatten_state
from etrace_bridge.frontend.time_axis import add_time_axis


def find_argument_slots(
    model: nn.Module, inputs: tuple, plan: StepPlan, paths: dict[int, str], given: tuple | None
) -> None:
    """Make a slot for every call whose state the bridge has to carry: that of the root, and calls
    inside a sequence model.
    """
    recorder = Recorder(model, plan.root)
    call_root(model, plan, given, add_time_axis(inputs, plan.layout), recorder)
    for call in recorder.calls:
        carried = call.module is model or plan.layout is not None
        if carried and call.adapter.arguments(call.module):
            with restored(model, values=False):
                plan.arguments.append(
                    _argument_slot(
                        call, paths[id(call.module)], _inner_starts(recorder.calls, call)
                    )
                )
    plan.arguments.sort(key=lambda slot: slot.module is not model)


def _inner_starts(calls: Sequence[Call], outer: Call) -> dict[int, torch.Tensor]:
    """Return the initial values of states that inner layers made themselves, by `id` of the new
    states they returned.
    """
    found = {}
    for call in calls:
        if (
            call is outer
            or not call.adapter.arguments(call.module)
            or any(value is not None for value in call.given)
        ):
            continue
        values = call.adapter.initial(call.module, call.inputs)
        new = flatten_state(call.adapter.split(call.module, call.returned)[1])[0]
        old = [] if values is None else flatten_state(values)[0]
        if [t.shape for _, t in new] == [t.shape for _, t in old]:
            found.update({id(a): b for (_, a), (_, b) in zip(new, old, strict=True)})
    return found


def _argument_slot(call: Call, path: str, inner: dict[int, torch.Tensor]) -> ArgumentSlot:
    adapter = call.adapter
    names = adapter.arguments(call.module)
    values = (
        None
        if all(value is None for value in call.given)
        else adapter.adopt(call.module, call.given)
    )
    if values is None or not _keeps_shape(values, adapter.split(call.module, call.returned)[1]):
        # no state was passed, or a placeholder that the module itself replaces in its first step
        values = adapter.initial(call.module, call.inputs)
        if values is None:
            values = zero_state(call, path, inner)
    prefix = (
        *(path.split(".") if path else ()),
        *((f"call{call.index + 1}",) if call.index else ()),
    )
    skeletons, leaves = [], []
    for name, value in zip(names, values, strict=True):
        found, skeleton = flatten_state(value)
        skeletons.append(skeleton)
        for local, (_, tensor) in zip(state_names(name, [p for p, _ in found]), found, strict=True):
            local = adapter.state_path(call.module, local)
            leaves.append(
                StateLeaf(
                    (*prefix, *local),
                    tensor.detach().clone(),
                    adapter.is_hidden(call.module, local),
                )
            )
    slot = ArgumentSlot(call.module, call.index, adapter, tuple(skeletons), leaves)
    slot.later = _later_skeletons(call, slot)
    return slot


def _later_skeletons(call: Call, slot: ArgumentSlot) -> tuple[tuple[Any, ...], ...]:
    """Return a state's skeletons after one, after two and after very many steps, and before a late
    step that seems to be unlike the others, if Python values in the state change.
    """
    module, adapter = call.module, call.adapter
    states: list[Any] = []

    def step() -> None:
        given = states[-1] if states else slot.states([leaf.initial for leaf in slot.leaves])
        returned = call_with_state(
            module,
            adapter.arguments(module),
            call.inputs,
            call.keywords,
            adapter.pack(module, given),
            module.forward,
        )
        states.append(adapter.split(module, returned)[1])

    def skeleton(number: int) -> tuple[Any, ...]:
        return tuple(flatten_state(value)[1] for value in states[number])

    try:
        step()
        step()
    except Exception:  # the trace will say why
        return ()
    one, two = skeleton(0), skeleton(1)
    if repr(one) == repr(two):
        return ()
    states.clear()
    unlike = first_unlike_step(step)
    late = [] if not unlike else [skeleton(unlike - 1)]
    return (one, two, tuple(map(after_very_many, one, two)), *late)


def _keeps_shape(before: tuple, after: tuple) -> bool:
    return [t.shape for _, t in flatten_state(before)[0]] == [
        t.shape for _, t in flatten_state(after)[0]
    ]


def zero_state(call: Call, path: str, known: dict[int, torch.Tensor]) -> tuple:
    """Make a state of zeros like the one a module returned, and check that the module starts from
    zeros.

    It does if output and new state agree with those of a call without a state. `known` has the
    initial values that are known, by `id` of the new states.
    """
    module, returned = call.module, call.returned
    names = call.adapter.arguments(module)
    leaves, skeleton = flatten_state(call.adapter.split(module, returned)[1])
    starts = [known.get(id(t)) for _, t in leaves]
    zeros = unflatten_state(
        skeleton,
        [
            torch.zeros_like(t) if s is None else s.clone()
            for (_, t), s in zip(leaves, starts, strict=True)
        ],
    )
    if not same_tensors(
        returned,
        call_with_state(module, names, call.inputs, call.keywords, zeros, module.forward),
    ):
        raise StateError(
            f"Module `{path or '(root)'}` ({type(module).__name__}) starts from a state that is "
            f"not zero when `{names[0]}` is None, and the bridge cannot see which. Pass "
            "`wrap(model, state=lambda batch_size: ...)`, or register an adapter with `initial`."
        )
    return zeros
