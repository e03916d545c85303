"""The learner's arrays, and how they get into and out of the model's States."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import BridgeError, InputError, NonFiniteError, StateError
from etrace_bridge._jit import jit
from etrace_bridge.learning.guard import new_alarm
from etrace_bridge.learning.inputs import as_array, check_float_dtypes, signature
from etrace_bridge.learning.optimizers import Updater
from etrace_bridge.learning.placement import Placement, private_copy
from etrace_bridge.learning.programs import Values
from etrace_bridge.learning.session import Session
from etrace_bridge.rules import Rule


def undo_on_error(method: Callable) -> Callable:
    """A method after whose errors the learner is where it was before the call: nothing was computed then, only prepared."""

    @wraps(method)
    def call(self: Store, *args: Any, **options: Any) -> Any:
        self._take_back()
        names = ("_active", "stream", "_leaves", "_tree", "_parked")
        before = {name: getattr(self, name) for name in names}
        try:
            return method(self, *args, **options)
        except NonFiniteError:  # raised after the program ran, with the last finite values in place
            raise
        except Exception:
            self._fast.clear()
            vars(self).update(before)
            raise

    return call


class Store:
    """Holds a model's weights, states, trace and optimizer state as one flat list of arrays.

    brainstate States are written only on request (`lend`), so that a step is one jitted call on donated arrays. There is a
    session for every shape of input; one of them may be in the middle of a stream, whose states and trace are kept while
    sequences of another shape run.

    Attributes:
        net: the model.
        rule: the learning rule.
        updater: gradients to new weights; None if torch does that.
        placement: where the arrays live.
        stream: the session whose states and trace hold something worth keeping.
    """

    def __init__(self, net: brainstate.nn.Module, rule: Rule, updater: Updater | None, placement: Placement) -> None:
        self.net, self.rule, self.updater, self.placement = net, rule, updater, placement
        self.stream: Session | None = None
        self._active: Session | None = None
        self._sessions: dict[Any, Session] = {}
        self._leaves: list[Any] = []
        self._tree: Any = None
        self._parked: tuple[Any, Any, Any] | None = None  # the stream's hidden states, other arrays and trace
        self._lent: tuple | None = None
        self._fast: dict[bool, tuple] = {}  # how steps like the last ones run; forgotten when the structure changes

    # -- values ------------------------------------------------------------------------------------------------

    @property
    def values(self) -> Values:
        """All arrays, named."""
        return jax.tree.unflatten(self._tree, self._leaves)

    @values.setter
    def values(self, values: Values) -> None:
        leaves, tree = jax.tree.flatten(values)
        if self._tree is None or tree != self._tree:
            self._fast.clear()
        self._leaves, self._tree = leaves, tree

    @property
    def session(self) -> Session:
        """The compiled model."""
        if self._active is None:
            raise StateError("The learner has seen no input yet, so there is no graph. Call `step` or `gradients` first.")
        return self._active

    @property
    def started(self) -> bool:
        """Whether an input was seen."""
        return self._active is not None

    @cached_property
    def float_dtype(self) -> Any:
        """The dtype of the model's parameters; None if they differ."""
        states = self.net.states(brainstate.ParamState).values()
        found = {x.dtype for s in states for x in jax.tree.leaves(s.value)}
        return found.pop() if len(found) == 1 else None

    # -- sessions ----------------------------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], continues: bool) -> Session:
        """Makes the session for inputs of this shape the active one; compiles it the first time.

        Args:
            args: one time step of each input, with `shape` and `dtype`.
            continues: the states of the step before are needed, so the batch must not change.
        """
        self._take_back()
        key = signature(args)
        if self._active is None or self._active.signature != key:
            if self.float_dtype is not None:
                check_float_dtypes(args, self.float_dtype)
            if continues and self.stream is not None:
                raise InputError(
                    f"The states are those of inputs {_show(self.stream.signature)}; this input is {_show(key)}. "
                    "They cannot go on with another batch. Call `reset()` first to start with new states, or use the "
                    "same batch size."
                )
            if key not in self._sessions:
                self.lend()  # the new session reads weights and running statistics from the States
                self._lent = None
                self._sessions[key] = self._compile(args)
            self._activate(self._sessions[key])
        session = self.session
        if continues:
            self.stream = session
            self._need_trace()
        return session

    def _compile(self, args: Sequence[Any]) -> Session:
        try:
            return Session(self.net, args)
        except Exception as error:
            hint = (
                f"This was for one time step of {_show(signature(args))}. `step` takes one time step, (batch, …); a sequence, "
                "(T, batch, …), goes to `gradients`, `update` or `predict`."
            )
            if isinstance(error, BridgeError):
                error.add_note(hint)
                raise
            raise InputError(f"The model cannot run on this input: {error}. {hint}") from error

    def return_to_stream(self) -> None:
        """Goes back to the stream after sequences of another shape."""
        if self.stream is not None and self.stream is not self._active:
            self._activate(self.stream)

    def _activate(self, session: Session) -> None:
        place, batch, before = self.placement, session.batch, self._active
        if before is None:
            session.fit_states()
            theta, hidden, other = jax.tree.map(private_copy, session.read())
            theta = place.put(theta)
            named = dict(zip(session.weight_names, theta, strict=True))
            opt = None if self.updater is None else place.put(self.updater.init(named))
            alarm = place.put(jnp.asarray(new_alarm(0, 1 + len(theta) + len(hidden))))
            hidden, other = place.put_batch((hidden, other), 0, batch)
            trace = None
        else:
            if session.weight_names != before.weight_names:
                raise StateError("The model uses other parameters for inputs of this shape. Make a learner for each shape.")
            old = self.values
            theta, opt, alarm = old.theta, old.opt, old.alarm
            if before is self.stream:
                self._parked = (old.hidden, old.other, old.trace)
            hidden, other, trace = *self.fresh_states(session), None
            if session is self.stream and self._parked is not None:
                (hidden, other, trace), self._parked = self._parked, None
            current = dict(zip(before.other_names, old.other, strict=True))
            named = zip(session.other_names, other, session.resets, strict=True)
            other = [o if resets else current.get(name, o) for name, o, resets in named]
        self._active = session
        self.values = Values(theta, opt, hidden, other, trace, alarm)

    def fresh_states(self, session: Session) -> tuple[list[Any], list[Any]]:
        """New arrays of a session's initial hidden and other states."""
        return self.placement.put_batch(jax.tree.map(private_copy, session.initial), 0, session.batch)

    def _need_trace(self) -> None:
        if self.values.trace is None:
            session = self.session
            if "trace" not in session.compiled:
                session.compiled["trace"] = jit(lambda: self.rule.init(session.program))
            self.values = self.values._replace(trace=self.placement.put(session.compiled["trace"]()))

    # -- states ------------------------------------------------------------------------------------------------

    def reset(self, mask: Any) -> None:
        """Initial states and a zero trace, for all or some batch elements."""
        if not self.started:
            return
        self._take_back()
        session, values = self.session, self.values
        hidden, other = self.fresh_states(session)
        if mask is None:
            other = [o if r else now for o, now, r in zip(other, values.other, session.resets, strict=True)]
            self.values = values._replace(hidden=hidden, other=other, trace=None)
            self.stream = self._parked = None
            return
        gone = jnp.asarray(as_array(mask)).astype(bool)
        if gone.shape != (session.batch,):
            raise InputError(f"`mask` has shape {gone.shape}; it must be ({session.batch},), one entry a batch element.")

        def put_back(old: Any, new: Any) -> Any:
            return jnp.where(gone.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        hidden = [put_back(h, start) for h, start in zip(values.hidden, hidden, strict=True)]
        other = [
            put_back(now, o) if r and now.ndim and now.shape[0] == session.batch else now
            for o, now, r in zip(other, values.other, session.resets, strict=True)
        ]
        trace = values.trace
        if trace is not None:
            trace = self.rule.reset(session.program, trace, 1 - gone.astype(values.theta[0].dtype))
        self.values = values._replace(hidden=hidden, other=other, trace=trace)

    def lend(self) -> None:
        """Puts copies of weights and states into the brainstate States; changes made there are noticed."""
        if not self.started:
            return
        self._take_back()
        values = self.values
        self.session.write(*jax.tree.map(private_copy, (values.theta, values.hidden, values.other)))
        self._lent = (self.session, self.session.read())

    def _take_back(self) -> None:
        """Takes values that were changed in the States since they were lent."""
        if self._lent is None:
            return
        (session, lent), self._lent = self._lent, None
        if session is not self._active:
            return
        now, values = session.read(), self.values

        def newer(given: Any, found: Any, own: Any) -> Any:
            changed = found is not given and np.shape(found) == np.shape(own)
            return self.placement.put(private_copy(found).astype(own.dtype)) if changed else own

        theta, hidden, other = (
            [newer(*each) for each in zip(*lists, strict=True)]
            for lists in zip(lent, now, (values.theta, values.hidden, values.other), strict=True)
        )
        self.values = values._replace(theta=theta, hidden=hidden, other=other)


def _show(sig: tuple) -> str:
    return ", ".join(f"{dtype}{shape}" for shape, dtype in sig)
