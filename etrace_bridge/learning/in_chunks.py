"""Sequences of any length through one compiled program, that of a chunk, run as often as needed.

The last chunk is padded with repetitions of the last step whose losses have weight zero. A padded
step comes after all steps that count, so it adds nothing to the gradient under any rule; the states
and the trace after it are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """The results of a sequence that ran in chunks.

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
        """Return whether a sequence can be run this way.

        It must start anew, have a loss of every step, and change nothing in the model, such as
        running means or the state of a random generator. There must be one device, and a rule whose
        chunks may have any length.
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

    def serves_evaluation(self, loss: Any) -> bool:
        """Return whether a sequence can be run this way in evaluation mode.

        That needs one device, and a loss of every step or none.
        """
        is_single = self._store.placement.is_single
        return self._options.any_length and is_single and not isinstance(loss, SequenceLoss)

    def run(self, data: SequenceData, loss: Any) -> SequenceGradient:
        """Return the gradients of a sequence from the initial states."""
        store, theta = self._store, self._store.state.theta
        weights = self.weights(data).astype(theta[0].dtype)
        call, (hidden, other) = self._programs.part(loss), store.start_states()
        kept, made = self._programs.first_part()(theta), []
        for args, targets, factors in self._chunks(data.args, data.targets, weights):
            hidden, other, kept, result = call(theta, hidden, other, kept, args, targets, factors)
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

    def evaluate(self, data: SequenceData, start: tuple[Any, Any], loss: Any) -> tuple[Any, Any]:
        """Return outputs of a sequence in evaluation mode, and its losses.

        Args:
            data: the sequence.
            start: hidden states and other arrays before it.
            loss: the loss of a step; None where no losses are wanted.
        """
        theta, (hidden, other), made = self._store.state.theta, start, []
        call = self._programs.predict_part()
        find_losses = None if loss is None else self._programs.losses(loss)
        targets = None if loss is None else data.targets
        for args, wanted, _ in self._chunks(data.args, targets, self.weights(data)):
            outputs, hidden, other = call(theta, hidden, other, args)
            made.append((outputs, None if find_losses is None else find_losses(outputs, wanted)))
        return jax.tree.map(lambda *xs: np.concatenate(xs)[: data.length], *made)

    def weights(self, data: SequenceData) -> np.ndarray:
        """Return the factors (T,) of the losses, in double precision."""
        weights = np.ones(data.length) if data.mask is None else np.asarray(data.mask, float)
        return weights / weights.sum() if self._options.reduction == "mean" else weights

    def _chunks(self, args: Any, targets: Any, weights: np.ndarray) -> Iterator[tuple]:
        """Yield inputs, targets and weights of one chunk after the other."""
        steps = self._store.core.plan(MAX_CHUNK, self._options.chunk, self._options.budget).steps
        missing = -len(weights) % steps
        arrays = jax.tree.map(lambda x: _padded(x, missing), (args, targets))
        factors = np.concatenate([weights, np.zeros(missing, weights.dtype)])
        for at in range(0, len(factors), steps):
            part = slice(at, at + steps)
            yield *jax.tree.map(lambda x, part=part: x[part], arrays), factors[part]


def _padded(x: Any, count: int) -> np.ndarray:
    x = np.asarray(x)
    return np.concatenate([x, np.repeat(x[-1:], count, 0)]) if count else x
