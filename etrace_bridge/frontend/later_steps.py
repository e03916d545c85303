"""What a model does in late steps: whether they compute like the second, and Python values that a
step changes, such as counters.

Steps that compute alike make the same calls of torch, so late steps are run and their calls counted,
which is cheaper than to trace them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from etrace_bridge.frontend.state_values import children, rebuild

MANY_STEPS = 97  # no multiple of a period that somebody would choose


class CountedCalls(TorchFunctionMode):
    """Counts torch's calls, and how often each parameter is read by one."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self._calls.append(func)
        self._calls += [id(x) for x in args if type(x) is nn.Parameter]
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counter[Any]:
        """The number of calls by function, and of readings by a parameter's id."""
        return Counter(self._calls)


def first_unlike_step(step: Callable[[], Any]) -> int | None:
    """Run many steps; return how many come before the first one that fails or makes other torch
    calls than the second.
    """
    second: Counter[Any] = Counter()
    for number in range(MANY_STEPS):
        try:
            with torch.no_grad(), CountedCalls() as calls:
                step()
        except Exception:  # a counter that ran out of a list: the trace will say so
            return number
        if number == 1:
            second = calls.counts
        elif number and calls.counts != second:
            return number
    return None


def first_uneven_length(count: Callable[[int], Counter[Any]], length: int) -> int | None:
    """Return the first length of a sequence at which the counts of calls have not grown by what
    they grow after `length`, as they do where all steps are alike; None if there is none, or if
    `forward` does not take such lengths.

    Uneven counts prove nothing (a loop may write a log now and then); they say where to look.
    """

    def is_uneven(steps: int) -> bool:
        now = count(steps)
        return any(
            now[call] != first[call] + (steps - length) * (second[call] - first[call])
            for call in {*now, *first, *second}
        )

    try:
        first, second = count(length), count(length + 1)
        if not is_uneven(MANY_STEPS):
            return None
        return next(steps for steps in range(length + 2, MANY_STEPS + 1) if is_uneven(steps))
    except Exception:  # a table of positions, say, that ends before
        return None


def after_very_many(now: Any, later: Any) -> Any:
    """Return what counters would be after very many steps, from two values in a row: some models
    behave differently only then.
    """
    if (
        isinstance(now, (int, float))
        and isinstance(later, (int, float))
        and not isinstance(later, bool)
    ):
        return later + 1_000_000 * (later - now)
    items, others = children(now), children(later)
    if items is None or others is None or [key for key, _ in items] != [key for key, _ in others]:
        return later
    return rebuild(
        later, [after_very_many(a, b) for (_, a), (_, b) in zip(items, others, strict=True)]
    )
