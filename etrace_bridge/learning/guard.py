"""The guard: values that are not finite never replace good ones.

The verdict is part of the compiled program, so the host need not wait for it. Once something was
NaN or infinite, all later updates are held back too, and the host finds out when it next reads the
alarm. Where a product of finite numbers overflows in the update itself, only that element keeps its
old value.

The alarm is a vector of integers: the number of good updates (and steps without a target); whether
one was not good; and for every watched array (loss, gradients, hidden states) whether it was not
finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge.lowering import Tuning

COUNT, STOPPED, FIRST = 0, 1, 2


def watched_names(weights: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Return what the guard watches, in the alarm's order."""
    return [
        "the loss",
        *(f"the gradient of `{n}`" for n in weights),
        *(f"the hidden state `{n}`" for n in hidden),
    ]


def new_alarm(count: int, num_watched: int) -> np.ndarray:
    """Return an alarm that has seen nothing."""
    return np.array([count] + [0] * (1 + num_watched), np.int32)


def is_bad(tree: Any) -> Any:
    """Return whether any of some arrays has NaN or infinity; random keys and integers never do."""
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return (
        jnp.any(jnp.stack([jnp.any(~jnp.isfinite(x)) for x in numbers]))
        if numbers
        else jnp.asarray(False)
    )


def choose(fine: Any, new: Any, old: Any) -> Any:
    """Return `new` if it is fine, else `old`."""
    return jax.tree.map(lambda n, o: jnp.where(fine, n, o), new, old)


def hold_back(fine: Any, new: Any, old: Any) -> Any:
    """Return `new` if it is fine, else `old`; an element that has overflowed stays `old` in any
    case.
    """

    def one(new: Any, old: Any) -> Any:
        finite = jnp.isfinite(new) if jnp.issubdtype(new.dtype, jnp.inexact) else True
        return jnp.where(fine & finite, new, old)

    return jax.tree.map(one, new, old)


def full_verdict(alarm: Any, watched: Sequence[Any]) -> tuple[Any, Any]:
    """Return whether everything watched is finite, and the new alarm."""
    bad = jnp.stack([is_bad(x) for x in watched])
    stopped = alarm[STOPPED] > 0
    fine = ~jnp.any(bad) & ~stopped
    good, is_stopped, bad = (x.astype(alarm.dtype) for x in (fine, ~fine, bad))
    head = jnp.stack([alarm[COUNT] + good, is_stopped])
    return fine, jnp.concatenate([head, jnp.where(stopped, alarm[FIRST:], bad)])


def quick_verdict(alarm: Any, watched: Any, tuning: Tuning) -> tuple[Any, Any]:
    """Return whether all arrays of a single step are finite, in few operations.

    It does not tell which one is not.
    """
    fine = ~tuning.any_not_finite(jax.tree.leaves(watched)) & (alarm[STOPPED] == 0)
    index, good = lax.iota(alarm.dtype, alarm.size), fine.astype(alarm.dtype)
    stopped = jnp.where(index == STOPPED, 1 - good, alarm)
    return fine, jnp.where(index == COUNT, alarm + good, stopped)


def to_watch(
    grads: Sequence[Any] | None, memory: Any, factors: Any, is_product: Sequence[bool]
) -> Any:
    """Return what the guard watches of a step: its gradients, or the factors of which some are sums
    of products.

    A gradient that is only used in the update of its weight is never written to memory; if it is
    watched, it is written and read once more. That is still less work than reading the rule's
    memory where the memory is much larger than the gradients, as for a large batch.

    Args:
        grads: gradients; None without a loss.
        memory: the rule's memory before the step.
        factors: a rule's factors (`ChunkResult.factors`).
        is_product: for each gradient, whether it is a sum of products of factors and memory.
    """
    if factors is None or grads is None:
        return grads, factors
    products = [g for g, p in zip(grads, is_product, strict=True) if p]
    if _elements((memory, factors)) > 2 * _elements(products):
        return grads
    return [g for g, p in zip(grads, is_product, strict=True) if not p], memory, factors


def _elements(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def describe_alarm(bad: Sequence[str], most: int = 4) -> str:
    """Name the watched arrays that were not finite, for people."""
    shown = ", ".join(bad[:most]) + (f" and {len(bad) - most} more" if len(bad) > most else "")
    return shown or "the trace"


def alarm_text(step: int, bad: Sequence[str], last: int | None = None) -> str:
    """Return the error's message.

    `last`: the step is only known to lie between `step` and this one.
    """
    where = f"At step {step}" if last in (None, step) else f"Somewhere in steps {step} to {last}"
    return (
        f"{where}, NaN or infinity appeared in: {describe_alarm(bad)}. The update there and "
        "any after it were not made: weights, states and trace are the last finite ones, so the "
        "learner can be saved or go on. Lower the learning rate, clip gradients "
        "(`clip_norm=1.0`), or look for bad values in the data (`check_inputs=True`)."
    )
