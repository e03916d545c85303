"""Holds a learner's state and its compiled steps, and moves arrays in and out of States."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError, NonFiniteError, StateError
from etrace_bridge.learning.compiled_step import CompiledStep, compile_or_explain
from etrace_bridge.learning.evaluation import EvaluationStep
from etrace_bridge.learning.guard import new_alarm
from etrace_bridge.learning.inputs import check_float_dtypes, show_signature, signature
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.optimizers import Updater
from etrace_bridge.learning.placement import Placement, private_copy
from etrace_bridge.learning.processes import raise_if_lost, readable
from etrace_bridge.learning.state import LearnerState
from etrace_bridge.lowering import jit
from etrace_bridge.rules import Carry, Rule


@dataclass(frozen=True)
class Snapshot:
    """What a `Store` holds at one moment."""

    active: OnlineCore | None
    stream: OnlineCore | None
    leaves: list[Any]
    tree: Any
    parked: Carry | None
    steps: int
    updates: int


@dataclass(frozen=True)
class Loan:
    """The arrays that were put into the model's States, by kind.

    They are weights, hidden states and other arrays of a compiled step.
    """

    compiled: CompiledStep
    arrays: tuple[list[Any], list[Any], list[Any]]


class Store:
    """Holds the `LearnerState` as one flat list of arrays.

    brainstate States are written only on request (`lend`), so that a step is one jitted call on
    donated arrays. There is a compiled step for every shape of input; one of them may be in the
    middle of a stream, whose states and trace are preserved while sequences of another shape run.

    Attributes:
        net: the model.
        rule: the learning rule.
        updater: turns gradients into new weights; None if torch does that.
        placement: the devices of the arrays.
        active: the compiled step in use, with its rule; None before the first input.
        stream: the step of the current stream, whose states and trace must be preserved.
        lock: held by the thread that reads or changes the arrays; calls from several threads
            wait for each other.
        steps: time steps seen.
        updates: updates made.
        resets: how often states and trace were reset, for some or all batch elements.
        tree: the structure of the state; the same object while it does not change.
    """

    def __init__(
        self,
        net: brainstate.nn.Module,
        rule: Rule,
        updater: Updater | None,
        placement: Placement,
        freezes: bool = False,
    ) -> None:
        self.net, self.rule, self.updater = net, rule, updater
        self.placement, self._freezes = placement, freezes
        self.lock = threading.RLock()
        self.steps = self.updates = self.resets = 0
        self.active: OnlineCore | None = None
        self.stream: OnlineCore | None = None
        self.tree: Any = None
        self._cores: dict[Any, OnlineCore] = {}
        self._starts: dict[Any, tuple[list[Any], list[Any]]] = {}
        self._evaluations: dict[Any, EvaluationStep] = {}
        self._leaves: list[Any] = []
        self._parked: Carry | None = None  # of the stream, while another step is active
        self._loan: Loan | None = None

    # -- the state --------------------------------------------------------------------------------

    @property
    def state(self) -> LearnerState:
        """All arrays, named."""
        return jax.tree.unflatten(self.tree, self._leaves)

    @state.setter
    def state(self, state: LearnerState) -> None:
        self._leaves, tree = jax.tree.flatten(state)
        if self.tree is None or tree != self.tree:
            self.tree = tree

    def advance(self, call: Callable, *args: Any) -> list[Any]:
        """Run a compiled program that takes and returns the flat state; return its other results."""
        self._leaves, *rest = call(self._leaves, *args)
        return rest

    def try_out(self, call: Callable, *args: Any) -> tuple[list[Any], list[Any]]:
        """Run a program without storing the new state.

        Returns the new state, flat, for `keep`, and the other results.
        """
        leaves, *rest = call(self._leaves, *args)
        return leaves, rest

    def keep(self, leaves: list[Any]) -> None:
        """Store a flat state from `try_out`."""
        self._leaves = leaves

    def arrays(self) -> list[Any]:
        """Return every array, including those of a parked stream."""
        if self._parked is None:
            return list(self._leaves)
        parked = self._parked
        return [*self._leaves, *jax.tree.leaves([parked.hidden, parked.other, parked.trace])]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the lock in this context; restore the learner if it raises."""
        with self.lock:
            self.take_back()
            before = Snapshot(
                self.active,
                self.stream,
                self._leaves,
                self.tree,
                self._parked,
                self.steps,
                self.updates,
            )
            try:
                yield
            except Exception as error:
                if not (isinstance(error, NonFiniteError) and error.settled):
                    self.active, self.stream = before.active, before.stream
                    self._leaves, self.tree = before.leaves, before.tree
                    self._parked = before.parked
                    self.steps, self.updates = before.steps, before.updates
                raise_if_lost(error)
                raise

    @property
    def started(self) -> bool:
        """Whether an input was seen."""
        return self.active is not None

    @property
    def core(self) -> OnlineCore:
        """`active`; raises before the first input."""
        if self.active is None:
            raise StateError(
                "The learner has seen no input yet, so there is no graph. Call `step` or "
                "`gradients` first."
            )
        return self.active

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step in use, without its rule; raises before the first input."""
        return self.core.compiled

    @cached_property
    def float_dtype(self) -> Any:
        """The dtype of the model's parameters in the steps; None if they differ."""
        states = self.net.states(brainstate.ParamState).values()
        # as JAX computes: in 32-bit mode NumPy's float64 is float32
        dtypes = {jnp.result_type(x) for s in states for x in jax.tree.leaves(s.value)}
        return dtypes.pop() if len(dtypes) == 1 else None

    # -- compiled steps ---------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], continues: bool) -> OnlineCore:
        """Make the step for inputs of this shape the active one; compile it the first time.

        Args:
            args: one time step of each input, with `shape` and `dtype`.
            continues: the states of the step before are needed, so the batch must not change.
        """
        self.take_back()
        key = signature(args)
        if self.active is None or self.active.compiled.signature != key:
            if self.float_dtype is not None:
                check_float_dtypes(args, self.float_dtype)
            if continues and self.stream is not None:
                raise InputError(
                    "The states are those of inputs "
                    f"{show_signature(self.stream.compiled.signature)}; this input is "
                    f"{show_signature(key)}. A stream cannot continue with another batch "
                    "size or dtype. Call `reset()` first to start with new states, or pass inputs "
                    "like those."
                )
            if key not in self._cores:
                self._write_start()
                self._cores[key] = OnlineCore(
                    compile_or_explain(self.net, args, self.placement.platform, self._freezes),
                    self.rule,
                )
            self._activate(self._cores[key])
        if continues:
            self.stream = self.core
            self.need_trace()
        return self.core

    def _write_start(self) -> None:
        """Put weights, running statistics and initial states into the States.

        A new step is compiled from these.
        """
        if not self.started:
            return
        compiled, state = self.compiled, self.state
        hidden, first = compiled.initial
        other = compiled.join_other(first, state.other)
        theta = self.placement.whole(state.theta)
        compiled.write(*jax.tree.map(private_copy, (theta, hidden, other)))

    def return_to_stream(self) -> None:
        """Return to the stream after sequences of another shape."""
        if self.stream is not None and self.stream is not self.active:
            self._activate(self.stream)

    def _activate(self, core: OnlineCore) -> None:
        before = self.active
        self.state = (
            self._first_state(core.compiled) if before is None else self._state_for(core, before)
        )
        self.active = core

    def _first_state(self, compiled: CompiledStep) -> LearnerState:
        """Return the state of a new learner, from the model's States."""
        place = self.placement
        compiled.fit_states()
        theta, hidden, other = jax.tree.map(private_copy, compiled.read())
        theta = place.put_weights(theta, compiled.program)
        opt = None if self.updater is None else self.updater.init(compiled.by_weight_name(theta))
        opt = place.put_weights(opt, compiled.program)
        alarm = place.put(jnp.asarray(new_alarm(0, 1 + len(theta) + len(hidden))))
        hidden = place.put_state(hidden, compiled.batch)
        other = place.put_batch(other, 0, compiled.batch)
        return LearnerState(theta, opt, hidden, other, None, alarm)

    def _state_for(self, core: OnlineCore, before: OnlineCore) -> LearnerState:
        """Return the state for another step than `before`.

        It is the stream's where it was left, or has initial states.
        """
        compiled, old = core.compiled, self.state
        if compiled.weight_names != before.compiled.weight_names:
            raise StateError(
                "The model uses other parameters for inputs of this shape. Make a learner for "
                "each shape."
            )
        if before is self.stream:
            self._parked = old.carry
        carry = Carry(*self.fresh_states(compiled), None)
        if core is self.stream and self._parked is not None:
            carry, self._parked = self._parked, None
        current = dict(zip(before.compiled.other_names, old.other, strict=True))
        of_model = [
            current.get(name, o) for name, o in zip(compiled.other_names, carry.other, strict=True)
        ]
        return old.with_carry(
            Carry(carry.hidden, compiled.join_other(carry.other, of_model), carry.trace)
        )

    def evaluation(self) -> EvaluationStep:
        """Return the active step in evaluation mode."""
        compiled = self.compiled
        if compiled.signature not in self._evaluations:
            quiet = compiled
            if not compiled.is_evaluation:
                self.lend()
                quiet = compiled.in_evaluation()
                self._loan = None
            self._evaluations[compiled.signature] = EvaluationStep(compiled, quiet)
        return self._evaluations[compiled.signature]

    # -- states and trace -------------------------------------------------------------------------

    def fresh_states(self, compiled: CompiledStep) -> tuple[list[Any], list[Any]]:
        """Return new arrays of a step's initial hidden and other states."""
        hidden, other = jax.tree.map(private_copy, compiled.initial)
        return self.placement.put_state(hidden, compiled.batch), self.placement.put_batch(
            other, 0, compiled.batch
        )

    def start_states(self) -> tuple[list[Any], list[Any]]:
        """Return the active step's initial hidden and other states, which must not be donated."""
        compiled = self.compiled
        if compiled.signature not in self._starts:
            self._starts[compiled.signature] = self.fresh_states(compiled)
        return self._starts[compiled.signature]

    def need_trace(self) -> None:
        """Make a trace of zeros if there is none."""
        state, core = self.state, self.core
        if state.trace is None:
            programs = core.compiled.programs
            if "trace" not in programs:
                place, batch = self.placement, core.compiled.batch
                zeros = lambda: place.settle_state(core.zero_trace(), batch, core.unit_axes)
                programs["trace"] = jit(zeros, platform=place.platform)
            trace = programs["trace"]()
            self.state = state.replace(
                trace=self.placement.put_state(trace, core.compiled.batch, core.unit_axes)
            )

    def reset(self) -> None:
        """Set states and trace back to their initial values."""
        with self.transaction():
            if not self.started:
                return
            core, state = self.core, self.state
            start = self.fresh_states(core.compiled)
            self.resets += 1
            self.state = state.with_carry(
                Carry(start[0], core.compiled.join_other(start[1], state.other), None)
            )
            self.stream = self._parked = None

    def refresh_numbers(self) -> None:
        """Read what a torch scheduler changed in the optimizer's parameter groups."""
        updater = self.updater
        if (
            updater is None
            or updater.translated is None
            or updater.translated.signature() == updater.seen
        ):
            return
        state = self.state
        numbers = self.placement.put(updater.numbers(state.theta))
        self.state = state.replace(opt=state.opt._replace(numbers=numbers))

    # -- the model's States -----------------------------------------------------------------------

    @property
    def is_lent(self) -> bool:
        """Whether the model's States hold copies that a user may have changed."""
        return self._loan is not None

    def lend(self) -> None:
        """Put copies of weights and states into the brainstate States.

        `take_back` reads what the user has changed there.
        """
        with self.lock:
            if not self.started:
                return
            self.take_back()
            state, compiled = self.state, self.compiled
            hidden, other = jax.tree.map(readable, (state.hidden, state.other), compiled.initial)
            theta = self.placement.whole(state.theta)
            compiled.write(*jax.tree.map(private_copy, (theta, hidden, other)))
            self._loan = Loan(compiled, compiled.read())

    def take_back(self) -> None:
        """Read the values that were changed in the States since they were lent."""
        if self._loan is None:
            return
        loan, self._loan = self._loan, None
        if not self.started or loan.compiled is not self.compiled:
            return
        now, state = loan.compiled.read(), self.state
        place, batch = self.placement, loan.compiled.batch

        def newer(given: Any, current: Any, held: Any) -> Any:
            changed = current is not given and np.shape(current) == np.shape(held)
            return private_copy(current).astype(held.dtype) if changed else held

        theta, hidden, other = (
            [newer(*each) for each in zip(*lists, strict=True)]
            for lists in zip(
                loan.arrays, now, (state.theta, state.hidden, state.other), strict=True
            )
        )
        self.state = state.replace(
            theta=place.put_weights(theta, loan.compiled.program),
            hidden=place.put_state(hidden, batch),
            other=place.put_batch(other, 0, batch),
        )
