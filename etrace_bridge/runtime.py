"""The learner's working part: arrays on the device, and the compiled programs that move them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.graph import compile_etrace_graph
from etrace_bridge.engine.plan import choose_chunk, divide
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.engine.sequence import run_sequence, step_weights
from etrace_bridge.frontend import BridgedModule, trace_function, wrap
from etrace_bridge.rules import BPTT, Carry, Chunk, Rule


class Runtime:
    """Holds a model's weights, states, trace and optimizer state as plain arrays.

    brainstate States are written only on request (`write_back`): the hot path is one jitted call on donated arrays.
    """

    def __init__(self, model, rule: Rule, loss, optimizer, chunk, reduction: str, budget, seed: int) -> None:
        if reduction not in ("mean", "sum"):
            raise InputError(f"`reduction` is {reduction!r}; it must be 'mean' or 'sum'.")
        self.net = wrap(model, seed=seed) if isinstance(model, torch.nn.Module) else model
        if not isinstance(self.net, brainstate.nn.Module):
            raise InputError(f"`model` is a {type(model).__name__}; it must be a torch or a brainstate module.")
        self.rule, self.chunk, self.reduction, self.budget = rule, chunk, reduction, budget
        self.optimizer = optimizer
        self.given_loss, self._loss = loss, None
        self._program: StepProgram | None = None
        self._compiled: dict[Any, Callable] = {}

    # -- preparation -------------------------------------------------------------------------------------------

    @property
    def program(self) -> StepProgram:
        """The compiled step."""
        if self._program is None:
            raise StateError("The learner has seen no input yet, so there is no graph. Call `step` or `gradients` first.")
        return self._program

    def prepare(self, args: Sequence[Any], target: Any) -> None:
        """Compiles the model for inputs of this shape, the first time."""
        shapes = tuple((np.shape(a)) for a in args)
        if self._program is not None:
            if shapes != self._shapes:
                raise InputError(
                    f"This learner was compiled for inputs of shape {self._shapes}; it was given {shapes}. "
                    "Make a new learner for another batch size or input size."
                )
        else:
            self._start(args)
            self._shapes = shapes
        if self._loss is None and self.given_loss is not None and target is not None:
            self._loss = as_jax_loss(self.given_loss, self._output_shapes(), target)

    def _start(self, args: Sequence[Any]) -> None:
        arrays = [jnp.asarray(a) for a in args]
        if isinstance(self.net, BridgedModule):
            self.net.ensure_state(*arrays)
        graph = compile_etrace_graph(self.net, *arrays, include_hidden_perturb=False)
        program = self._program = StepProgram(graph)
        info = graph.module_info
        states = info.retrieved_model_states
        self.paths = [info.invar_to_weight_path[v] for v in program.weight_vars]
        self.theta = [x for p in info.weight_path_to_invars for x in jax.tree.leaves(states[p].value)]
        self.names = _leaf_names({p: states[p].value for p in info.weight_path_to_invars})
        self.others = [
            s for s in info.compiled_model_states
            if info.state_path(s) not in info.weight_path_to_invars and info.state_path(s) not in info.hidden_path_to_invar
        ]
        self.hidden = [states[leaf.path].value for leaf in program.leaves]
        self.other = [x for s in self.others for x in jax.tree.leaves(s.value)]
        self.initial = jax.tree.map(np.asarray, (self.hidden, self.other))
        self.trace = self.rule.init(program)
        self.transform = self.optimizer if self.optimizer is not None else optax.identity()
        self.opt_state = self.transform.init(self.theta)

    def _output_shapes(self) -> Any:
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.program.out_vars]
        return self.program.output_tree(avals)

    # -- programs ----------------------------------------------------------------------------------------------

    def _run_chunk(self, theta, loss):
        def run(carry, data, fresh, final):
            args, targets, weights = data
            result = self.rule.chunk(
                self.program, theta, Carry(*carry), Chunk(args, targets, weights, loss), fresh, final
            )
            new = result.carry
            return result.grads, result.losses, result.outputs, (new.hidden, new.other, new.trace)

        return run

    def step(self, args: Sequence[Any], target: Any) -> tuple[Any, Any]:
        """One online step with update; returns the loss and the output, on the device."""
        args = [as_array(a) for a in args]
        target = jax.tree.map(as_array, target)
        self.prepare(args, target)
        key = ("step", target is None)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._step_function(target is not None), donate_argnums=(0, 1, 2))
        state, self.theta, self.opt_state, loss, output = self._compiled[key](
            (self.hidden, self.other, self.trace), self.theta, self.opt_state, args, target
        )
        self.hidden, self.other, self.trace = state
        return loss, output

    def _step_function(self, with_loss: bool) -> Callable:
        loss = self._need_loss() if with_loss else None

        def step(carry, theta, opt_state, args, target):
            data = ([a[None] for a in args], jax.tree.map(lambda t: t[None], target), jnp.ones(1, theta[0].dtype))
            grads, losses, outputs, carry = self._run_chunk(theta, loss)(carry, data, False, False)
            output = jax.tree.map(lambda o: o[0], outputs)
            if not with_loss:
                return carry, theta, opt_state, None, output
            updates, opt_state = self.transform.update(grads, opt_state, theta)
            return carry, optax.apply_updates(theta, updates), opt_state, losses[0], output

        return step

    def gradients(self, xs: Sequence[Any], targets: Any, mask: Any, carry: bool):
        """Gradients by name, losses, outputs and the steps' weights."""
        args, targets = self._time_major(xs), jax.tree.map(self._time_first, targets)
        length = self._check_lengths(args, targets, mask)
        self.prepare([a[0] for a in args], jax.tree.map(lambda t: t[0], targets))
        loss = self._need_loss()
        steps = length if isinstance(self.rule, BPTT) and self.chunk == "auto" else choose_chunk(
            self.program, self.trace, length, self.chunk, self.budget
        )
        plan = divide(length, steps)
        key = ("gradients", plan, carry, mask is None)
        if key not in self._compiled:

            def run(theta, state, args, targets, mask):
                weights = step_weights(length, mask, self.reduction).astype(theta[0].dtype)
                if not carry:
                    state = (*state, self.rule.init(self.program))
                grads, losses, outputs, new = run_sequence(
                    self._run_chunk(theta, loss), state, (args, targets, weights), plan, not carry, not carry
                )
                return grads, losses, outputs, weights, new if carry else None

            self._compiled[key] = jax.jit(run)
        state = (self.hidden, self.other, self.trace) if carry else self.initial
        grads, losses, outputs, weights, new = self._compiled[key](self.theta, state, args, targets, mask)
        if carry:
            self.hidden, self.other, self.trace = new
        return dict(zip(self.names, grads, strict=True)), losses, outputs, weights

    # -- states ------------------------------------------------------------------------------------------------

    def reset(self, mask: Any) -> None:
        """Initial states and a zero trace, for all or some batch elements."""
        if self._program is None:
            return
        if mask is None:
            self.hidden, self.other = jax.tree.map(jnp.array, self.initial)
            self.trace = self.rule.init(self.program)
            return
        gone = jnp.asarray(as_array(mask)).astype(bool)
        batch = self.hidden[0].shape[0]
        if gone.shape != (batch,):
            raise InputError(f"`mask` has shape {gone.shape}; it must be ({batch},), one entry a batch element.")
        self.hidden = [
            jnp.where(gone.reshape(-1, *(1,) * (h.ndim - 1)), start, h)
            for h, start in zip(self.hidden, self.initial[0], strict=True)
        ]
        self.trace = self.rule.reset(self.program, self.trace, 1 - gone.astype(self.theta[0].dtype))

    def write_back(self) -> None:
        """Puts weights and states into the brainstate States."""
        if self._program is None:
            return
        info = self.program.graph.module_info
        states, at = info.retrieved_model_states, 0
        for path, leaves in info.weight_path_to_invars.items():
            tree = jax.tree.structure(states[path].value)
            states[path].value = jax.tree.unflatten(tree, self.theta[at : at + len(leaves)])
            at += len(leaves)
        for leaf, value in zip(self.program.leaves, self.hidden, strict=True):
            states[leaf.path].value = value
        at = 0
        for state in self.others:
            tree = jax.tree.structure(state.value)
            state.value = jax.tree.unflatten(tree, self.other[at : at + tree.num_leaves])
            at += tree.num_leaves

    # -- inputs ------------------------------------------------------------------------------------------------

    def _need_loss(self) -> Callable:
        if self._loss is None:
            raise InputError("This learner has no loss. Give one: `OnlineLearner(model, loss=torch.nn.functional.mse_loss)`.")
        return self._loss

    def _time_first(self, array: Any) -> Any:
        array = as_array(array)
        return np.ascontiguousarray(np.swapaxes(array, 0, 1)) if self.batch_first and np.ndim(array) > 1 else array

    @property
    def batch_first(self) -> bool:
        """Whether sequences come as (batch, time, …)."""
        return bool(getattr(self.net, "batch_first", False))

    def _time_major(self, xs: Sequence[Any]) -> list[Any]:
        return [self._time_first(x) for x in xs]

    def _check_lengths(self, args: Sequence[Any], targets: Any, mask: Any) -> int:
        if targets is None:
            raise InputError("`targets` is missing: a gradient needs a loss at one step at least.")
        lengths = {f"input {n}": np.shape(a)[0] for n, a in enumerate(args)}
        lengths |= {f"target {n}": np.shape(t)[0] for n, t in enumerate(jax.tree.leaves(targets))}
        if mask is not None:
            lengths["mask"] = np.shape(mask)[0]
        if len(set(lengths.values())) != 1:
            found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise InputError(f"The number of time steps differs: {found}. Sequences are time-major, (T, batch, …).")
        return next(iter(lengths.values()))


