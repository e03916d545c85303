"""Call a model on plain tensors from its initial state, and record the calls of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from etrace_bridge.frontend.adapter import Adapter, find_adapter
from etrace_bridge.frontend.calls import intercepted_calls, plain_call
from etrace_bridge.frontend.inputs import InputForm
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.returned import copied_state
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_arguments import bind_state_arguments, fill_missing


@dataclass
class Call:
    """One recorded call of a module that has an adapter."""

    module: nn.Module
    adapter: Adapter
    index: int
    inputs: tuple
    keywords: dict
    given: tuple
    returned: Any


class Recorder:
    """Handles module calls on plain tensors and records those of modules with an adapter."""

    def __init__(self, root: nn.Module | None = None, root_adapter: Adapter | None = None) -> None:
        self.calls: list[Call] = []
        self._root, self._root_adapter = root, root_adapter
        self._counts: dict[int, int] = {}

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        adapter = self._root_adapter if module is self._root else find_adapter(module)
        if adapter is None:
            return plain_call(module, *args, **kwargs)
        rest, kept, given = bind_state_arguments(
            module.forward, adapter.arguments(module), args, kwargs
        )
        index = self._counts.get(id(module), 0)
        self._counts[id(module)] = index + 1
        # the call may write to its arguments
        call = Call(
            module,
            adapter,
            index,
            copied_state(rest),
            copied_state(kept),
            copied_state(given),
            None,
        )
        self.calls.append(call)
        call.returned = plain_call(module, *args, **kwargs)
        return call.returned


def call_root(
    model: nn.Module, plan: StepPlan, given: tuple | None, args: tuple, recorder: Recorder
) -> Any:
    """Call the model on plain tensors with its initial state, if it takes one and the state is
    known.
    """
    root = plan.root
    names = () if root is None else root.arguments(model)
    states = given
    if root is not None and names and given is None:
        with restored(model, values=False):
            states = root.initial(model, plan.form.fill(args)[0])
    with restored(model, values=False), intercepted_calls(recorder):
        return plan.call_from(model, args, None if states is None else copied_state(states))


def call_without_state(model: nn.Module, inputs: tuple, form: InputForm, start: Any = None) -> Any:
    """Call the model on its inputs alone; required state arguments get a start, or None."""
    args, kwargs = fill_missing(model.forward, *form.fill(inputs), start)
    return model(*args, **kwargs)
