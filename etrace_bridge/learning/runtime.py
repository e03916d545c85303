"""Runs a learner's compiled programs on its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import brainstate
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.filling import Filling, cut_outputs
from etrace_bridge.learning.host_update import HostUpdate
from etrace_bridge.learning.in_chunks import ChunkRunner
from etrace_bridge.learning.inputs import read_choice, read_inputs
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.losses import LossTable
from etrace_bridge.learning.optimizers import Updater, make_updater
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.preparation import Preparation
from etrace_bridge.learning.programs import discarded_share
from etrace_bridge.learning.reader import DataReader, SequenceData
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.slopes import MeterState, MeterWindow
from etrace_bridge.learning.step_runner import StepRunner
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.torch_update import TorchUpdate
from etrace_bridge.learning.torch_watch import TorchWatch
from etrace_bridge.learning.watch import Watch
from etrace_bridge.learning.weighting import Weighting
from etrace_bridge.rules import Carry, Rule
from etrace_bridge.schedule.chunk_plan import ChunkPlan, divide


def _nothing() -> None:
    pass


def _make_update(
    optimizer: Any, parameters: dict[str, torch.Tensor], options: Options, is_torch: bool
) -> tuple[Updater | None, TorchUpdate | None]:
    """Return the update inside the compiled program, or else the one that runs in torch."""
    clipping = (options.clip_norm, options.clip_value, options.accumulate)
    updater = make_updater(
        optimizer, parameters if is_torch else None, *clipping, options.schedule, options.track_norm
    )
    if updater is not None:
        return updater, None
    if options.schedule is not None:
        raise InputError(
            f"`schedule` cannot act on `{type(optimizer).__name__}`, which runs in torch. Use a "
            "torch scheduler."
        )
    return None, TorchUpdate(optimizer, parameters, *clipping, options.track_norm)


def _check_freeze(rule: Rule, options: Options) -> None:
    """Raise if sequences may stand still and the rule's trace would advance without them."""
    if options.freeze and not rule.follows_states:
        raise InputError(
            "`freeze` needs a rule whose trace advances with the states only; the trace of "
            f"`{rule.name}` would advance without them. Use `d_rtrl`, `snap1`, `low_rank` or "
            "`rtrl`, or leave `freeze` out."
        )