def as_array(x: Any) -> Any:
    """A private copy of a torch tensor or NumPy array; JAX arrays as they are."""
    if isinstance(x, torch.Tensor):
        return x.detach().numpy(force=True).copy()
    return x if isinstance(x, jax.Array) else np.array(x)


def as_jax_loss(loss: Callable, output: Any, target: Any) -> Callable:
    """The loss as a JAX callable: used as it is if it takes JAX arrays, traced like the model if it is torch code."""
    target = jax.tree.map(lambda t: jax.ShapeDtypeStruct(np.shape(t), jnp.result_type(t)), target)
    if not isinstance(loss, torch.nn.Module) and not getattr(loss, "__module__", "").startswith("torch"):
        try:
            if np.shape(jax.eval_shape(loss, output, target)) == ():
                return loss
        except Exception:  # noqa: BLE001 - a torch callable fails on JAX arrays in many ways
            pass
    traced = trace_function(loss)
    shape = jax.eval_shape(traced, output, target)
    if np.shape(shape) != ():
        raise InputError(f"The loss must return a scalar; it returned an array of shape {np.shape(shape)}.")
    return traced


def _leaf_names(values: dict) -> list[str]:
    names = []
    for path, value in values.items():
        for keys, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
            names.append(show_path(path) + jax.tree_util.keystr(keys))
    return names
