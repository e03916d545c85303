"""The learner's working part: it runs compiled programs on the learner's state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import brainstate
import jax
import numpy as np
import torch

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.element_loss import ElementLoss
from etrace_bridge.learning.filling import Filling, cut_outputs
from etrace_bridge.learning.host_update import HostUpdate
from etrace_bridge.learning.in_chunks import ChunkRunner
from etrace_bridge.learning.inputs import read_mask
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.losses import LossTable
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.optimizers import make_updater
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.programs import discarded_share
from etrace_bridge.learning.quick_step import QuickSteps
from etrace_bridge.learning.reader import DataReader, SequenceData, StepData
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.slopes import MeterState, MeterWindow
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.torch_update import TorchUpdate, has_hooks
from etrace_bridge.learning.watch import LOOK_EVERY, Watch
from etrace_bridge.learning.weighting import Weighting
from etrace_bridge.rules import Carry, Rule
from etrace_bridge.schedule.chunk_plan import ChunkPlan, divide
from etrace_bridge.schedule.sequence import step_weights


class Staged(NamedTuple):
    """A sequence that was read before its turn.

    Attributes:
        given: the user's inputs, targets and mask.
        carry: whether it continues the stream.
        core: the compiled step that it was read for.
        data: the sequence.
        loss: its loss.
    """

    given: tuple
    carry: bool
    core: OnlineCore
    data: SequenceData
    loss: Any


def _nothing() -> None:
    pass


class Runtime:
    """Runs a learner's programs on its state.

    Attributes:
        net: the model.
        optimizer: the optimizer as the user gave it.
        options: further options.
        parameters: the torch model's trained parameters by name; empty for other models.
        torch_update: the optimizer that runs in torch, if it does.
        store: the state and the compiled steps.
        losses: the loss, for each kind of target.
        programs: the jitted programs.
        watch: reads the guard's alarm.
        reader: reads users' data.
        filling: fills up short batches.
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
        clipping = (options.clip_norm, options.clip_value, options.accumulate)
        updater = make_updater(
            optimizer,
            self.parameters if is_torch else None,
            *clipping,
            options.schedule,
            options.track_norm,
        )
        self.torch_update = None
        if updater is None:
            if options.schedule is not None:
                raise InputError(
                    f"`schedule` cannot act on `{type(optimizer).__name__}`, which runs in torch. "
                    "Use a torch scheduler."
                )
            self.torch_update = TorchUpdate(
                optimizer, self.parameters, *clipping, options.track_norm
            )
        if options.freeze and not rule.follows_states:
            raise InputError(
                "`freeze` needs a rule whose trace moves with the states alone; that of "
                f"`{rule.name}` would go on. Use `d_rtrl`, `snap1`, `low_rank` or `rtrl`, or leave "
                "`freeze` out."
            )
        self.store = Store(net, rule, updater, placement, options.freeze)
        self.losses = LossTable(loss, is_torch, rule.needs_slope)
        over_time = LossTable(seq_loss, is_torch)
        self._weighting = Weighting(self.losses, over_time, options, rule)
        self._per_sequence = options.loss_at is not None or seq_loss is not None
        by_step = options.loss_at != "model" and seq_loss is None
        self.filling = Filling(rule, self._per_sequence, by_step)
        self.programs = JittedPrograms(self.store, options)
        self.watch = Watch(self.store, self.programs, self.losses, options.guard)
        self.reader = DataReader(self.store, options.check_inputs)
        self._host = HostUpdate(self.store, self.programs, self.parameters, self.torch_update)
        self._in_chunks = ChunkRunner(self.store, self.programs, options)
        self._quick = QuickSteps(self.store, LOOK_EVERY)
        self._warned = False
        self.meanwhile: Callable[[], None] = _nothing
        self._staged: Staged | None = None

    @property
    def batch_first(self) -> bool:
        """Whether sequences come as (batch, time, …)."""
        return self.reader.batch_first

    # -- one step ---------------------------------------------------------------------------------

    def step(self, args: tuple, target: Any, mask: Any = None) -> tuple[Any, Any, Any]:
        """One online step with update; returns the loss, the output and what the rule discarded, on
        the device.
        """
        with self.store.lock:
            known = self._quick.find(args, target) if mask is None else None
            if known is not None and not has_hooks(self.parameters.values()):
                return self._run_step(*known)
            with self.store.transaction():
                return self._checked_step(args, target, mask)

    def metered_step(
        self, args: tuple, target: Any, mask: Any, window: MeterWindow
    ) -> tuple[Any, Any, MeterState]:
        """`step`, and the meter's state after it."""
        store = self.store
        with store.transaction():
            if self._host.is_needed:
                raise NotSupportedError(
                    "`FidelityMeter.step` measures inside the compiled step, but parameter hooks "
                    "and torch optimizers without a translation update outside it. Use an "
                    "optimizer that is translated (SGD, Adam, AdamW, RMSprop, Adagrad, any of "
                    "optax), or the meter as a callback of `fit`."
                )
            _, loss, batch = self._step_data(args, target, mask)
            now, metered = self.programs.meter_state(window), self.programs.metered_step(loss)
            call = lambda leaves, *step: metered(leaves, *step, now, window.counts)
            return self._run_step(call, *batch)

    def _run_step(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any, Any]:
        """Loss, output, and what else the program gives."""
        store, recent = self.store, self.watch.recent
        store.refresh_numbers()
        loss, output, more = store.advance(call, arrays, target)
        store.steps += 1
        if target is not None:
            store.updates += 1
        recent.append((arrays, target))
        if len(recent) >= LOOK_EVERY:
            jax.block_until_ready(output)  # the inputs' buffers come round again
            self.watch.look()
        return loss, output, more

    def _step_data(
        self, args: tuple, target: Any, mask: Any
    ) -> tuple[StepData, Any, tuple[list[Any], Any]]:
        """A checked step, with its compiled program active, its loss, and inputs and target on the
        device.
        """
        store, place = self.store, self.store.placement
        data = place.together(
            "step",
            lambda: self.reader.step(args, target),
            lambda d: [*d.args, *jax.tree.leaves(d.wanted)],
        )
        mask = None if mask is None else self.reader.mask(mask)
        data = self._with_keep(data, mask, np.shape(data.args[0])[:1])
        inputs = place.join(data.args, 0)
        core = store.prepare(inputs, continues=True)
        core.compiled.check_settings()
        learns, data = data.target is not None, replace(data, target=place.stand_in(data.target))
        loss, data = self._weigh(lambda: self._weighting.of_step(core.compiled, data, mask), mask)
        if learns:
            self._require_gradient()
            self._warn_without_optimizer()
        return (
            data,
            loss,
            place.put_batch((inputs, place.join(data.wanted, 0)), 0, core.compiled.batch),
        )

    def _checked_step(self, args: tuple, target: Any, mask: Any) -> tuple[Any, Any, Any]:
        data, loss, (arrays, wanted) = self._step_data(args, target, mask)
        on_host = loss is not None and self._host.is_needed
        call = self.programs.step(loss, own_update=not on_host)
        if on_host:
            return self._host_step(call, arrays, wanted)
        settled = mask is None and not self.options.freeze and not self.options.check_inputs
        if self.store.placement.is_single and settled:
            self._quick.remember(args, data, loss, call)
        return self._run_step(call, arrays, wanted)

    def _weigh(self, find: Callable[[], tuple[Any, Any]], mask: Any) -> tuple[Any, Any]:
        """The loss and its data, or the same refusal in every process."""
        place = self.store.placement

        def weigh() -> tuple[Any, Any]:
            is_single = mask is not None and np.ndim(mask) == 2
            loss, data = (None, None) if place.spans_processes and is_single else find()
            if place.spans_processes and (is_single or isinstance(loss, ElementLoss)):
                raise NotSupportedError(
                    "Masks of single sequences, and labels that are to be ignored, count over the "
                    "whole batch, which is divided over several processes here. Use a mask of "
                    "steps, (T,), or one process."
                )
            return loss, data

        return place.together("loss", weigh)

    def reset(self, mask: Any) -> None:
        """Initial states and a zero trace, for all or some batch elements."""
        store, place = self.store, self.store.placement
        if mask is None or not store.started:
            store.reset()
            return
        with store.transaction():
            gone = place.together("reset", lambda: read_mask(mask), lambda x: [x])
            batch, state = store.compiled.batch, store.state
            gone = place.join(gone, 0)
            if gone.shape == (batch,):
                gone = place.put_batch(gone, 0, batch)
            start = store.fresh_states(store.compiled)
            after = self.programs.reset()(state.hidden, state.other, state.trace, start, gone)
            store.state = state.with_carry(Carry(*after))
            store.resets += 1

    def _host_step(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any, None]:
        store = self.store
        leaves, (loss, output, grads) = store.try_out(call, arrays, target)
        named = self._host.all_gradients(grads)
        self.watch.check_on_host(loss, named, store.steps)
        store.keep(leaves)
        self._host.apply(named)
        store.steps += 1
        return loss, output, None

    # -- sequences --------------------------------------------------------------------------------

    def plan(self, length: int) -> ChunkPlan:
        """The division of a sequence."""
        return self.store.core.plan(length, self.options.chunk, self.options.budget)

    def _sequence(self, xs: tuple, *rest: Any, **options: Any) -> tuple[SequenceData, Any]:
        """`_read` after a look at the alarm."""
        self.watch.look()
        return self._read(xs, *rest, **options)

    def _read(
        self,
        xs: tuple,
        targets: Any,
        mask: Any,
        carry: bool,
        evaluates: bool = False,
        fills: bool = True,
    ) -> tuple[SequenceData, Any]:
        """A checked sequence on the device, with its compiled step active, and its loss.

        Args:
            xs: the inputs.
            targets: the targets; None without a loss.
            mask: weights of the steps.
            carry: it continues the stream.
            evaluates: it is for evaluation mode.
            fills: its batch may be filled up.
        """
        store = self.store
        place = store.placement
        read = lambda: self.reader.sequence(xs, targets, mask, self._per_sequence)
        data = place.together("sequence", read, lambda d: [*d.args, *jax.tree.leaves(d.targets)])
        data = self._with_keep(data, data.mask, np.shape(data.args[0])[:2])
        found = self._filled(data, evaluates) if fills and not carry else None
        if found is None:
            inputs = place.join(data.args, 1)
            compiled = store.prepare([a[0] for a in inputs], carry).compiled
            data = replace(data, target=place.stand_in(data.target))
            loss, data = self._weigh(lambda: self._weighting.of_sequence(compiled, data), mask)
        else:
            loss, data = found
            inputs, compiled = data.args, store.compiled
        if evaluates:
            store.evaluation().compiled.check_settings(evaluates=True)
        else:
            compiled.check_settings()
        axis = 0 if isinstance(loss, SequenceLoss) else 1
        targets = place.put_batch(place.join(data.targets, axis), axis, compiled.batch)
        args = place.put_batch(inputs, 1, compiled.batch)
        return replace(data, args=args, targets=targets, mask=place.put(data.mask)), loss

    def _filled(self, data: SequenceData, evaluates: bool) -> tuple[Any, SequenceData] | None:
        """Loss and data of a sequence whose batch is filled up; None if it must stay as it is."""
        store = self.store
        filled = self.filling.fill(data, not evaluates) if store.placement.is_single else None
        if filled is None:
            return None
        compiled = store.prepare([a[0] for a in filled.args], False).compiled
        step = store.evaluation().compiled if evaluates else compiled
        if not step.serves_any_batch:
            return None
        try:
            return self._weighting.of_sequence(compiled, filled)
        except InputError:  # the batch as it is has the error too, or a loss that mixes it
            return None

    def _with_keep(self, data: Any, mask: Any, shape: tuple[int, ...]) -> Any:
        """Data with one input more, if sequences may stand still: which of them move."""
        if not self.options.freeze:
            return data
        keep = np.ones(shape) if mask is None else np.asarray(mask) != 0
        keep = keep[:, None] if keep.ndim < len(shape) else keep
        keep = np.broadcast_to(keep, shape).astype(self.store.float_dtype or np.float32)
        return replace(data, args=[*data.args, np.ascontiguousarray(keep)])

    def gradients(self, xs: tuple, targets: Any, mask: Any, carry: bool):
        """Gradients by name, losses, outputs, the steps' weights, and what the rule discarded."""
        if targets is None:
            raise InputError("`targets` is missing: a gradient needs a loss at one step at least.")
        store = self.store
        with store.transaction():
            data, loss = self._sequence(xs, targets, mask, carry)
            if self._in_chunks.serves(loss, carry):
                return self._gradients_in_chunks(data, loss)
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
            return named, losses, cut_outputs(outputs, data), weights, discarded

    def _gradients_in_chunks(self, data: SequenceData, loss: Any):
        """`gradients` of a checked sequence of any length."""
        store, found = self.store, self._in_chunks.run(data, loss)
        store.steps += data.length
        named = self._host.all_gradients(found.grads)
        store.return_to_stream()
        tuning, outputs = store.compiled.program.tuning, found.outputs
        discarded = discarded_share(tuning, found.discarded, found.grads)
        return named, found.losses, cut_outputs(outputs, data), found.weights, discarded

    def update(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        """Gradients and updates; losses, outputs and the steps' weights."""
        if every not in ("sequence", "chunk", "step"):
            raise InputError(f"`every` is {every!r}; it must be 'sequence', 'chunk' or 'step'.")
        if targets is None:
            raise InputError("`targets` is missing: an update needs a loss at one step at least.")
        self.require_optimizer()
        store, watch = self.store, self.watch
        with store.transaction():
            if self._host.is_needed:
                return self._host_sequence(xs, targets, mask, carry, every)
            data, loss = self._take_staged(xs, targets, mask, carry)
            if every != "sequence" and isinstance(loss, SequenceLoss):
                raise InputError(
                    "A loss over the whole sequence allows one update for it, `every='sequence'`, "
                    f"not {every!r}."
                )
            self._require_gradient()
            plan = divide(data.length, 1) if every == "step" else self.plan(data.length)
            store.refresh_numbers()
            if every == "sequence" and self._in_chunks.serves(loss, carry):
                found = self._in_chunks.run(data, loss)
                store.advance(self.programs.finish(loss), found.grads, found.total)
                losses, outputs, weights = found.losses, found.outputs, found.weights
            else:
                call = self.programs.update(loss, plan, carry, every != "sequence")
                start = None if carry else self.store.start_states()
                losses, outputs, weights = store.advance(
                    call, start, data.args, data.targets, data.mask
                )
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

    @contextmanager
    def while_computing(self, call: Callable[[], None] | None) -> Iterator[None]:
        """Within this, `update` makes a call after it has started the device and before it waits."""
        self.meanwhile = call or _nothing
        try:
            yield
        finally:
            self.meanwhile = _nothing

    def stage(self, xs: tuple, targets: Any, mask: Any, carry: bool) -> None:
        """Reads the sequence of the next `update`, and puts it on the device; to be called while it
        computes another of the same shape.
        """
        core, is_single = self.store.core, self.store.placement.is_single
        if not is_single or self._host.is_needed or self.options.any_length:
            return
        given = (*xs, targets, mask)
        try:
            data, loss = self._read(xs, targets, mask, carry)
        except Exception:  # the update itself will say what is wrong
            return
        data = replace(data, args=jax.device_put(data.args, self.store.placement.device))
        self._staged = Staged(given, carry, core, data, loss)

    def _take_staged(
        self, xs: tuple, targets: Any, mask: Any, carry: bool
    ) -> tuple[SequenceData, Any]:
        """`_sequence`, or what `stage` has read of the same objects."""
        staged, self._staged = self._staged, None
        if staged is None or staged.core is not self.store.active or staged.carry != carry:
            return self._sequence(xs, targets, mask, carry)
        given = (*xs, targets, mask)
        if len(given) != len(staged.given) or any(
            a is not b for a, b in zip(given, staged.given, strict=True)
        ):
            return self._sequence(xs, targets, mask, carry)
        self.watch.look()
        return staged.data, staged.loss

    def _host_sequence(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        if every != "sequence":
            raise InputError(
                f"`every={every!r}` needs an update inside the compiled program; parameter hooks "
                "and torch optimizers without a translation run outside it. Use "
                "`every='sequence'`, or call `step` for every time step."
            )
        before = self.store.steps
        grads, losses, outputs, weights, _ = self.gradients(xs, targets, mask, carry)
        self._require_gradient()
        self.watch.check_on_host(losses, grads, before)
        self._host.apply(grads)
        return losses, outputs, weights

    def own_slope(self, xs: tuple, targets: Any, mask: Any) -> tuple[float, float]:
        """Along the rule's own gradient of a sequence: the true slope of its loss, and the rule's.
        The learner stays as it is.
        """
        store = self.store
        with store.transaction():
            data, loss = self._sequence(xs, targets, mask, False)
            self._require_gradient()
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
        """The meter's state after a sequence that continues the stream, and the sequence's length.
        The learner stays as it is.
        """
        store = self.store
        with store.transaction():
            data, loss = self._sequence(xs, targets, mask, True)
            self._require_gradient()
            now, state = self.programs.meter_state(window), store.state
            call = self.programs.stream_slope(loss, self.plan(data.length))
            before = state.hidden, state.other, state.trace
            return call(
                state.theta, before, now, window.counts, data.args, data.targets, data.mask
            ), data.length

    def predict(self, xs: tuple, carry: bool) -> Any:
        """Outputs of a sequence in evaluation mode; the learner stays as it is."""
        with self.store.transaction():
            continues = carry and self.store.stream is not None
            data, _ = self._sequence(xs, None, None, continues, evaluates=True, fills=not carry)
            return cut_outputs(self._evaluate(data, None, carry)[0], data)

    def _evaluate(self, data: SequenceData, loss: Any, carry: bool) -> tuple[Any, Any]:
        """Outputs of a sequence in evaluation mode, and its losses if there is a loss."""
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
        """Losses and the steps' weights of a sequence in evaluation mode."""
        if targets is None:
            raise InputError("`targets` is missing: an evaluation needs a loss.")
        with self.store.transaction():
            data, loss = self._sequence(xs, targets, mask, False, evaluates=True)
            _, losses = self._evaluate(data, loss, False)
            if self._in_chunks.serves_evaluation(loss):
                return losses, self._in_chunks.weights(data)
            return losses, step_weights(data.length, data.mask, self.programs.spec(loss).reduction)

    # -- what can be learned ----------------------------------------------------------------------

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
        """Raises if an update would change nothing."""
        if self.optimizer is None:
            raise InputError(
                "This learner has no optimizer, so an update would change no weight. Give one: "
                "`OnlineLearner(model, ..., optimizer=torch.optim.Adam(model.parameters()))`; for "
                "gradients alone call `gradients`."
            )

    def _require_gradient(self) -> None:
        """Raises if the loss's gradient is zero for every parameter, whatever the data."""
        if not self.store.compiled.is_trainable:
            raise InputError(
                "No gradient can reach any parameter of this model, so training would change "
                "nothing: every path from the parameters to the output is detached, rounded, or a "
                "step function without a surrogate gradient. See `learner.graph.report()`."
            )

    def _warn_without_optimizer(self) -> None:
        if self.optimizer is None and not self._warned:
            self._warned = True
            warnings.warn(
                "This learner has no optimizer: `step` gives losses and moves states and trace "
                "on, and changes no weight. Pass `optimizer=` to train, or leave the target out.",
                stacklevel=6,  # the caller of `OnlineLearner.step`
            )