class Runtime:
    """Runs a learner's programs on its state.

    Attributes:
        net: the model.
        optimizer: the optimizer as the user gave it.
        options: the learner's options.
        parameters: the torch model's trained parameters by name; empty for other models.
        torch_update: the optimizer, if it runs in torch.
        torch_watch: notices changes of the torch model's parameters.
        store: the state and the compiled steps.
        losses: the loss, for each kind of target.
        programs: the jitted programs.
        watch: reads the guard's alarm.
        reader: reads users' data.
        filling: fills up short batches.
        steps: runs single steps.
        meanwhile: what `update` calls while the device computes; see `while_computing`.
    """

    def __init__(
        self,
        net: brainstate.nn.Module,
        rule: Rule,
        loss: Any,
        optimizer: Any,
        options: Options,
        placement: Placement,
        seq_loss: Any = None,
    ) -> None:
        self.net, self.optimizer, self.options = net, optimizer, options
        is_torch = isinstance(net, BridgedModule)
        named = net.model.named_parameters() if is_torch else ()
        self.parameters: dict[str, torch.Tensor] = {n: p for n, p in named if p.requires_grad}
        self.torch_watch = TorchWatch(net)
        updater, self.torch_update = _make_update(
            optimizer, self.parameters, options, is_torch=is_torch
        )
        _check_freeze(rule, options)
        self.store = Store(net, rule, updater, placement, options.freeze)
        self.losses = LossTable(loss, is_torch, rule.needs_slope)
        over_time = LossTable(seq_loss, is_torch)
        per_sequence = options.loss_at is not None or seq_loss is not None
        by_step = options.loss_at != "model" and seq_loss is None
        self.filling = Filling(rule, per_sequence, by_step)
        self.programs = JittedPrograms(self.store, options)
        self.watch = Watch(self.store, self.programs, self.losses, options.guard)
        self.reader = DataReader(self.store, options.check_inputs)
        self._host = HostUpdate(
            self.store, self.programs, self.parameters, self.torch_update, self.torch_watch
        )
        self._in_chunks = ChunkRunner(self.store, self.programs, options)
        self._preparation = Preparation(
            self.store,
            self.reader,
            Weighting(self.losses, over_time, options, rule),
            self.filling,
            self.watch,
            self.torch_watch,
            self._host,
            options,
            per_sequence,
        )
        self.steps = StepRunner(
            self.store,
            self.programs,
            self._preparation,
            self.losses,
            self.watch,
            self.torch_watch,
            self._host,
            options,
            self.parameters,
            has_optimizer=optimizer is not None,
        )
        self.meanwhile: Callable[[], None] = _nothing

    @property
    def batch_first(self) -> bool:
        """Whether sequences come as (batch, time, …)."""
        return self.reader.batch_first

    def is_batch_first(self, inputs: Any) -> bool:
        """Return whether sequences come as (batch, time, …), judging by sequences if nothing else
        shows it.
        """
        read_inputs(self.net, inputs, sequence=True)
        return self.batch_first

    def metered_step(
        self, args: tuple, target: Any, mask: Any, window: MeterWindow
    ) -> tuple[Any, Any, MeterState]:
        """Run one step; return its loss and output, and the meter's state after it."""
        return self.steps.run_metered(args, target, mask, window)

    def reset(self, mask: Any) -> None:
        """Set states and trace back to their initial values, for all or some batch elements."""
        store, place = self.store, self.store.placement
        if mask is None or not store.started:
            store.reset()
            return
        with store.transaction():
            cleared = place.together("reset", lambda: read_choice(mask), lambda x: [x])
            batch, state = store.compiled.batch, store.state
            cleared = place.join(cleared, 0)
            if cleared.shape == (batch,):
                cleared = place.put_batch(cleared, 0, batch)
            start = store.fresh_states(store.compiled)
            after = self.programs.reset()(state.hidden, state.other, state.trace, start, cleared)
            store.state = state.with_carry(Carry(*after))
            store.resets += 1

    # -- sequences --------------------------------------------------------------------------------

    def plan(self, length: int) -> ChunkPlan:
        """Divide a sequence into chunks."""
        return self.store.core.plan(length, self.options.chunk, self.options.budget)

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
        store = self.store
        with store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, carry)
            unreached = store.compiled.unreached_by(loss)
            if self._in_chunks.serves(loss, carry):
                return *self._gradients_in_chunks(data, loss), unreached
            call = self.programs.gradients(loss, self.plan(data.length), carry)
            state, compiled = store.state, store.compiled
            before = (state.hidden, state.other, state.trace)
            if not carry:
                hidden, other = self.store.start_states()
                before = (hidden, compiled.join_other(other, state.other), None)
            grads, losses, outputs, weights, discarded, after, bad = call(
                state.theta, before, data.args, data.targets, data.mask
            )
            self.watch.check_states(losses, bad)
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
        store, result = self.store, self._in_chunks.run(data, loss)
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
        store, watch = self.store, self.watch
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
            self.meanwhile()
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
        store = self.store
        if every == "sequence" and self._in_chunks.serves(loss, carry):
            result = self._in_chunks.run(data, loss)
            store.advance(self.programs.finish(loss), result.grads, result.total)
            return result.losses, result.outputs, result.weights
        call = self.programs.update(loss, plan, carry, every != "sequence")
        start = None if carry else store.start_states()
        return store.advance(call, start, data.args, data.targets, data.mask)

    @contextmanager
    def while_computing(self, call: Callable[[], None] | None) -> Iterator[None]:
        """Make `update` call a function in this context, after starting the device and before
        waiting for it.
        """
        self.meanwhile = call or _nothing
        try:
            yield
        finally:
            self.meanwhile = _nothing

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
        before = self.store.steps
        grads, losses, outputs, weights, _, unreached = self.gradients(xs, targets, mask, carry)
        self._preparation.require_gradient(unreached)
        self.watch.check_on_host(losses, grads, before)
        self._host.apply(grads, unreached)
        return losses, outputs, weights

    def own_slope(self, xs: tuple, targets: Any, mask: Any) -> tuple[float, float]:
        """Return the slope of a loss along the rule's gradient: the true one and the rule's.

        The learner's state does not change.
        """
        store = self.store
        with store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, False)
            self._preparation.require_gradient(store.compiled.unreached_by(loss))
            hidden, first = store.start_states()
            state, compiled = store.state, store.compiled
            call = self.programs.own_slope(loss, self.plan(data.length))
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
        store = self.store
        with store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, True)
            self._preparation.require_gradient(store.compiled.unreached_by(loss))
            now, state = self.programs.meter_state(window), store.state
            call = self.programs.stream_slope(loss, self.plan(data.length))
            before = state.hidden, state.other, state.trace
            return call(
                state.theta, before, now, window.counts, data.args, data.targets, data.mask
            ), data.length

    def predict(self, xs: tuple, carry: bool) -> Any:
        """Return outputs of a sequence in evaluation mode; the learner's state does not change."""
        with self.store.transaction():
            continues = carry and self.store.stream is not None
            data, _ = self._preparation.sequence(
                xs, None, None, continues, evaluates=True, fills=not carry
            )
            return cut_outputs(self._evaluate(data, None, carry)[0], data)

    def _evaluate(self, data: SequenceData, loss: Any, carry: bool) -> tuple[Any, Any]:
        """Return outputs of a sequence in evaluation mode, and its losses if there is a loss."""
        store, state = self.store, self.store.state
        hidden, other, losses = state.hidden, state.other, None
        if not carry:
            hidden, first = self.store.start_states()
            other = store.compiled.join_other(first, other)
        if self._in_chunks.serves_evaluation(loss):
            outputs, losses = self._in_chunks.evaluate(data, (hidden, other), loss)
        else:
            outputs = self.programs.predict()(state.theta, hidden, other, data.args)
            if loss is not None:
                losses = self.programs.losses(loss)(outputs, data.targets)
        store.return_to_stream()
        return outputs, losses

    def evaluate(self, xs: tuple, targets: Any, mask: Any):
        """Return losses and the steps' weights of a sequence in evaluation mode."""
        if targets is None:
            raise InputError(
                "`targets` is missing: an evaluation needs a loss. Pass targets, or call "
                "`predict` for outputs only."
            )
        with self.store.transaction():
            data, loss = self._preparation.sequence(xs, targets, mask, False, evaluates=True)
            _, losses = self._evaluate(data, loss, False)
            if isinstance(loss, SequenceLoss):
                return losses, np.ones(data.length)
            return losses, self._in_chunks.weights(data)

    # -- optimizer ----------------------------------------------------------------------

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the last gradients before clipping; None if it is not tracked."""
        store = self.store
        if not self.options.track_norm or not store.started or not store.updates:
            return None
        return (
            self.torch_update.norm if self.torch_update is not None else float(store.state.opt.norm)
        )

    def require_optimizer(self) -> None:
        """Raise if an update would change nothing."""
        if self.optimizer is None:
            raise InputError(
                "This learner has no optimizer, so an update would change no weight. Give one: "
                "`OnlineLearner(model, ..., optimizer=torch.optim.Adam(model.parameters()))`. To "
                "get gradients only, call `gradients`."
            )
