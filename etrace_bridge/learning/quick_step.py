"""Runs steps that are like an earlier one without its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etrace_bridge.frontend import InputRange, input_name
from etrace_bridge.learning.inputs import FastReader, is_array
from etrace_bridge.learning.losses import JaxLoss
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.reader import StepData
from etrace_bridge.learning.store import Store


@dataclass(frozen=True)
class QuickStep:
    """How to run steps like an earlier one.

    Attributes:
        core: the compiled step that must be active.
        tree: the structure that the learner's state must have.
        inputs: reads each input; gives None for one of another kind.
        target: the same for the target; None for steps without one.
        call: the program.
    """

    core: OnlineCore
    tree: Any
    inputs: list[FastReader]
    target: FastReader | None
    call: Callable


class QuickSteps:
    """The last kind of step with a target, and the last without.

    Args:
        store: the learner's store.
        turns: steps after which the computation catches up; see `FastReader`.
    """

    def __init__(self, store: Store, turns: int) -> None:
        self._store, self._turns = store, turns
        self._known: dict[bool, QuickStep] = {}  # by whether there is no target

    def find(self, args: tuple, target: Any) -> tuple[Callable, list[Any], Any] | None:
        """Return program, inputs and target of a step; None if it must be checked."""
        quick, store = self._known.get(target is None), self._store
        if (
            quick is None
            or quick.core is not store.active
            or quick.tree is not store.tree
            or store.is_lent
            or not quick.core.compiled.settings_hold
        ):
            return None
        if len(args) != len(quick.inputs):
            return None
        arrays = [read(a) for read, a in zip(quick.inputs, args, strict=True)]
        wanted = None if quick.target is None else quick.target(target)
        if any(a is None for a in arrays) or (wanted is None and target is not None):
            return None
        return quick.call, arrays, wanted

    def remember(self, args: tuple, data: StepData, loss: JaxLoss | None, call: Callable) -> None:
        """Let further steps of this kind skip the checks, if every argument is one array."""
        if not all(map(is_array, args if data.target is None else (*args, data.target))):
            return
        store = self._store

        def reader(
            what: str,
            n: int,
            count: int,
            given: Any,
            array: Any,
            dtype: Any,
            ranges: Sequence[InputRange],
        ) -> FastReader:
            own = [r for r in ranges if r.position == n]
            return FastReader(given, array, dtype, own, input_name(what, n, count), self._turns)

        ranges = store.compiled.ranges
        pairs = enumerate(zip(args, data.args, strict=True))
        inputs = [
            reader("input", n, len(args), *pair, store.float_dtype, ranges) for n, pair in pairs
        ]
        target = (
            None
            if loss is None
            else reader("target", 0, 1, data.target, data.wanted, None, loss.ranges)
        )
        self._known[data.target is None] = QuickStep(
            store.core, store.tree, inputs, target, call.jitted
        )
