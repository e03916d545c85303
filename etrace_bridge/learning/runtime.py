"""The parts of a learner, joined: its store, programs, data and runners."""

from __future__ import annotations

from typing import Any

import brainstate
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.filling import Filling
from etrace_bridge.learning.host_update import HostUpdate
from etrace_bridge.learning.inputs import read_choice, read_inputs
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.losses import LossTable
from etrace_bridge.learning.optimizers import Updater, make_updater
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.preparation import Preparation
from etrace_bridge.learning.reader import DataReader
from etrace_bridge.learning.sequence_runner import SequenceRunner
from etrace_bridge.learning.step_runner import StepRunner
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.torch_update import TorchUpdate
from etrace_bridge.learning.torch_watch import TorchWatch
from etrace_bridge.learning.watch import Watch
from etrace_bridge.learning.weighting import Weighting
from etrace_bridge.rules import Carry, Rule


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
    """The parts of a learner, and how they are joined.

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
        sequences: runs sequences.
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
        host = HostUpdate(
            self.store, self.programs, self.parameters, self.torch_update, self.torch_watch
        )
        preparation = Preparation(
            self.store,
            self.reader,
            Weighting(self.losses, over_time, options, rule),
            self.filling,
            self.watch,
            self.torch_watch,
            host,
            options,
            per_sequence,
        )
        self.steps = StepRunner(
            self.store,
            self.programs,
            preparation,
            self.losses,
            self.watch,
            self.torch_watch,
            host,
            options,
            self.parameters,
            has_optimizer=optimizer is not None,
        )
        self.sequences = SequenceRunner(
            self.store,
            self.programs,
            preparation,
            self.watch,
            host,
            options,
            has_optimizer=optimizer is not None,
        )

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

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the last gradients before clipping; None if it is not tracked."""
        store = self.store
        if not self.options.track_norm or not store.started or not store.updates:
            return None
        return (
            self.torch_update.norm if self.torch_update is not None else float(store.state.opt.norm)
        )
