"""A learner's jitted programs: each is made once per compiled step and kind of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._errors import StateError
from etrace_bridge.learning.optimizers import Updater
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.programs import (
    ProgramSpec,
    make_finish,
    make_gradients,
    make_part,
    make_step,
    make_update,
)
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.slopes import (
    MeterState,
    MeterWindow,
    first_meter_state,
    make_metered_step,
    make_own_slope,
    make_stream_slope,
    next_window,
)
from etrace_bridge.learning.store import Store
from etrace_bridge.lowering import jit
from etrace_bridge.rules import Carry
from etrace_bridge.schedule.chunk_plan import ChunkPlan


class JittedPrograms:
    """The jitted programs of the store's active step.

    Programs that change the learner's state take and return it as a flat list of arrays, for
    `Store.advance`.

    Args:
        store: the learner's store.
        options: the learner's options.
    """

    def __init__(self, store: Store, options: Options) -> None:
        self._store, self._options = store, options

    def spec(self, loss: Any) -> ProgramSpec:
        """Return what the programs have in common."""
        options = self._options
        reduction = "sum" if isinstance(loss, SequenceLoss) else options.reduction
        return ProgramSpec(self._store.core, loss, self._store.updater, reduction, options.guard)

    def step(self, loss: Any, own_update: bool) -> Callable:
        """Return `(leaves, args, target) -> (leaves, loss, output, more)`, as in `make_step`.

        It donates `leaves` if the update is part of the program.
        """
        key = ("step", loss, own_update)
        make = lambda: self._settled(make_step(self.spec(loss), own_update), 0)
        return self._on_leaves(key, make, donate=own_update, one_step=True)

    def update(self, loss: Any, plan: ChunkPlan, carry: bool, by_chunk: bool) -> Callable:
        """Return `(leaves, start, args, targets, mask) -> (leaves, losses, outputs, weights)`.

        It donates `leaves`.
        """
        key = ("update", loss, plan, carry, by_chunk)
        make = lambda: self._settled(make_update(self.spec(loss), plan, carry, by_chunk), 1)
        return self._on_leaves(key, make, donate=True)

    def gradients(self, loss: Any, plan: ChunkPlan, carry: bool) -> Callable:
        """Return the program of `make_gradients`."""
        return self._jit(
            ("gradients", loss, plan, carry), lambda: self._gradients(loss, plan, carry)
        )

    def _gradients(self, loss: Any, plan: ChunkPlan, carry: bool) -> Callable:
        run, place = make_gradients(self.spec(loss), plan, carry), self._store.placement
        batch, axes = self._store.compiled.batch, self._store.core.unit_axes

        def settled(*args: Any) -> tuple:
            grads, losses, outputs, weights, discarded, (hidden, other, trace), bad = run(*args)
            grads, losses, weights, discarded, bad = place.settle(
                (grads, losses, weights, discarded, bad), None, batch
            )
            hidden = place.settle_state(hidden, batch)
            trace = place.settle_state(trace, batch, axes)
            after = hidden, place.settle(other, 0, batch), trace
            return grads, losses, place.settle(outputs, 1, batch), weights, discarded, after, bad

        return settled

    def part(self, loss: Any) -> Callable:
        """Return the program of `make_part`; it donates `kept`."""
        make = lambda: make_part(self.spec(loss))
        return self._jit(("part", loss), make, donate_argnums=(3,))

    def first_part(self) -> Callable:
        """Return `theta -> kept` before the first chunk, see `make_part`."""

        def zeros(theta: Sequence[Any]) -> tuple:
            grads = [jnp.zeros_like(w) for w in theta]
            return self._store.core.zero_trace(), grads, jnp.zeros((), theta[0].dtype)

        return self._jit("first part", lambda: zeros)

    def finish(self, loss: Any) -> Callable:
        """Return `(leaves, gradients, sum of the losses) -> (leaves,)`; it donates `leaves`."""
        return self._on_leaves(("finish", loss), lambda: make_finish(self.spec(loss)), donate=True)

    def own_slope(self, loss: Any, plan: ChunkPlan) -> Callable:
        """Return the program of `make_own_slope`."""
        return self._jit(("own slope", loss, plan), lambda: make_own_slope(self.spec(loss), plan))

    def stream_slope(self, loss: Any, plan: ChunkPlan) -> Callable:
        """Return the program of `make_stream_slope`."""
        return self._jit(
            ("stream slope", loss, plan), lambda: make_stream_slope(self.spec(loss), plan)
        )

    def metered_step(self, loss: Any) -> Callable:
        """Return `(leaves, args, target, meter, counts) -> (leaves, loss, output, meter)`.

        It donates `leaves`.
        """
        return self._on_leaves(
            ("metered step", loss),
            lambda: make_metered_step(self.spec(loss)),
            donate=True,
            one_step=True,
        )

    def meter_state(self, window: MeterWindow) -> MeterState:
        """Return the meter's state before the next steps."""
        program = self._store.core.program
        if window.state is None:
            return self._jit("first meter", lambda: partial(first_meter_state, program))()
        if window.begins:
            return self._jit("next meter", lambda: partial(next_window, program))(window.state)
        return window.state

    def predict(self) -> Callable:
        """Return `(theta, hidden, other, args) -> outputs` of a sequence in evaluation mode."""
        place, batch = self._store.placement, self._store.compiled.batch

        def make() -> Callable:
            run = self._store.evaluation().run
            return lambda *args: place.settle(run(*args)[0], 1, batch)

        return self._jit("predict", make)

    def predict_part(self) -> Callable:
        """Return `(theta, hidden, other, args) -> (outputs, hidden, other)` of a chunk in
        evaluation mode, on one device.
        """
        return self._jit("predict part", lambda: self._store.evaluation().run)

    def losses(self, loss: Any) -> Callable:
        """Return `(outputs, targets) -> losses` of a sequence."""

        def make() -> Callable:
            if isinstance(loss, SequenceLoss):
                return lambda y, target: loss.in_place(
                    loss.value(y, target), jax.tree.leaves(y)[0].shape[0]
                )
            return jax.vmap(loss)

        return self._jit(("losses", loss), lambda: self._everywhere(make()))

    def _everywhere(self, function: Callable) -> Callable:
        """Return a program whose results go to every device."""
        return lambda *args: self._store.placement.settle(function(*args), None, None)

    def reset(self) -> Callable:
        """Return `(hidden, other, trace, start, gone) -> (hidden, other, trace)`, which resets some
        batch elements.
        """
        core, place, batch = self._store.core, self._store.placement, self._store.compiled.batch

        def run(hidden: Any, other: Any, trace: Any, start: Any, gone: Any) -> tuple:
            new = core.reset_elements(Carry(hidden, other, trace), start, gone)
            hidden = place.settle_state(new.hidden, batch)
            trace = place.settle_state(new.trace, batch, core.unit_axes)
            return hidden, place.settle(new.other, 0, batch), trace

        return self._jit(("reset", self._store.tree), lambda: run)

    def apply(self, updater: Updater, unreached: frozenset[str]) -> Callable:
        """Return `(gradients, optimizer state, weights) -> (weights, optimizer state)`, by name."""
        return self._jit(("apply", unreached), lambda: partial(updater.update, unreached=unreached))

    def _settled(self, function: Callable, axis: int) -> Callable:
        """Return a program whose results are placed where the next program or the user needs them.

        `axis` is the batch axis of its outputs.
        """
        place, batch = self._store.placement, self._store.compiled.batch
        program, axes = self._store.compiled.program, self._store.core.unit_axes

        def run(*args: Any) -> tuple:
            state, losses, outputs, rest = function(*args)
            alarm, losses, rest = place.settle((state.alarm, losses, rest), None, batch)
            theta, opt = place.settle_weights((state.theta, state.opt), program)
            hidden = place.settle_state(state.hidden, batch)
            trace = place.settle_state(state.trace, batch, axes)
            carry = Carry(hidden, place.settle(state.other, 0, batch), trace)
            state = state.with_carry(carry).replace(theta=theta, opt=opt, alarm=alarm)
            return state, losses, place.settle(outputs, axis, batch), rest

        return run

    def _jit(self, key: Any, make: Callable[[], Callable], **options: Any) -> Callable:
        programs = self._store.compiled.programs
        if key not in programs:
            programs[key] = jit(make(), platform=self._store.placement.platform, **options)
        return programs[key]

    def _on_leaves(
        self, key: Any, make: Callable[[], Callable], donate: bool, one_step: bool = False
    ) -> Callable:
        """Return a program on the flat state, given one on the state."""
        tree = self._store.tree

        def on_leaves() -> Callable:
            function = make()

            def run(leaves: list[Any], *rest: Any) -> tuple:
                new, *out = function(jax.tree.unflatten(tree, leaves), *rest)
                flat, after = jax.tree.flatten(new)
                if after != tree:
                    raise StateError(
                        f"A step changed the structure of the learner's state from {tree} to "
                        f"{after}."
                    )
                return flat, *out

            return run

        return self._jit(
            (key, tree), on_leaves, one_step=one_step, donate_argnums=(0,) if donate else ()
        )
