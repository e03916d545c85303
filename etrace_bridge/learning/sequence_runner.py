"""Runs sequences of a learner: gradients, updates, predictions and slopes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.learning.filling import cut_outputs
from etrace_bridge.learning.host_update import HostUpdate
from etrace_bridge.learning.in_chunks import ChunkRunner
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.preparation import Preparation
from etrace_bridge.learning.programs import discarded_share
from etrace_bridge.learning.reader import SequenceData
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.slopes import MeterState, MeterWindow
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.watch import Watch
from etrace_bridge.schedule.chunk_plan import ChunkPlan, divide


def _nothing() -> None:
    pass


class SequenceRunner:
    """Runs sequences.

    Args:
        store: the learner's store.
        programs: its programs.
        preparation: prepares a sequence's data.
        watch: reads the guard's alarm.
        host: updates that pass through torch, if there are any.
        options: the learner's options.
        has_optimizer: whether an update changes the weights.
    """

    def __init__(
        self,
        store: Store,
        programs: JittedPrograms,
        preparation: Preparation,
        watch: Watch,
        host: HostUpdate,
        options: Options,
        has_optimizer: bool,
    ) -> None:
        self._store, self._programs, self._preparation = store, programs, preparation
        self._watch, self._host, self._options = watch, host, options
        self._in_chunks = ChunkRunner(store, programs, options)
        self._has_optimizer = has_optimizer
        self._meanwhile: Callable[[], None] = _nothing

    def require_optimizer(self) -> None:
        """Raise if an update would change nothing."""
        if not self._has_optimizer:
            raise InputError(
                "This learner has no optimizer, so an update would change no weight. Give one: "
                "`OnlineLearner(model, ..., optimizer=torch.optim.Adam(model.parameters()))`. To "
                "get gradients only, call `gradients`."
            )

    def plan(self, length: int) -> ChunkPlan:
        """Divide a sequence into chunks."""
        return self._store.core.plan(length, self._options.chunk, self._options.budget)

    def gradients(self, xs: tuple, targets: Any, mask: Any, carry: bool):
        """Compute gradients of a sequence.

        Returns:
            Gradients by name, losses, outputs, the steps' weights, what the rule discarded, and the
            names of the parameters that the loss's gradient cannot reach.
        """
        if targets is None:
            raise InputError(
                "`targets` is missing: a gradient needs a loss at one step at least. Pass "
                "targets, or call `predict` for outputs only."
            )
        store = self._store
        with store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, carry)
            unreached = store.compiled.unreached_by(loss)
            if self._in_chunks.serves(loss, carry):
                return *self._gradients_in_chunks(data, loss), unreached
            call = self._programs.gradients(loss, self.plan(data.length), carry)
            state, compiled = store.state, store.compiled
            before = (state.hidden, state.other, state.trace)
            if not carry:
                hidden, other = self._store.start_states()
                before = (hidden, compiled.join_other(other, state.other), None)
            grads, losses, outputs, weights, discarded, after, bad = call(
                state.theta, before, data.args, data.targets, data.mask
            )
            self._watch.check_states(losses, bad)
            hidden, other, trace = after
            if carry:
                store.state = state.replace(hidden=hidden, other=other, trace=trace)
            else:
                store.state = state.replace(other=compiled.join_other(state.other, other))
            store.steps += data.length
            named = self._host.all_gradients(grads)
            store.return_to_stream()
            return named, losses, cut_outputs(outputs, data), weights, discarded, unreached

    def _gradients_in_chunks(self, data: SequenceData, loss: Any):
        """Do the work of `gradients` for a checked sequence of any length."""
        store, result = self._store, self._in_chunks.run(data, loss)
        store.steps += data.length
        named = self._host.all_gradients(result.grads)
        store.return_to_stream()
        tuning, outputs = store.compiled.program.tuning, result.outputs
        discarded = discarded_share(tuning, result.discarded, result.grads)
        return named, result.losses, cut_outputs(outputs, data), result.weights, discarded

    def update(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        """Compute gradients of a sequence and update; return losses, outputs and the steps'
        weights.
        """
        if every not in ("sequence", "chunk", "step"):
            raise InputError(f"`every` is {every!r}; it must be 'sequence', 'chunk' or 'step'.")
        if targets is None:
            raise InputError(
                "`targets` is missing: an update needs a loss at one step at least. Pass "
                "targets, or call `predict` for outputs only."
            )
        self.require_optimizer()
        store, watch = self._store, self._watch
        with store.transaction():
            if self._host.is_needed:
                return self._host_sequence(xs, targets, mask, carry, every)
            data, loss = self._preparation.staged_or_read(xs, targets, mask, carry)
            if every != "sequence" and isinstance(loss, SequenceLoss):
                raise InputError(
                    "A loss over the whole sequence allows one update for it, `every='sequence'`, "
                    f"not {every!r}."
                )
            self._preparation.require_gradient(store.compiled.unreached_by(loss))
            plan = divide(data.length, 1) if every == "step" else self.plan(data.length)
            store.refresh_numbers()
            losses, outputs, weights = self._start_update(data, loss, plan, carry, every)
            before, each = watch.good, data.length if every == "sequence" else plan.steps
            self._meanwhile()
            try:
                watch.look(losses, each)
            finally:
                made = watch.good - before if watch.active else -(-data.length // each)
                store.updates += made
                store.steps += min(made * each, data.length)
                store.return_to_stream()
            return losses, cut_outputs(outputs, data), weights

    def _start_update(
        self, data: SequenceData, loss: Any, plan: ChunkPlan, carry: bool, every: str
    ) -> Sequence[Any]:
        """Start the update on the device; return losses, outputs and weights of the steps."""
        store = self._store
        if every == "sequence" and self._in_chunks.serves(loss, carry):
            result = self._in_chunks.run(data, loss)
            store.advance(self._programs.finish(loss), result.grads, result.total)
            return result.losses, result.outputs, result.weights
        call = self._programs.update(loss, plan, carry, every != "sequence")
        start = None if carry else store.start_states()
        return store.advance(call, start, data.args, data.targets, data.mask)

    @contextmanager
    def while_computing(self, call: Callable[[], None] | None) -> Iterator[None]:
        """Make `update` call a function in this context, after starting the device and before
        waiting for it.
        """
        self._meanwhile = call or _nothing
        try:
            yield
        finally:
            self._meanwhile = _nothing

    def stage(self, xs: tuple, targets: Any, mask: Any, carry: bool) -> None:
        """Read the sequence of the next `update` while the device computes another of its shape."""
        self._preparation.stage(xs, targets, mask, carry)

    def _host_sequence(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        if every != "sequence":
            raise InputError(
                f"`every={every!r}` needs an update inside the compiled program; parameter hooks "
                "and torch optimizers without a translation run outside it. Use "
                "`every='sequence'`, or call `step` for every time step."
            )
        before = self._store.steps
        grads, losses, outputs, weights, _, unreached = self.gradients(xs, targets, mask, carry)
        self._preparation.require_gradient(unreached)
        self._watch.check_on_host(losses, grads, before)
        self._host.apply(grads, unreached)
        return losses, outputs, weights

    def own_slope(self, xs: tuple, targets: Any, mask: Any) -> tuple[float, float]:
        """Return the slope of a loss along the rule's gradient: the true one and the rule's.

        The learner's state does not change.
        """
        store = self._store
        with store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, False)
            self._preparation.require_gradient(store.compiled.unreached_by(loss))
            hidden, first = store.start_states()
            state, compiled = store.state, store.compiled
            call = self._programs.own_slope(loss, self.plan(data.length))
            slope, predicted = call(
                state.theta,
                (hidden, compiled.join_other(first, state.other)),
                data.args,
                data.targets,
                data.mask,
            )
            store.return_to_stream()
            return float(slope), float(predicted)

    def stream_slope(
        self, xs: tuple, targets: Any, mask: Any, window: MeterWindow
    ) -> tuple[MeterState, int]:
        """Return the meter's state after a sequence that continues the stream, and its length.

        The learner's state does not change.
        """
        store = self._store
        with store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, True)
            self._preparation.require_gradient(store.compiled.unreached_by(loss))
            now, state = self._programs.meter_state(window), store.state
            call = self._programs.stream_slope(loss, self.plan(data.length))
            before = state.hidden, state.other, state.trace
            return call(
                state.theta, before, now, window.counts, data.args, data.targets, data.mask
            ), data.length

    def predict(self, xs: tuple, carry: bool) -> Any:
        """Return outputs of a sequence in evaluation mode; the learner's state does not change."""
        with self._store.transaction():
            continues = carry and self._store.stream is not None
            data, _ = self._preparation.sequence(
                xs, None, None, continues, evaluates=True, fills=not carry
            )
            return cut_outputs(self._evaluate(data, None, carry)[0], data)

    def _evaluate(self, data: SequenceData, loss: Any, carry: bool) -> tuple[Any, Any]:
        """Return outputs of a sequence in evaluation mode, and its losses if there is a loss."""
        store, state = self._store, self._store.state
        hidden, other, losses = state.hidden, state.other, None
        if not carry:
            hidden, first = self._store.start_states()
            other = store.compiled.join_other(first, other)
        if self._in_chunks.serves_evaluation(loss):
            outputs, losses = self._in_chunks.evaluate(data, (hidden, other), loss)
        else:
            outputs = self._programs.predict()(state.theta, hidden, other, data.args)
            if loss is not None:
                losses = self._programs.losses(loss)(outputs, data.targets)
        store.return_to_stream()
        return outputs, losses

    def evaluate(self, xs: tuple, targets: Any, mask: Any):
        """Return losses and the steps' weights of a sequence in evaluation mode."""
        if targets is None:
            raise InputError(
                "`targets` is missing: an evaluation needs a loss. Pass targets, or call "
                "`predict` for outputs only."
            )
        with self._store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, False, evaluates=True)
            _, losses = self._evaluate(data, loss, False)
            if isinstance(loss, SequenceLoss):
                return losses, np.ones(data.length)
            return losses, self._in_chunks.weights(data)
