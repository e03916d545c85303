"""Steps that only a longer sequence shows to be unlike the others: an `if t % 20 == 0`, a burn-in
without gradients, a state that is detached now and then.

A trace of a long sequence takes too long. So torch runs it, and its calls are counted: where all
steps are alike, every count grows evenly with the length. Uneven counts prove nothing (a loop may
write a log now and then); they only say which lengths to trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrace_bridge.frontend.examples import random_like
from etrace_bridge.frontend.later_steps import MANY_STEPS, CountedCalls
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.snapshot import restored


def lengths_with_unlike_steps(
    model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None, length: int
) -> tuple[int, ...]:
    """Return the lengths, above one whose steps are alike, that show steps which may be unlike them.

    There are two, since the steps may differ near the end of the sequence or far from it. None if
    all of many steps make the same calls, or if `forward` does not take so many.
    """
    axis = 1 if plan.layout == "batch_first" else 0

    def count(steps: int) -> Counter[Any]:
        whole = tuple(
            torch.stack([random_like(x, 100 + t) for t in range(steps)], min(axis, x.dim()))
            for x in inputs
        )
        with restored(model, values=False), torch.no_grad(), CountedCalls() as calls:
            plan.call_from(model, whole, given)
        return calls.counts

    try:
        unlike = _first_uneven(count, length)
    except Exception:  # a table of positions, say, that ends before
        return ()
    return () if unlike is None else (unlike + 1, min(2 * unlike + 2, MANY_STEPS))


def _first_uneven(count: Callable[[int], Counter[Any]], length: int) -> int | None:
    """Return the first length at which the counts have not grown by what they grow after `length`."""
    first, second = count(length), count(length + 1)

    def is_uneven(steps: int) -> bool:
        now = count(steps)
        return any(
            now[call] != first[call] + (steps - length) * (second[call] - first[call])
            for call in {*now, *first, *second}
        )

    if not is_uneven(MANY_STEPS):
        return None
    return next(steps for steps in range(length + 2, MANY_STEPS + 1) if is_uneven(steps))
