"""The learner's arrays, and how they get into and out of the model's States."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.guard import new_alarm
from etrace_bridge.inputs import as_array, check_float_dtypes, signature
from etrace_bridge.optimizers import Updater
from etrace_bridge.placement import Placement, private_copy
from etrace_bridge.programs import Values
from etrace_bridge.rules import Rule
from etrace_bridge.session import Session


class Store:
    """Holds a model's weights, states, trace and optimizer state as one flat list of arrays.

    brainstate States are written only on request (`lend`), so that a step is one jitted call on donated arrays.

    Attributes:
        net: the model.
        rule: the learning rule.
        updater: gradients to new weights; None if torch does that.
        placement: where the arrays live.
        at_start: hidden states and trace hold nothing worth keeping.
    """

    def __init__(self, net: brainstate.nn.Module, rule: Rule, updater: Updater | None, placement: Placement) -> None:
        self.net, self.rule, self.updater, self.placement = net, rule, updater, placement
        self.at_start = True
        self._active: Session | None = None
        self._sessions: dict[Any, Session] = {}
        self._leaves: list[Any] = []
        self._tree: Any = None
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
        """The dtype of the model's floating parameters; None if they differ."""
        found = {x.dtype for s in self.net.states(brainstate.ParamState).values() for x in jax.tree.leaves(s.value)}
        return found.pop() if len(found) == 1 else None

    def prepare(self, args: Sequence[Any], continues: bool) -> Session:
        """Compiles the model for inputs of this shape, or finds it compiled.

        Args:
            args: one time step of each input, with `shape` and `dtype`.
            continues: the states of the step before are needed, so the batch must not change.
        """
        self._take_back()
        key = signature(args)
        if self._active is not None and self._active.signature == key:
            return self._active
        if self.float_dtype is not None:
            check_float_dtypes(args, self.float_dtype)
        if self._active is not None and continues and not self.at_start:
            raise InputError(
                f"The states are those of inputs {_show(self._active.signature)}; this input is {_show(key)}. They cannot go on with "
                "another batch. Call `reset()` first to start with new states, or use the same batch size."
            )
        if key not in self._sessions:
            if self._active is not None:
                self.lend(copy=False)  # the new session reads weights and running statistics from the States
            self._sessions[key] = Session(self.net, args)
        self._activate(self._sessions[key])
        return self._sessions[key]

    def _activate(self, session: Session) -> None:
        before, old = self._active, self.values if self._active is not None else None
        place, batch = self.placement, session.batch
        if before is None or old is None:
            theta, hidden, other = jax.tree.map(private_copy, session.read())
            theta = place.put(theta)
            opt = place.put(self.updater.init(dict(zip(session.weight_names, theta, strict=True)))) if self.updater else None
            alarm = place.put(jnp.asarray(new_alarm(0, 1 + len(theta) + len(hidden))))
        else:
            theta, opt, alarm = old.theta, old.opt, old.alarm
            hidden, other = jax.tree.map(jnp.asarray, session.initial)
            known = dict(zip(before.other_names, old.other, strict=True))
            other = [
                known.get(n, o) if not r else o for n, o, r in zip(session.other_names, other, session.resets, strict=True)
            ]
            if session.weight_names != before.weight_names:
                raise StateError("The model uses other parameters for inputs of this shape. Make a learner for each shape.")
        self._active = session
        self.values = Values(theta, opt, place.put_batch(hidden, 0, batch), place.put_batch(other, 0, batch), None, alarm)
        self.at_start = True

    def need_trace(self) -> None:
        """Makes the rule's memory, if there is none yet."""
        if self.values.trace is None:
            session = self.session
            self.values = self.values._replace(trace=self.placement.put(jax.jit(lambda: self.rule.init(session.program))()))

    # -- states ------------------------------------------------------------------------------------------------

    def reset(self, mask: Any) -> None:
        """Initial states and a zero trace, for all or some batch elements."""
        if not self.started:
            return
        self._take_back()
        session, values = self.session, self.values
        start_hidden, start_other = jax.tree.map(private_copy, self._start_state(session))
        if mask is None:
            trace = jax.tree.map(jnp.zeros_like, values.trace)
            self.values = values._replace(hidden=start_hidden, other=start_other, trace=trace)
            self.at_start = True
            return
        gone = jnp.asarray(as_array(mask)).astype(bool)
        if gone.shape != (session.batch,):
            raise InputError(f"`mask` has shape {gone.shape}; it must be ({session.batch},), one entry a batch element.")
        put_back = lambda old, new: jnp.where(gone.reshape(-1, *(1,) * (old.ndim - 1)), new, old)  # noqa: E731
        hidden = [put_back(h, s) for h, s in zip(values.hidden, start_hidden, strict=True)]
        other = [
            put_back(o, s) if r and o.ndim and o.shape[0] == session.batch else o
            for o, s, r in zip(values.other, start_other, session.resets, strict=True)
        ]
        trace = values.trace
        if trace is not None:
            trace = self.rule.reset(session.program, trace, 1 - gone.astype(values.theta[0].dtype))
        self.values = values._replace(hidden=hidden, other=other, trace=trace)

    def lend(self, copy: bool = True) -> None:
        """Puts copies of weights and states into the brainstate States; changes made there are noticed."""
        if not self.started:
            return
        self._take_back()
        values = self.values
        give = private_copy if copy else (lambda x: x)
        self.session.write(*jax.tree.map(give, (values.theta, values.hidden, values.other)))
        self._lent = (self.session, self.session.read()) if copy else None

    def _take_back(self) -> None:
        """Takes values that were changed in the States since they were lent."""
        if self._lent is None:
            return
        session, lent = self._lent
        self._lent = None
        if session is not self._active:
            return
        now, values = session.read(), self.values
        parts = []
        for given, found, own in zip(lent, now, (values.theta, values.hidden, values.other), strict=True):
            parts.append([
                o if f is g or np.shape(f) != np.shape(o) else self.placement.put(private_copy(f))
                for g, f, o in zip(given, found, own, strict=True)
            ])  # fmt: skip
        self.values = values._replace(theta=parts[0], hidden=parts[1], other=parts[2])


def _show(sig: tuple) -> str:
    return ", ".join(f"{dtype}{shape}" for shape, dtype in sig)
