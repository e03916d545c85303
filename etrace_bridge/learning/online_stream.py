"""Where an `OnlineModule` is in its stream of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.learning.inputs import show_signature
from etrace_bridge.learning.online_call import Call
from etrace_bridge.learning.online_core import OnlineCarry
from etrace_bridge.learning.torch_step import TorchStep


@dataclass
class Stream:
    """States, and the trace or the call that it follows from.

    Attributes:
        text: the step's equations; another step with the same ones may go on with the trace.
        inputs: shapes and dtypes of one time step.
        carry: states after the last call; its trace is None while `last` is to give it.
        last: the last call, whose trace nothing has needed yet.
    """

    text: str
    inputs: tuple
    carry: OnlineCarry
    last: Call | None = None

    def settle(self) -> OnlineCarry:
        """States and trace."""
        if self.last is not None:
            hidden, other, _ = self.carry
            self.carry = OnlineCarry(hidden, other, self.last.trace_after())
            self.last = None
        return self.carry

    def before(self, compiled: TorchStep, learns: bool) -> OnlineCarry:
        """States and trace before the next call."""
        if self.inputs != compiled.inputs:
            raise InputError(
                f"The states are those of inputs {show_signature(self.inputs)}; this input is "
                f"{show_signature(compiled.inputs)}. They cannot go on with another batch. Call "
                "`reset()` first to start with new states, or use the same batch size."
            )
        carry = self.settle() if learns else self.carry
        return (
            carry if self.text == compiled.text else _for_other_step(carry, compiled.start, learns)
        )


def _for_other_step(carry: OnlineCarry, start: OnlineCarry, learns: bool) -> OnlineCarry:
    """The states of one step for another, as after `eval()`; its trace is zero."""
    if learns and carry.trace is not None:
        raise StateError(
            "The model's step has changed within a stream (`train()`, `eval()`, `requires_grad_` "
            "or a new layer), and its traces belong to the step before. Call `reset()` first, or "
            "run the other mode under `torch.no_grad()`."
        )
    if _shapes(carry) != _shapes(start):
        raise StateError(
            "The model has other hidden states than before. Call `reset()` first to start with "
            "new ones."
        )
    return OnlineCarry(
        carry.hidden, start.other | {n: x for n, x in carry.other.items() if n in start.other}, None
    )


def _shapes(carry: OnlineCarry) -> dict[str, Any]:
    return {name: h.shape for name, h in carry.hidden.items()}
