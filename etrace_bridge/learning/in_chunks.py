"""Sequences of any length through one compiled program: that of a chunk, run as often as needed.

The last chunk is padded with repetitions of the last step whose losses have weight zero. A padded
step comes after all steps that count, so it adds nothing to the gradient whatever the rule; the
states and the trace after it are not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.reader import SequenceData
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.store import Store
from etrace_bridge.schedule.chunk_plan import MAX_CHUNK


class SequenceGradient(NamedTuple):
    """What the chunks of a sequence give.

    Attributes:
        grads: summed gradients, one array per weight.
        total: the sum of the losses that count.
        losses: (T,) losses.
        outputs: outputs of the T steps.
        weights: (T,) factors of the losses.
        discarded: as in `ReverseRule.discarded`.
    """

    grads: list[Any]
    total: Any
    losses: Any
    outputs: Any
    weights: Any
    discarded: Any


class ChunkRunner:
    """Runs sequences chunk by chunk.

    Args:
        store: the learner's store.
        programs: its programs.
        options: its options.
    """

    def __init__(self, store: Store, programs: JittedPrograms, options: Options) -> None:
        self._store, self._programs, self._options = store, programs, options

    def serves(self, loss: Any, carry: bool) -> bool:
        """Whether a sequence can be run so.

        It must begin anew, have a loss of every step, and leave nothing behind in the model, such
        as running means or the state of a random generator; there must be one device, and a rule
        whose chunks may have any length.
        """
        store, options = self._store, self._options
        return (
            options.any_length
            and not carry
            and not isinstance(loss, SequenceLoss)
            and store.placement.is_single
            and all(store.compiled.resets)
            and not (store.rule.truncates and options.chunk == "auto")
            and not store.rule.needs_loss
        )

    def run(self, data: SequenceData, loss: Any) -> SequenceGradient:
        """Gradients of a sequence from the initial states."""
        store, options = self._store, self._options
        steps = store.core.plan(MAX_CHUNK, options.chunk, options.budget).steps
        theta = store.state.theta
        weights = np.ones(data.length) if data.mask is None else np.asarray(data.mask, float)
        weights = weights / weights.sum() if options.reduction == "mean" else weights
        weights = weights.astype(theta[0].dtype)
        missing = -data.length % steps
        arrays = jax.tree.map(lambda x: _padded(x, missing), (data.args, data.targets))
        factors = np.concatenate([weights, np.zeros(missing, weights.dtype)])
        call, (hidden, other) = self._programs.part(loss), store.start_states()
        kept, made = self._programs.first_part()(theta), []
        for at in range(0, len(factors), steps):
            part = slice(at, at + steps)
            args, targets = jax.tree.map(lambda x, part=part: x[part], arrays)
            hidden, other, kept, result = call(
                theta, hidden, other, kept, args, targets, factors[part]
            )
            made.append(result)
        losses, outputs, discarded = zip(*made, strict=True)
        cut = lambda *xs: np.concatenate(xs)[: data.length]
        _, grads, total = kept
        return SequenceGradient(
            grads,
            total,
            cut(*losses),
            jax.tree.map(cut, *outputs),
            weights,
            None if discarded[0] is None else np.sum(discarded, 0),
        )


def _padded(x: Any, count: int) -> np.ndarray:
    x = np.asarray(x)
    return np.concatenate([x, np.repeat(x[-1:], count, 0)]) if count else x
