"""Runs single steps of a learner: with an update in the program, through torch, or metered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.learning.host_update import HostUpdate
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.losses import LossTable
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.preparation import Preparation, PreparedStep
from etrace_bridge.learning.quick_step import QuickSteps
from etrace_bridge.learning.slopes import MeterState, MeterWindow
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.torch_update import has_hooks
from etrace_bridge.learning.torch_watch import TorchWatch
from etrace_bridge.learning.watch import LOOK_EVERY, Watch


class StepRunner:
    """Runs single steps.

    Args:
        store: the learner's store.
        programs: its programs.
        preparation: prepares the step's data.
        losses: the learner's loss, for each kind of target.
        watch: reads the guard's alarm.
        torch_watch: notices changes of the torch model's parameters.
        host: updates that pass through torch, if there are any.
        options: the learner's options.
        parameters: the torch model's trained parameters by name; empty for other models.
        has_optimizer: whether a step with a target changes the weights.
    """

    def __init__(
        self,
        store: Store,
        programs: JittedPrograms,
        preparation: Preparation,
        losses: LossTable,
        watch: Watch,
        torch_watch: TorchWatch,
        host: HostUpdate,
        options: Options,
        parameters: Mapping[str, torch.Tensor],
        has_optimizer: bool,
    ) -> None:
        self._store, self._programs, self._preparation = store, programs, preparation
        self._losses, self._watch, self._torch_watch = losses, watch, torch_watch
        self._host, self._options, self._parameters = host, options, parameters
        self._quick = QuickSteps(store, LOOK_EVERY)
        self._warns = not has_optimizer

    def run(self, args: tuple, target: Any, mask: Any = None) -> tuple[Any, Any, Any]:
        """Run one online step with update.

        Returns:
            The loss, the output and what the rule discarded, on the device.
        """
        with self._store.lock:
            known = self._quick.find(args, target) if mask is None else None
            if known is not None and self._is_unchanged():
                return self._advance(*known)
            with self._store.transaction():
                return self._run_checked(args, target, mask)

    def _is_unchanged(self) -> bool:
        """Return whether all that a compiled step depends on is as it was."""
        return (
            self._torch_watch.holds()
            and self._losses.settings_hold
            and not has_hooks(self._parameters.values())
        )

    def run_metered(
        self, args: tuple, target: Any, mask: Any, window: MeterWindow
    ) -> tuple[Any, Any, MeterState]:
        """Run one online step with update; return the meter's state in place of what is discarded."""
        with self._store.transaction():
            if self._host.is_needed:
                raise NotSupportedError(
                    "`FidelityMeter.step` measures inside the compiled step, but parameter hooks "
                    "and torch optimizers without a translation update outside it. Use an "
                    "optimizer that is translated (SGD, Adam, AdamW, RMSprop, Adagrad, any of "
                    "optax), or the meter as a callback of `fit`."
                )
            step = self._preparation.step(args, target, mask)
            self._warn_without_optimizer(target, stacklevel=4)
            now = self._programs.meter_state(window)
            metered = self._programs.metered_step(step.loss)
            call = lambda leaves, *step: metered(leaves, *step, now, window.counts)
            return self._advance(call, step.arrays, step.target)

    def _run_checked(self, args: tuple, target: Any, mask: Any) -> tuple[Any, Any, Any]:
        step = self._preparation.step(args, target, mask)
        self._warn_without_optimizer(target, stacklevel=5)
        on_host = step.loss is not None and self._host.is_needed
        call = self._programs.step(step.loss, own_update=not on_host)
        if on_host:
            return self._run_on_host(call, step)
        settled = mask is None and not self._options.freeze and not self._options.check_inputs
        if self._store.placement.is_single and settled:
            self._quick.remember(args, step.data, step.loss, call)
        return self._advance(call, step.arrays, step.target)

    def _advance(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any, Any]:
        """Run the program; return the loss, the output, and what else the program gives."""
        store, recent = self._store, self._watch.recent
        store.refresh_numbers()
        loss, output, more = store.advance(call, arrays, target)
        store.steps += 1
        if target is not None:
            store.updates += 1
        recent.append((arrays, target))
        if len(recent) >= LOOK_EVERY:
            jax.block_until_ready(output)  # the inputs' buffers are about to be reused
            self._watch.look()
        return loss, output, more

    def _run_on_host(self, call: Callable, step: PreparedStep) -> tuple[Any, Any, None]:
        """Run a step whose update passes through torch."""
        store = self._store
        leaves, (loss, output, grads) = store.try_out(call, step.arrays, step.target)
        named = self._host.all_gradients(grads)
        self._watch.check_on_host(loss, named, store.steps)
        store.keep(leaves)
        self._host.apply(named, store.compiled.unreached_by(step.loss))
        store.steps += 1
        return loss, output, None

    def _warn_without_optimizer(self, target: Any, stacklevel: int) -> None:
        """Warn once; `stacklevel` is that of the code that called the public `step`."""
        if target is not None and self._warns:
            self._warns = False
            warnings.warn(
                "This learner has no optimizer: `step` gives losses and advances states and trace, "
                "but changes no weight. Pass `optimizer=` to train, or leave the target out.",
                stacklevel=stacklevel,
            )
