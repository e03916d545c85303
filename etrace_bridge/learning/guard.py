"""The guard: values that are not finite never replace good ones.

The verdict is part of the compiled program, so the host need not wait for it: once something was NaN or infinite, all later
updates are held back too, and the host hears of it at its next look.

The alarm is a vector of whole numbers: how many updates (and steps without a target) were good; whether one was not; and for every
watched array (loss, gradients, hidden states) whether it was that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COUNT, STOPPED, FIRST = 0, 1, 2


def watched_names(weights: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """What the guard watches, in the alarm's order."""
    return ["the loss", *(f"the gradient of `{n}`" for n in weights), *(f"the hidden state `{n}`" for n in hidden)]


def new_alarm(count: int, num_watched: int) -> np.ndarray:
    """An alarm that is silent."""
    return np.array([count] + [0] * (1 + num_watched), np.int32)


def is_bad(tree: Any) -> Any:
    """Whether an array, or any of several, has NaN or infinity."""
    return jnp.any(jnp.stack([jnp.any(~jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def hold_back(fine: Any, new: Any, old: Any) -> Any:
    """`new` if it is fine, else `old`."""
    return jax.tree.map(lambda n, o: jnp.where(fine, n, o), new, old)


def full_verdict(alarm: Any, watched: Sequence[Any]) -> tuple[Any, Any]:
    """Whether everything watched is finite, and the new alarm."""
    bad = jnp.stack([is_bad(x) for x in watched])
    stopped = alarm[STOPPED] > 0
    fine = ~jnp.any(bad) & ~stopped
    flags = jnp.where(stopped, alarm[FIRST:], bad)
    return fine, jnp.concatenate([jnp.stack([alarm[COUNT] + fine, ~fine]), flags]).astype(jnp.int32)


def quick_verdict(alarm: Any, loss: Any, hidden: Sequence[Any], grads: Sequence[Any] | None) -> tuple[Any, Any]:
    """A verdict in few operations, for a single step: whether loss, hidden states and gradients are finite, not which is not.

    Each is multiplied by vectors of zeros, where 0 · inf and 0 · NaN are NaN: a product is several times faster than a sum over the same
    numbers.
    """
    watched = [*hidden, *([loss] if loss is not None else []), *(grads or ())]
    total = sum(_zero_if_finite(x).astype(jnp.float32) for x in watched)
    fine = (total == 0) & (alarm[STOPPED] == 0)
    return fine, jnp.concatenate([jnp.stack([alarm[COUNT] + fine, (~fine).astype(alarm.dtype)]), alarm[FIRST:]])


def _zero_if_finite(x: Any) -> Any:
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    zeros = [jnp.zeros(n, x.dtype) for n in rows.shape]
    return zeros[0] @ (rows @ zeros[1])


def after(fine: Any, theta: Sequence[Any]) -> Any:
    """`fine`, known only after the new weights: what depends on it may then overwrite what the weights were computed from.

    Without this order XLA first copies the whole trace, which the step reads for the weights and replaces.
    """
    return fine & ~jnp.isnan(jnp.sum(jnp.stack([w.reshape(-1)[0].astype(jnp.float32) for w in theta])))


def describe_alarm(bad: Sequence[str], most: int = 4) -> str:
    """The watched arrays that were not finite, for people."""
    shown = ", ".join(bad[:most]) + (f" and {len(bad) - most} more" if len(bad) > most else "")
    return shown or "a value"


def alarm_text(step: int, bad: Sequence[str]) -> str:
    """The error's message."""
    return (
        f"At step {step}, NaN or infinity appeared in: {describe_alarm(bad)}. The update there and any after it were not made: weights, "
        "states and trace are the last finite ones, so the learner can be saved or go on. Lower the learning rate, clip gradients "
        "(`clip_norm=1.0`), or look for bad values in the data (`check_inputs=True`)."
    )
