"""The learner's working part: compiled programs that move its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError, NonFiniteError, StateError
from etrace_bridge._jit import jit
from etrace_bridge.engine.plan import ChunkPlan, choose_chunk, divide
from etrace_bridge.engine.sequence import step_weights
from etrace_bridge.frontend import BridgedModule, to_torch
from etrace_bridge.learning.guard import COUNT, FIRST, STOPPED, alarm_text, new_alarm, watched_names
from etrace_bridge.learning.inputs import FastReader, as_array, as_targets, check_finite, sequence_length
from etrace_bridge.learning.losses import as_jax_loss, jax_dtype
from etrace_bridge.learning.optimizers import make_updater
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.programs import Recipe, make_gradients, make_prediction, make_step, make_update
from etrace_bridge.learning.session import Session
from etrace_bridge.learning.store import Store, undo_on_error
from etrace_bridge.learning.torch_update import TorchUpdate, has_hooks, run_hooks
from etrace_bridge.rules import BPTT, Rule

LOOK_EVERY = 64  # steps after which the guard's alarm is read, if nothing else asks for it


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


@dataclass(frozen=True)
class _Sequence:
    """A sequence on the device, time-major, and what it needs to run."""

    session: Session
    args: list[Any]
    targets: Any
    mask: Any
    length: int
    loss: Callable | None


class Runtime(Store):
    """Runs a learner's programs on its arrays.

    Attributes:
        parameters: the torch model's trained parameters by name; empty for other models.
        torch_update: the optimizer that runs in torch, if it does.
        steps: time steps seen.
        updates: updates made.
    """

    def __init__(self, net: brainstate.nn.Module, rule: Rule, loss: Any, optimizer: Any, options: Options, placement: Placement) -> None:
        self.given_loss, self.optimizer, self.options = loss, optimizer, options
        is_torch = isinstance(net, BridgedModule)
        named = net.model.named_parameters() if is_torch else ()
        self.parameters: dict[str, torch.Tensor] = {n: p for n, p in named if p.requires_grad}
        clipping = (options.clip_norm, options.clip_value, options.accumulate)
        updater = make_updater(optimizer, self.parameters if is_torch else None, *clipping, options.schedule)
        self.torch_update = None
        if updater is None:
            if options.schedule is not None:
                raise InputError(f"`schedule` cannot act on `{type(optimizer).__name__}`, which runs in torch. Use a torch scheduler.")
            self.torch_update = TorchUpdate(optimizer, self.parameters, *clipping)
        super().__init__(net, rule, updater, placement)
        self.steps = self.updates = 0
        self._losses: dict[Any, Callable] = {}
        self._tried: set[Any] = set()
        self._recent: list[tuple] = []  # inputs of the steps since the last look, to find out what went wrong
        self._seen_good = 0

    # -- programs ----------------------------------------------------------------------------------------------

    def recipe(self, loss: Callable | None) -> Recipe:
        """What the current session's programs have in common."""
        session, options = self.session, self.options
        names, resets = tuple(session.weight_names), tuple(session.resets)
        return Recipe(session.program, self.rule, loss, self.updater, names, resets, options.reduction, options.guard)

    def loss_for(self, target: Any) -> Callable:
        """The loss for targets like this one, of one step and as the user gave it."""
        if self.given_loss is None:
            raise InputError("This learner has no loss. Give one: `OnlineLearner(model, loss=torch.nn.functional.mse_loss)`.")
        leaves, tree = jax.tree.flatten(target)
        where = (self.session.signature, tree)
        given = (where, tuple((tuple(np.shape(t)), str(t.dtype)) for t in leaves))
        key = (where, tuple((tuple(np.shape(t)), str(jax_dtype(t))) for t in leaves))
        if given not in self._tried:
            program = self.session.program
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.out_vars]
            loss = as_jax_loss(self.given_loss, program.output_tree(shapes), target, isinstance(self.net, BridgedModule))
            self._losses.setdefault(key, loss)
            self._tried.add(given)
        return self._losses[key]

    def _compiled(self, key: Any, make: Callable[[], Callable], donate: bool, one_step: bool) -> Callable:
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

            compiled[key] = jit(on_leaves, one_step, donate_argnums=(0,) if donate else ())
        return compiled[key]

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, args: tuple, target: Any) -> tuple[Any, Any]:
        """One online step with update; returns the loss and the output, on the device."""
        fast = self._fast.get(target is None)
        if fast is not None and self._lent is None and len(args) == len(fast[0]):
            arrays = [read(a) for read, a in zip(fast[0], args, strict=True)]
            wanted = None if target is None else fast[1](target)
            known = all(a is not None for a in arrays) and (wanted is not None or target is None)
            if known and not has_hooks(self.parameters.values()):
                return self._run_step(fast[2], arrays, wanted)
        return self._checked_step(args, target)

    def _run_step(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any]:
        self._refresh_numbers()
        self._leaves, loss, output, _ = call(self._leaves, arrays, target)
        self.steps += 1
        if target is not None:
            self.updates += 1
        self._recent.append((arrays, target))
        if len(self._recent) >= LOOK_EVERY:
            jax.block_until_ready(output)  # the inputs' buffers come round again
            self.look()
        return loss, output

    @undo_on_error
    def _checked_step(self, args: tuple, target: Any) -> tuple[Any, Any]:
        arrays = [as_array(a, self.float_dtype) for a in args]
        self._check_data(arrays, target)
        session = self.prepare(arrays, continues=True)
        target = as_targets(target)
        loss = None if target is None else self.loss_for(target)
        wanted = jax.tree.map(as_array, target)
        host = target is not None and self._host_update
        make = lambda: make_step(self.recipe(loss), not host)  # noqa: E731
        call = self._compiled(("step", loss, host), make, donate=not host, one_step=True)
        arrays, wanted = self.placement.put_batch((arrays, wanted), 0, session.batch)
        if host:
            return self._host_step(call, arrays, wanted)
        if self.placement.is_single and not self.options.check_inputs and not isinstance(target, (tuple, list, dict)):
            readers = [FastReader(a, x, LOOK_EVERY) for a, x in zip(args, arrays, strict=True)]
            self._fast[target is None] = (readers, None if target is None else FastReader(target, wanted, LOOK_EVERY), call)
        return self._run_step(call, arrays, wanted)

    # -- sequences ---------------------------------------------------------------------------------------------

    def _sequence(self, xs: tuple, targets: Any, mask: Any, carry: bool) -> _Sequence:
        """A checked sequence, with its session active."""
        self.look()
        targets = as_targets(targets)
        args = [self._time_first(as_array(x, self.float_dtype)) for x in xs]
        arrays = jax.tree.map(lambda t: self._time_first(as_array(t)), targets)
        mask = None if mask is None else as_array(mask, self.float_dtype)
        length = sequence_length(args, arrays, mask, self.batch_first)
        self._check_data(args, arrays)
        if mask is not None and self.options.reduction == "mean" and not np.sum(np.asarray(mask)) > 0:
            raise InputError("`mask` has no step with a positive weight, so there is no mean loss.")
        session = self.prepare([a[0] for a in args], carry)
        loss = None if targets is None else self.loss_for(jax.tree.map(self._one_step, targets))
        place = self.placement
        args, arrays = place.put_batch((args, arrays), 1, session.batch)
        return _Sequence(session, args, arrays, place.put(mask), length, loss)

    def plan(self, length: int) -> ChunkPlan:
        """The division of a sequence."""
        plans = self.session.plans
        if length not in plans:
            chunk = self.options.chunk
            if isinstance(self.rule, BPTT) and chunk == "auto":
                plans[length] = divide(length, length)
            else:
                memory = jax.eval_shape(lambda: self.rule.init(self.session.program))
                steps = choose_chunk(self.session.program, memory, length, chunk, self.options.budget, self.rule.passes)
                plans[length] = divide(length, steps)
        return plans[length]

    def _start(self, session: Session) -> tuple[list[Any], list[Any]]:
        """A session's initial hidden and other states, to be read only."""
        if "start" not in session.compiled:
            session.compiled["start"] = self.fresh_states(session)
        return session.compiled["start"]

    def _start_state(self, session: Session) -> tuple[list[Any], list[Any]]:
        """Hidden and other states before a sequence of its own: what belongs to the model is current."""
        hidden, other = self._start(session)
        return hidden, [o if r else now for o, now, r in zip(other, self.values.other, session.resets, strict=True)]

    @undo_on_error
    def gradients(self, xs: tuple, targets: Any, mask: Any, carry: bool):
        """Gradients by name, losses, outputs and the steps' weights."""
        if targets is None:
            raise InputError("`targets` is missing: a gradient needs a loss at one step at least.")
        data = self._sequence(xs, targets, mask, carry)
        session, plan = data.session, self.plan(data.length)
        key = ("gradients", data.loss, plan, carry)
        if key not in session.compiled:
            session.compiled[key] = jit(make_gradients(self.recipe(data.loss), plan, carry))
        values = self.values
        state = (values.hidden, values.other, values.trace) if carry else (*self._start_state(session), None)
        grads, losses, outputs, weights, (hidden, other, trace) = session.compiled[key](
            values.theta, state, data.args, data.targets, data.mask
        )
        if carry:
            self.values = values._replace(hidden=hidden, other=other, trace=trace)
        else:
            self.values = values._replace(other=self.recipe(None).end(values.other, other))
        self.steps += data.length
        found = self.all_gradients(grads)
        self.return_to_stream()
        return found, losses, outputs, weights

    @undo_on_error
    def update(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        """Gradients and updates; losses, outputs and the steps' weights."""
        if every not in ("sequence", "chunk", "step"):
            raise InputError(f"`every` is {every!r}; it must be 'sequence', 'chunk' or 'step'.")
        if targets is None:
            raise InputError("`targets` is missing: an update needs a loss at one step at least.")
        if self._host_update:
            return self._host_sequence(xs, targets, mask, carry, every)
        data = self._sequence(xs, targets, mask, carry)
        plan = divide(data.length, 1) if every == "step" else self.plan(data.length)
        make = lambda: make_update(self.recipe(data.loss), plan, carry, every != "sequence")  # noqa: E731
        call = self._compiled(("update", data.loss, plan, carry, every), make, donate=True, one_step=False)
        self._refresh_numbers()
        start = None if carry else self._start(data.session)
        self._leaves, losses, outputs, weights = call(self._leaves, start, data.args, data.targets, data.mask)
        before, each = self._seen_good, data.length if every == "sequence" else plan.steps
        try:
            self.look(losses, each)
        finally:
            made = self._seen_good - before if self.options.guard else -(-data.length // each)
            self.updates += made
            self.steps += min(made * each, data.length)
            self.return_to_stream()
        return losses, outputs, weights

    @undo_on_error
    def predict(self, xs: tuple, carry: bool) -> Any:
        """Outputs of a sequence in evaluation mode; the learner stays as it is."""
        return self._predict(self._sequence(xs, None, None, carry and self.stream is not None), carry)

    def _predict(self, data: _Sequence, carry: bool) -> Any:
        session = data.session
        if "predict" not in session.compiled:
            alike = session
            if not session.is_evaluation:
                self.lend()
                alike = session.in_evaluation()
                self._lent = None
            session.compiled["predict"] = alike, jit(make_prediction(alike.program))
        alike, call = session.compiled["predict"]
        values = self.values
        hidden, other = (values.hidden, values.other) if carry else self._start_state(session)
        names = [*session.weight_names, *session.hidden_names, *session.other_names]
        known = dict(zip(names, [*values.theta, *hidden, *other], strict=True))

        def pick(names: Sequence[str], instead: Sequence[Any]) -> list[Any]:
            return [known.get(n, o) for n, o in zip(names, instead, strict=True)]

        theta = [known[n] for n in alike.weight_names]
        first = pick(alike.hidden_names, alike.initial[0]), pick(alike.other_names, alike.initial[1])
        outputs = call(theta, *first, data.args)
        self.return_to_stream()
        return outputs

    @undo_on_error
    def evaluate(self, xs: tuple, targets: Any, mask: Any):
        """Losses and the steps' weights of a sequence in evaluation mode."""
        if targets is None:
            raise InputError("`targets` is missing: an evaluation needs a loss.")
        data = self._sequence(xs, targets, mask, False)
        key = ("losses", data.loss)
        if key not in data.session.compiled:
            data.session.compiled[key] = jit(jax.vmap(data.loss))
        losses = data.session.compiled[key](self._predict(data, False), data.targets)
        return losses, step_weights(data.length, data.mask, self.options.reduction)

    # -- updates that pass through torch -----------------------------------------------------------------------

    @property
    def _host_update(self) -> bool:
        return self.torch_update is not None or has_hooks(self.parameters.values())

    def _host_step(self, call: Callable, arrays: list[Any], target: Any) -> tuple[Any, Any]:
        leaves, loss, output, grads = call(self._leaves, arrays, target)
        named = self.all_gradients(grads)
        self._raise_if_bad(loss, named)
        self._leaves = leaves
        self._apply_on_host(named)
        self.steps += 1
        return loss, output

    def _host_sequence(self, xs: tuple, targets: Any, mask: Any, carry: bool, every: str):
        if every != "sequence":
            raise InputError(
                f"`every={every!r}` needs an update inside the compiled program; parameter hooks and torch optimizers "
                "without a translation run outside it. Use `every='sequence'`, or call `step` for every time step."
            )
        before, steps = self.values if self.started else None, self.steps
        grads, losses, outputs, weights = self.gradients(xs, targets, mask, carry)
        self.steps = steps
        try:
            self._raise_if_bad(losses, grads)
        except NonFiniteError:
            if before is None:
                self.reset(None)
            else:
                self.values = before
            raise
        self.steps += len(losses)
        self._apply_on_host(grads)
        return losses, outputs, weights

    def _apply_on_host(self, grads: Mapping[str, Any]) -> None:
        self._refresh_numbers()
        values, names = self.values, self.session.weight_names
        theta = dict(zip(names, values.theta, strict=True))
        finished = run_hooks({n: to_torch(g) for n, g in grads.items()}, self.parameters)
        if self.torch_update is not None:
            new, opt = self.torch_update.apply(finished, theta), values.opt
        else:
            key = "apply"
            if key not in self.session.compiled:
                self.session.compiled[key] = jit(self.updater.update)  # pyright: ignore[reportOptionalMemberAccess]
            wanted = {n: as_array(finished[n]) for n in names}
            new, opt = self.session.compiled[key](wanted, values.opt, theta)
        theta = self.placement.put([jnp.asarray(new[n]) for n in names])
        self.values = values._replace(theta=theta, opt=opt)
        self.updates += 1

    def all_gradients(self, grads: Sequence[Any]) -> dict[str, Any]:
        """Gradients by name; zeros for torch parameters that the step does not use."""
        found = dict(zip(self.session.weight_names, grads, strict=True))
        if not self.parameters:
            return found
        return {n: found[n] if n in found else np.zeros(p.shape, jax_dtype(p)) for n, p in self.parameters.items()}

    def _refresh_numbers(self) -> None:
        """Takes over what a torch scheduler changed."""
        updater = self.updater
        if updater is None or updater.translated is None or updater.translated.signature() == updater.seen:
            return
        values = self.values
        numbers = self.placement.put(updater.numbers(values.theta))
        self.values = values._replace(opt=values.opt._replace(numbers=numbers))

    # -- the guard ---------------------------------------------------------------------------------------------

    def look(self, losses: Any = None, each: int = 1) -> None:
        """Raises if the guard has held something back; the last good state stays.

        Args:
            losses: the steps' losses of a sequence that has just run.
            each: steps for each of its updates.
        """
        recent, self._recent = self._recent, []
        if not self.options.guard or not self.started:
            return
        alarm = np.asarray(self.values.alarm)
        if not alarm[STOPPED]:
            self._seen_good = int(alarm[COUNT])
            return
        count = int(alarm[COUNT])
        flags = alarm[FIRST:]
        good = count - self._seen_good
        step = self.steps + good * each + 1
        if losses is not None:
            bad = np.flatnonzero(~np.isfinite(np.asarray(losses)[good * each :]))
            step += int(bad[0]) if bad.size else 0
        else:  # a single step's quick verdict: find out what it was
            self.steps -= len(recent) - good
            step = self.steps + 1
            self.updates -= sum(target is not None for _, target in recent[good:])
            flags = self._diagnose(*recent[good])
        self._seen_good = count
        self.values = self.values._replace(alarm=self.placement.put(jnp.asarray(new_alarm(count, len(flags)))))
        names = watched_names(self.session.weight_names, self.session.hidden_names)
        raise NonFiniteError(alarm_text(step, [n for n, bad in zip(names, flags, strict=True) if bad]))

    def _diagnose(self, args: list[Any], target: Any) -> list[bool]:
        """What is not finite in a step from the current state."""
        loss = None if target is None else self.loss_for(target)
        function = make_step(self.recipe(loss), own_update=False)
        new, loss, _, grads = jit(function)(self.values, args, target)
        grads = grads if grads is not None else [np.zeros(())] * len(new.theta)
        watched = [np.zeros(()) if loss is None else loss, *grads, *new.hidden]
        return [not np.isfinite(np.asarray(x)).all() for x in watched]

    def _raise_if_bad(self, losses: Any, grads: Mapping[str, Any]) -> None:
        """The guard for updates that pass through torch, where everything is on the host anyway."""
        if not self.options.guard:
            return
        bad = [not np.isfinite(np.asarray(x)).all() for x in (losses, *grads.values())]
        if any(bad):
            step = self.steps + 1 + int(np.argmin(np.isfinite(np.atleast_1d(losses))))
            raise NonFiniteError(alarm_text(step, [n for n, b in zip(watched_names(list(grads), ()), bad, strict=True) if b]))

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
