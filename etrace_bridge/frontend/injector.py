"""The calls of modules in a step: each gets its state arguments, and gives the new values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from etrace_bridge.frontend import messages
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.calls import intercepted_calls, plain_call
from etrace_bridge.frontend.slots import ArgumentSlot
from etrace_bridge.frontend.state_arguments import bind_state_arguments, call_with_state
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.tensor import INPUT, STATE

if TYPE_CHECKING:
    from etrace_bridge.frontend.plan import StepPlan


def native_call(model: nn.Module) -> Callable:
    """Run a model on plain tensors: the `call` of `StepPlan.run`."""

    def call(injector: Injector, args: tuple, kwargs: dict) -> Any:
        injector.native = True
        with intercepted_calls(lambda module, args, kwargs: injector(module, *args, **kwargs)):
            return model(*args, **kwargs)

    return call


class Injector:
    """Handles module calls: gives modules their state arguments and catches the new values."""

    def __init__(self, plan: StepPlan, model: nn.Module, states: Sequence[Any]) -> None:
        # Plain tensors: torch's own kernels run, not the adapters' equations for them
        self.native = False
        self._root, self._root_adapter = model, plan.root
        self._slots: dict[tuple[int, int], ArgumentSlot] = {
            (id(s.module), s.call): s for s in plan.arguments
        }
        self._values: dict[tuple[int, int], list[Any]] = {}
        self._later = plan.later
        self._calls: dict[int, int] = {}
        position = 0
        for key, slot in self._slots.items():
            self._values[key] = list(states[position : position + len(slot.leaves)])
            position += len(slot.leaves)

    def new_states(self) -> list[Any]:
        """Return the state tensors after the step; a module that was not called keeps its state."""
        return [value for values in self._values.values() for value in values]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        adapter = self._root_adapter if module is self._root else find_adapter(module)
        names = () if adapter is None else adapter.arguments(module)
        if adapter is None or (not names and adapter.forward is None):
            return plain_call(module, *args, **kwargs)
        key = (id(module), self._calls.get(id(module), 0))
        self._calls[id(module)] = key[1] + 1
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            rest, kept, given = bind_state_arguments(original, names, args, kwargs)
            slot = self._slots.get(key)
            if slot is not None and _origin(given) & STATE:
                slot = None  # the model passes its own recurrent state: that one counts
            elif slot is not None and _origin(given) & INPUT:
                raise messages.computed_initial_state(
                    ".".join(slot.leaves[0].path[:-1]), ", ".join(names)
                )
            states = given if slot is None else slot.states(self._values[key], self._later)
            if adapter.forward is not None and not self.native:
                returned, new = adapter.forward(module, rest, states, **kept)
            else:
                states = states if slot is None else adapter.pack(module, states)
                returned = call_with_state(original, names, rest, kept, states)
                new = adapter.split(module, returned)[1] if slot is not None else ()
            if slot is not None:
                self._values[key] = [
                    tensor for value in new for _, tensor in flatten_state(value)[0]
                ]
            return returned

        module.__dict__["forward"] = forward  # so that torch's hooks run as for any call
        try:
            return plain_call(module, *args, **kwargs)
        finally:
            del module.__dict__["forward"]


def _origin(given: tuple) -> int:
    """What state values that a model passes depend on; 0 also for plain tensors, whose origin is
    not followed.
    """
    found = 0
    for _, tensor in flatten_state(given)[0]:
        found |= getattr(tensor, "origin", 0)
    return found
