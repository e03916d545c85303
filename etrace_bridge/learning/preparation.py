"""From a user's arguments to what a compiled program takes: a loss, and arrays on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.learning.element_loss import ElementLoss
from etrace_bridge.learning.filling import Filling
from etrace_bridge.learning.host_update import HostUpdate
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.reader import DataReader, SequenceData, StepData
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.torch_watch import TorchWatch
from etrace_bridge.learning.watch import Watch
from etrace_bridge.learning.weighting import Weighting


class PreparedStep(NamedTuple):
    """One step, checked.

    Attributes:
        data: the step as the reader gives it.
        loss: its loss; None for a step without a target.
        arrays: its inputs on the device.
        target: its target on the device.
    """

    data: StepData
    loss: Any
    arrays: list[Any]
    target: Any


class StagedSequence(NamedTuple):
    """A sequence that was read early.

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


class Preparation:
    """Prepares the data of a learner's programs.

    Args:
        store: the learner's store; the compiled step for the data becomes its active one.
        reader: reads the user's arrays.
        weighting: finds the loss.
        filling: fills up short batches.
        watch: reads the guard's alarm.
        torch_watch: notices changes of the torch model's parameters.
        host: updates that pass through torch, if there are any.
        options: the learner's options.
        per_sequence: targets are one for each sequence, without a time axis.
    """

    def __init__(
        self,
        store: Store,
        reader: DataReader,
        weighting: Weighting,
        filling: Filling,
        watch: Watch,
        torch_watch: TorchWatch,
        host: HostUpdate,
        options: Options,
        per_sequence: bool,
    ) -> None:
        self._store, self._reader, self._weighting = store, reader, weighting
        self._filling, self._watch, self._host = filling, watch, host
        self._torch_watch = torch_watch
        self._options, self._per_sequence = options, per_sequence
        self._staged: StagedSequence | None = None

    def step(self, args: tuple, target: Any, mask: Any) -> PreparedStep:
        """Check a step, put it on the device and activate its compiled program."""
        store, place = self._store, self._store.placement
        self._torch_watch.check(learns=target is not None)
        data = place.together(
            "step",
            lambda: self._reader.step(args, target),
            lambda d: [*d.args, *jax.tree.leaves(d.wanted)],
        )
        mask = None if mask is None else self._reader.mask(mask)
        data = self._with_keep(data, mask, np.shape(data.args[0])[:1])
        inputs = place.join(data.args, 0)
        compiled = store.prepare(inputs, continues=True).compiled
        compiled.check_settings()
        data = replace(data, target=place.stand_in(data.target))
        loss, data = self._weigh(lambda: self._weighting.of_step(compiled, data, mask), mask)
        if target is not None:
            self.require_gradient(compiled.unreached_by(loss))
        batch = place.put_batch((inputs, place.join(data.wanted, 0)), 0, compiled.batch)
        return PreparedStep(data, loss, *batch)

    def sequence(
        self,
        xs: tuple,
        targets: Any,
        mask: Any,
        carry: bool,
        evaluates: bool = False,
        fills: bool = True,
    ) -> tuple[SequenceData, Any]:
        """Check a sequence, put it on the device, activate its compiled step and find its loss.

        Args:
            xs: the inputs.
            targets: the targets; None without a loss.
            mask: weights of the steps.
            carry: the sequence continues the stream.
            evaluates: it is for evaluation mode.
            fills: its batch may be filled up.
        """
        self._watch.look()
        return self._read(xs, targets, mask, carry, evaluates, fills)

    def stage(self, xs: tuple, targets: Any, mask: Any, carry: bool) -> None:
        """Read the sequence of the next update while the device computes another of its shape."""
        store = self._store
        core, is_single = store.core, store.placement.is_single
        if not is_single or self._host.is_needed or self._options.any_length:
            return
        try:
            data, loss = self._read(xs, targets, mask, carry)
        except Exception:  # the update itself will say what is wrong
            return
        data = replace(data, args=jax.device_put(data.args, store.placement.device))
        self._staged = StagedSequence((*xs, targets, mask), carry, core, data, loss)

    def staged_or_read(
        self, xs: tuple, targets: Any, mask: Any, carry: bool
    ) -> tuple[SequenceData, Any]:
        """Return what `stage` has read of the same objects, or read the sequence now."""
        staged, self._staged = self._staged, None
        if staged is None or staged.core is not self._store.active or staged.carry != carry:
            return self.sequence(xs, targets, mask, carry)
        given = (*xs, targets, mask)
        if len(given) != len(staged.given) or any(
            a is not b for a, b in zip(given, staged.given, strict=True)
        ):
            return self.sequence(xs, targets, mask, carry)
        self._watch.look()
        return staged.data, staged.loss

    def require_gradient(self, unreached: frozenset[str]) -> None:
        """Raise if the loss's gradient cannot reach any parameter, whatever the data."""
        if unreached == self._store.compiled.parameter_names:
            raise InputError(
                "No gradient can reach any parameter of this model, so training would change "
                "nothing: every path from the parameters to what the loss reads of the outputs is "
                "detached, rounded, or a step function without a surrogate gradient. See "
                "`learner.graph.report()`."
            )

    def _read(
        self,
        xs: tuple,
        targets: Any,
        mask: Any,
        carry: bool,
        evaluates: bool = False,
        fills: bool = True,
    ) -> tuple[SequenceData, Any]:
        """Do the work of `sequence`, without reading the guard's alarm."""
        store = self._store
        place = store.placement
        self._torch_watch.check(learns=not evaluates)
        read = lambda: self._reader.sequence(xs, targets, mask, self._per_sequence)
        data = place.together("sequence", read, lambda d: [*d.args, *jax.tree.leaves(d.targets)])
        data = self._with_keep(data, data.mask, np.shape(data.args[0])[:2])
        filled = self._filled(data, evaluates) if fills and not carry else None
        if filled is None:
            inputs = place.join(data.args, 1)
            compiled = store.prepare([a[0] for a in inputs], carry).compiled
            data = replace(data, target=place.stand_in(data.target))
            loss, data = self._weigh(lambda: self._weighting.of_sequence(compiled, data), mask)
        else:
            loss, data = filled
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
        """Pad a sequence's batch and find its loss; None if the batch must stay as it is."""
        store = self._store
        filled = self._filling.fill(data, not evaluates) if store.placement.is_single else None
        if filled is None:
            return None
        compiled = store.prepare([a[0] for a in filled.args], False).compiled
        step = store.evaluation().compiled if evaluates else compiled
        if not step.serves_any_batch:
            return None
        try:
            return self._weighting.of_sequence(compiled, filled)
        except InputError:  # the short batch raises the same error, or the loss mixes the batch
            return None

    def _with_keep(self, data: Any, mask: Any, shape: tuple[int, ...]) -> Any:
        """Add the input that says which sequences advance, if sequences may stand still."""
        if not self._options.freeze:
            return data
        keep = np.ones(shape) if mask is None else np.asarray(mask) != 0
        keep = keep[:, None] if keep.ndim < len(shape) else keep
        keep = np.broadcast_to(keep, shape).astype(self._store.float_dtype or np.float32)
        return replace(data, args=[*data.args, np.ascontiguousarray(keep)])

    def _weigh(self, find: Callable[[], tuple[Any, Any]], mask: Any) -> tuple[Any, Any]:
        """Find the loss and its data; raise the same error in every process."""
        place = self._store.placement

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
