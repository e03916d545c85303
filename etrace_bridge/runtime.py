"""The learner's working part: arrays on the device, and the compiled programs that move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError, NonFiniteError, StateError
from etrace_bridge.engine.plan import ChunkPlan, choose_chunk, divide
from etrace_bridge.engine.sequence import step_weights
from etrace_bridge.frontend import BridgedModule, to_torch
from etrace_bridge.inputs import FastReader, as_array, check_finite, check_float_dtypes, sequence_length, signature
from etrace_bridge.losses import as_jax_loss
from etrace_bridge.optimizers import Updater, make_updater
from etrace_bridge.placement import Placement, private_copy
from etrace_bridge.programs import Recipe, Values, make_gradients, make_prediction, make_step, make_update
from etrace_bridge.rules import BPTT, Rule
from etrace_bridge.session import Session, evaluation_mode
from etrace_bridge.torch_update import TorchUpdate, has_hooks, run_hooks

LOOK_EVERY = 256  # steps after which the guard's alarm is read, if nothing else asks for it


@dataclass(frozen=True)
class Options:
    """A learner's options besides model, rule, loss and optimizer; `OnlineLearner` describes them."""

    chunk: int | str = "auto"
    reduction: str = "mean"
    budget: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    schedule: Callable[[Any], Any] | None = None
    guard: bool = True
    check_inputs: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise InputError(f"`reduction` is {self.reduction!r}; it must be 'mean' or 'sum'.")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise InputError(f"`accumulate` is {self.accumulate!r}; it must be a positive number of gradients.")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"`{name}` is {value!r}; it must be positive, or None for no clipping.")


class Runtime:
    """Holds a model's weights, states, trace and optimizer state as one flat list of arrays.

    brainstate States are written only on request (`lend`): the hot path is one jitted call on donated arrays.
    """

    def __init__(
        self, net: brainstate.nn.Module, rule: Rule, loss: Any, optimizer: Any, options: Options, placement: Placement
    ) -> None:
        self.net, self.rule, self.given_loss, self.optimizer = net, rule, loss, optimizer
        self.options, self.placement = options, placement
        self.parameters: dict[str, torch.Tensor] = {}
        if isinstance(net, BridgedModule):
            self.parameters = {n: p for n, p in net.model.named_parameters() if p.requires_grad}
        self.updater: Updater | None = make_updater(
            optimizer, self.parameters if isinstance(net, BridgedModule) else None, options.clip_norm, options.clip_value,
            options.accumulate, options.schedule,
        )  # fmt: skip
        self.torch_update = None
        if self.updater is None:
            if options.schedule is not None:
                raise InputError("`schedule` needs an optax optimizer or one of torch's that are translated; use a torch scheduler.")
            self.torch_update = TorchUpdate(
                optimizer, self.parameters, options.clip_norm, options.clip_value, options.accumulate
            )
        self.steps = 0  # time steps seen
        self.updates = 0
        self._active: Session | None = None
        self._sessions: dict[Any, Session] = {}
        self._losses: dict[Any, Callable] = {}
        self._leaves: list[Any] = []
        self._tree: Any = None
        self.at_start = True  # hidden states and trace hold nothing worth keeping
        self._lent: tuple | None = None
        self._fast: dict[bool, tuple] = {}

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
            alarm = place.put(jnp.asarray(np.array([0, -1], np.int32)))
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

    # -- programs ----------------------------------------------------------------------------------------------

    def recipe(self, loss: Callable | None) -> Recipe:
        """What the current session's programs have in common."""
        session = self.session
        return Recipe(
            session.program, self.rule, loss, self.updater, tuple(session.weight_names), tuple(session.resets),
            self.options.reduction, self.options.guard,
        )  # fmt: skip

    def loss_for(self, target: Any) -> Callable:
        """The loss for targets of this kind."""
        if self.given_loss is None:
            raise InputError("This learner has no loss. Give one: `OnlineLearner(model, loss=torch.nn.functional.mse_loss)`.")
        key = (self.session.signature, str(jax.tree.map(lambda t: (np.shape(t), str(t.dtype)), target)))
        if key not in self._losses:
            program = self.session.program
            output = program.output_tree([jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.out_vars])
            self._losses[key] = as_jax_loss(self.given_loss, output, target, isinstance(self.net, BridgedModule))
        return self._losses[key]

    def _compiled(self, key: Any, make: Callable[[], Callable], donate: bool) -> Callable:
        """The jitted program of the current session, on flat values."""
        compiled = self.session.compiled
        key = (key, self._tree)
        if key not in compiled:
            function, tree = make(), self._tree

            def on_leaves(leaves: list[Any], *rest: Any):
                new, *out = function(jax.tree.unflatten(tree, leaves), *rest)
                flat, after = jax.tree.flatten(new)
                if after != tree:
                    raise StateError(f"A step changed the structure of the learner's values from {tree} to {after}.")
                return flat, *out

            compiled[key] = jax.jit(on_leaves, donate_argnums=(0,) if donate else ())
        return compiled[key]

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, args: tuple, target: Any) -> tuple[Any, Any]:
        """One online step with update; returns the loss and the output, on the device."""
        fast = self._fast.get(target is None)
        if fast is not None and self._lent is None and len(args) == len(fast[0]):
            arrays = [read(a) for read, a in zip(fast[0], args, strict=True)]
            wanted = None if target is None else fast[1](target)
            if not any(a is None for a in arrays) and (wanted is not None or target is None):
                if not has_hooks(self.parameters.values()):
                    return self._run_step(fast[2], arrays, wanted)
        return self._checked_step(args, target)

    def _run_step(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any]:
        if self.updater is not None and self.updater.translated is not None:
            self._refresh_numbers()
        self._leaves, loss, output, _ = call(self._leaves, arrays, target)
        self.at_start = False
        self.steps += 1
        if target is not None:
            self.updates += 1
        if self.steps % LOOK_EVERY == 0:
            self.look()
        return loss, output

    def _checked_step(self, args: tuple, target: Any) -> tuple[Any, Any]:
        arrays = [as_array(a, self.float_dtype) for a in args]
        self._check_data(arrays, target)
        session = self.prepare(arrays, continues=True)
        self.need_trace()
        loss = None if target is None else self.loss_for(target)
        wanted = jax.tree.map(as_array, target)
        host = target is not None and self._host_update
        make = lambda: make_step(self.recipe(loss), target is not None, not host)  # noqa: E731
        call = self._compiled(("step", loss, host), make, donate=not host)
        arrays, wanted = self.placement.put_batch((arrays, wanted), 0, session.batch)
        if host:
            return self._host_step(call, arrays, wanted)
        plain = self.placement.is_default and not self.options.check_inputs and not isinstance(target, (tuple, list, dict))
        if plain:
            readers = [FastReader(a, x) for a, x in zip(args, arrays, strict=True)]
            self._fast[target is None] = (readers, None if target is None else FastReader(target, wanted), call)
        return self._run_step(call, arrays, wanted)

    # -- sequences ---------------------------------------------------------------------------------------------

    def _sequence(self, xs: tuple, targets: Any, mask: Any, carry: bool) -> tuple[list[Any], Any, Any, Session, int]:
        """Checked, time-major arrays; the session for them; the number of steps."""
        args = [self._time_first(as_array(x, self.float_dtype)) for x in xs]
        given, targets = targets, jax.tree.map(lambda t: self._time_first(as_array(t)), targets)
        mask = None if mask is None else as_array(mask, self.float_dtype)
        length = sequence_length(args, targets, mask, self.batch_first)
        self._check_data(args, targets)
        if mask is not None and self.options.reduction == "mean" and not np.sum(np.asarray(mask)) > 0:
            raise InputError("`mask` has no step with a positive weight, so there is no mean loss.")
        session = self.prepare([a[0] for a in args], carry)
        if given is not None:
            self.loss_for(jax.tree.map(lambda t: self._one_step(t), given))
        place = self.placement
        return *place.put_batch((args, targets), 1, session.batch), place.put(mask), session, length

    def plan(self, length: int) -> ChunkPlan:
        """The division of a sequence."""
        chunk = self.options.chunk
        if isinstance(self.rule, BPTT) and chunk == "auto":
            return divide(length, length)
        memory = jax.eval_shape(lambda: self.rule.init(self.session.program))
        return divide(length, choose_chunk(self.session.program, memory, length, chunk, self.options.budget))

    def _start_state(self, session: Session) -> tuple[list[Any], list[Any]]:
        """Initial hidden states, and the other arrays: initial or, if they belong to the model, current."""
        hidden, other = session.initial
        now = self.values.other
        other = [o if r else n for o, n, r in zip(other, now, session.resets, strict=True)]
        return self.placement.put_batch((hidden, other), 0, session.batch)

    def gradients(self, xs: tuple, targets: Any, mask: Any, carry: bool):
        """Gradients by name, losses, outputs and the steps' weights."""
        if targets is None:
            raise InputError("`targets` is missing: a gradient needs a loss at one step at least.")
        args, targets, mask, session, length = self._sequence(xs, targets, mask, carry)
        loss = self.loss_for(jax.tree.map(lambda t: t[0], targets))
        plan = self.plan(length)
        key = ("gradients", loss, plan, carry)
        if key not in session.compiled:
            session.compiled[key] = jax.jit(make_gradients(self.recipe(loss), plan, carry))
        if carry:
            self.need_trace()
        values = self.values
        state = (values.hidden, values.other, values.trace) if carry else (*self._start_state(session), None)
        grads, losses, outputs, weights, (hidden, other, trace) = session.compiled[key](values.theta, state, args, targets, mask)
        if carry:
            self.values = values._replace(hidden=hidden, other=other, trace=trace)
            self.at_start = False
        else:
            kept = [b if r else a for b, a, r in zip(values.other, other, session.resets, strict=True)]
            self.values = values._replace(other=kept)
        self.steps += length
        return self.all_gradients(grads), losses, outputs, weights

    def update(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        """Gradients and updates; losses, outputs and the steps' weights."""
        if every not in ("sequence", "chunk", "step"):
            raise InputError(f"`every` is {every!r}; it must be 'sequence', 'chunk' or 'step'.")
        if targets is None:
            raise InputError("`targets` is missing: an update needs a loss at one step at least.")
        if self._host_update:
            return self._host_sequence(xs, targets, mask, carry, every)
        args, targets, mask, session, length = self._sequence(xs, targets, mask, carry)
        loss = self.loss_for(jax.tree.map(lambda t: t[0], targets))
        if carry:
            self.need_trace()
        plan = divide(length, 1) if every == "step" else self.plan(length)
        make = lambda: make_update(self.recipe(loss), plan, carry, every != "sequence")  # noqa: E731
        call = self._compiled(("update", loss, plan, carry, every), make, donate=True)
        self._refresh_numbers()
        start = None if carry else jax.tree.map(private_copy, self._start_state(session))
        self._leaves, losses, outputs, weights = call(self._leaves, start, args, targets, mask)
        self.at_start = self.at_start and not carry
        self.steps += length
        self.updates += 1 if every == "sequence" else plan.full + (plan.rest > 0)
        self.look()
        return losses, outputs, weights

    def predict(self, xs: tuple, carry: bool) -> Any:
        """Outputs of a sequence in evaluation mode; the learner stays as it is."""
        args, _, _, session, _ = self._sequence(xs, None, None, carry)
        key = "predict"
        if key not in session.compiled:
            self.lend(copy=False)
            with evaluation_mode(self.net):
                alike = Session(self.net, [a[0] for a in args])
            session.compiled[key] = alike, jax.jit(make_prediction(alike.program))
        alike, call = session.compiled[key]
        values = self.values
        hidden, other = (values.hidden, values.other) if carry else self._start_state(session)
        known = dict(zip(session.hidden_names, hidden, strict=True)) | dict(zip(session.other_names, other, strict=True))
        known |= dict(zip(session.weight_names, values.theta, strict=True))
        pick = lambda names, initial: [known.get(n, o) for n, o in zip(names, initial, strict=True)]  # noqa: E731
        theta = [known[n] for n in alike.weight_names]
        return call(theta, pick(alike.hidden_names, alike.initial[0]), pick(alike.other_names, alike.initial[1]), args)

    def evaluate(self, xs: tuple, targets: Any, mask: Any):
        """Losses and the steps' weights of a sequence in evaluation mode."""
        if targets is None:
            raise InputError("`targets` is missing: an evaluation needs a loss.")
        outputs = self.predict(xs, False)
        _, targets, mask, session, length = self._sequence(xs, targets, mask, False)
        loss = self.loss_for(jax.tree.map(lambda t: t[0], targets))
        key = ("losses", loss)
        if key not in session.compiled:
            session.compiled[key] = jax.jit(jax.vmap(loss))
        return session.compiled[key](outputs, targets), step_weights(length, mask, self.options.reduction)

    # -- updates that pass through torch -----------------------------------------------------------------------

    @property
    def _host_update(self) -> bool:
        return self.torch_update is not None or has_hooks(self.parameters.values())

    def _host_step(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any]:
        leaves, loss, output, grads = call(self._leaves, arrays, target)
        self._raise_if_bad(loss, grads)
        self._leaves, self.at_start = leaves, False
        self._apply_on_host(self.all_gradients(grads))
        self.steps += 1
        return loss, output

    def _host_sequence(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        if every != "sequence":
            raise InputError(
                f"`every={every!r}` needs an update inside the compiled program; parameter hooks and torch optimizers without a "
                "translation run outside it. Use `every='sequence'`, or call `step` for every time step."
            )
        before = self.values if self.started else None
        grads, losses, outputs, weights = self.gradients(xs, targets, mask, carry)
        try:
            self._raise_if_bad(losses, list(grads.values()))
        except NonFiniteError:
            if before is not None:
                self.values = before
            raise
        self._apply_on_host(grads)
        return losses, outputs, weights

    def _apply_on_host(self, grads: Mapping[str, Any]) -> None:
        values, names = self.values, self.session.weight_names
        theta = dict(zip(names, values.theta, strict=True))
        finished = run_hooks({n: to_torch(g) for n, g in grads.items()}, self.parameters)
        if self.torch_update is not None:
            new, opt = self.torch_update.apply(finished, theta), values.opt
        else:
            key = "apply"
            if key not in self.session.compiled:
                self.session.compiled[key] = jax.jit(self.updater.update)  # pyright: ignore[reportOptionalMemberAccess]
            self._refresh_numbers()
            wanted = {n: as_array(finished[n]) for n in names}
            new, opt = self.session.compiled[key](wanted, self.values.opt, theta)
        theta = self.placement.put([jnp.asarray(new[n]) for n in names])
        self.values = values._replace(theta=theta, opt=opt)
        self.updates += 1

    def all_gradients(self, grads: Sequence[Any]) -> dict[str, Any]:
        """Gradients by name; zeros for torch parameters that the step does not use."""
        found = dict(zip(self.session.weight_names, grads, strict=True))
        if not self.parameters:
            return found
        return {n: found[n] if n in found else np.zeros(p.shape, str(p.dtype).removeprefix("torch.")) for n, p in self.parameters.items()}

    def _refresh_numbers(self) -> None:
        if self.updater is None or self.updater.translated is None:
            return
        values = None
        if self.updater.translated.signature() != self.updater.seen:
            values = self.values
            numbers = self.updater.numbers(values.theta)
            self.values = values._replace(opt=values.opt._replace(numbers=self.placement.put(numbers)))

    # -- the guard ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raises if the guard has found something that is not finite; the last good state stays."""
        if not self.options.guard or not self.started:
            return
        count, found = (int(n) for n in np.asarray(self.values.alarm))
        if found < 0:
            return
        names = self.recipe(None).watched_names(self.session.hidden_names)
        self.values = self.values._replace(alarm=self.placement.put(jnp.asarray(np.array([count, -1], np.int32))))
        raise NonFiniteError(_alarm_text(f"update {count + 1}", names[found]))

    def _raise_if_bad(self, losses: Any, grads: Sequence[Any]) -> None:
        if not self.options.guard:
            return
        named = {"the loss": losses} | {f"the gradient of `{n}`": g for n, g in zip(self.session.weight_names, grads, strict=False)}
        for name, array in named.items():
            if not np.isfinite(np.asarray(array)).all():
                raise NonFiniteError(_alarm_text(f"update {self.updates + 1}", name))

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

    # -- inputs ------------------------------------------------------------------------------------------------

    @property
    def batch_first(self) -> bool:
        """Whether sequences come as (batch, time, …)."""
        return bool(getattr(self.net, "batch_first", False))

    def _time_first(self, array: Any) -> Any:
        if not self.batch_first or np.ndim(array) < 2:
            return array
        return array.swapaxes(0, 1) if isinstance(array, jax.Array) else np.ascontiguousarray(array.swapaxes(0, 1))

    def _one_step(self, target: Any) -> Any:
        """The first time step of a target as the user gave it."""
        if isinstance(target, (torch.Tensor, np.ndarray, jax.Array)):
            return target[:, 0] if self.batch_first and target.ndim > 1 else target[0]
        return np.asarray(target)[0]

    def _check_data(self, args: Sequence[Any], targets: Any) -> None:
        if self.options.check_inputs:
            named = {f"input {n}" if n else "input": a for n, a in enumerate(args)}
            named |= {f"target {n}" if n else "target": as_array(t) for n, t in enumerate(jax.tree.leaves(targets))}
            check_finite(named)


def _alarm_text(where: str, what: str) -> str:
    return (
        f"At {where}, {what} became NaN or infinite. That update and any after it were not made: weights, states and trace are the last "
        "finite ones, so the learner can be saved or go on. Lower the learning rate, clip gradients (`clip_norm=1.0`), or look for bad "
        "values in the data (`check_inputs=True`)."
    )


def _show(sig: tuple) -> str:
    return ", ".join(f"{dtype}{shape}" for shape, dtype in sig)
