"""One step of a torch model as a closed jaxpr: parameters, buffers, states, key and inputs in;
output and new states out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from etrace_bridge._errors import BridgeError, StateError
from etrace_bridge._jax_compat import ClosedJaxpr, evaluate_jaxpr, is_concrete
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.complex import split_complex
from etrace_bridge.frontend.injector import Injector
from etrace_bridge.frontend.names import NamedTensor
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype
from etrace_bridge.frontend.ops.ranges import InputRange, check_ranges, trace_with_ranges
from etrace_bridge.frontend.outputs import keep_tensors
from etrace_bridge.frontend.plan import StepPlan, begun
from etrace_bridge.frontend.simplify import simplify
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state, unflatten_state
from etrace_bridge.frontend.tensor import INPUT, STATE, TracedTensor
from etrace_bridge.frontend.trace import tracing
from etrace_bridge.frontend.tracer import Tracer, constant
from etrace_bridge.lowering import jit


@dataclass
class TracedStep:
    """One step, ready to evaluate.

    Attributes:
        jaxpr: Takes the tensors that are read, all states, the key if it is used, all inputs; gives
            output tensors, new states and, if it is used, the new key. Complex tensors and states
            are real arrays with a last axis of 2, and all that it computes with is real; inputs and
            outputs have the model's own dtypes.
        used_tensors: For each tensor, whether the step reads it.
        used_states: For each state, whether the step reads it. If not, it is no longer a state.
        uses_key: Whether the step draws random numbers.
        output: Skeleton of the output, with a hole for each output tensor and None for what is no
            tensor.
        num_outputs: How many output tensors there are.
        ranges: What the step demands of inputs that it uses as indices.
    """

    jaxpr: ClosedJaxpr
    used_tensors: list[bool]
    used_states: list[bool]
    uses_key: bool
    output: Any
    num_outputs: int
    ranges: list[InputRange]

    def __post_init__(self) -> None:
        self.compiled = jit(self._evaluate, one_step=True)

    def __call__(
        self, tensors: Sequence[Any], states: Sequence[Any], key: Any, inputs: Sequence[Any]
    ) -> tuple[list, list, Any]:
        """Evaluate the step: inlined inside another JAX trace, compiled otherwise.

        Args:
            tensors: Values of the tensors that are read.
            states: Values of all states.
            key: The random key; ignored if none is used.
            inputs: The inputs.

        Returns:
            Output tensors, new states, the new key (None if none is used).
        """
        if self.ranges and all(map(is_concrete, inputs)):
            check_ranges(self.ranges, inputs, "input")
        values = [*tensors, *states, *([key] if self.uses_key else []), *inputs]
        known = all(is_concrete(value) for value in values)
        results = (self.compiled if known else self._evaluate)(*values)
        end = self.num_outputs + len(self.used_states)
        return (
            results[: self.num_outputs],
            results[self.num_outputs : end],
            results[end] if self.uses_key else None,
        )

    def _evaluate(self, *values: Any) -> list[Any]:
        return evaluate_jaxpr(self.jaxpr, *values)


def trace_step(
    model: nn.Module, plan: StepPlan, tensors: Sequence[NamedTensor], inputs: Sequence[Any]
) -> TracedStep:
    """Run the model's own forward code once on traced tensors.

    Args:
        model: The torch model; it is left as it was.
        plan: How the step runs.
        tensors: The parameters and buffers that are inputs of the step.
        inputs: One time step of each input, for shapes and dtypes.
    """
    states = [leaf.initial for leaf in plan.leaves]
    counts = (len(tensors), len(states), 1, len(inputs))
    step = _StepCode(model, plan, tensors, counts)
    shapes = [
        jax.ShapeDtypeStruct(tuple(v.shape), _jax_dtype(v.dtype))
        for v in (*(n.tensor for n in tensors), *states, *inputs)
    ]
    first = len(tensors) + len(states) + 1  # the first input
    shapes.insert(first - 1, jax.ShapeDtypeStruct((2,), jnp.uint32))
    try:
        closed, ranges = trace_with_ranges(step, *shapes)
        closed, used = _tidied(closed, counts, step)
    except BridgeError:
        raise
    except Exception as error:
        # plain torch ran this step while the plan was made, so it is not the model that fails
        raise messages.bridge_failed(type(model).__name__, error) from error
    ranges = [
        dataclasses.replace(r, position=r.position - first) for r in ranges if r.position >= first
    ]
    if plan.loop is not None:  # its step is not traced by torch's rules, its sequence was
        ranges = plan.loop.ranges
    used_tensors, used_states, _, _ = _split(used, counts)
    return TracedStep(
        closed,
        list(used_tensors),
        list(used_states),
        step.uses_key,
        step.output,
        step.num_outputs,
        ranges,
    )


class _StepCode:
    """One step as a function of tensors, states, a key and inputs, as flat arrays.

    Attributes:
        output: skeleton of the output; known after a call, as what follows.
        num_outputs: how many output tensors there are.
        uses_key: whether the step draws random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StepPlan,
        tensors: Sequence[NamedTensor],
        counts: Sequence[int],
    ) -> None:
        self._model, self._plan, self._tensors, self._counts = model, plan, tensors, counts
        self.output: Any = None
        self.num_outputs = 0
        self.uses_key = False

    def __call__(self, *flat: Any) -> tuple:
        tensors, states, (first_key,), inputs = _split(flat, self._counts)
        keys, loop = _KeyChain(first_key), self._plan.loop
        if loop is not None:
            outputs, new_states = loop(tensors, states, keys.next, inputs)
            self.output = loop.skeleton
        else:
            outputs, new_states = self._run_model(tensors, states, keys, inputs)
            _check_states(self._plan, states, new_states)
        self.num_outputs, self.uses_key = len(outputs), keys.used
        return (*outputs, *new_states, *([keys.key] if keys.used else []))

    def _run_model(
        self, tensors: Sequence[Any], states: Sequence[Any], keys: _KeyChain, inputs: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run the model's code on traced tensors; return output tensors and new states."""
        model = self._model
        tracer = Tracer({id(m): path for path, m in model.named_modules()}, make_key=keys.next)
        with restored(model, values=False), begun(self._plan), tracing(tracer):
            self._track_tensors(tracer, tensors)
            traced_states = [TracedTensor(v, origin=STATE) for v in states]
            _track_old_attributes(self._plan, traced_states, tracer)

            def call(injector: Injector, args: tuple, kwargs: dict) -> Any:
                tracer.on_module_call = injector
                return model(*args, **kwargs)

            traced_inputs = tuple(TracedTensor(v, origin=INPUT) for v in inputs)
            output, new_states = self._plan.run(model, traced_inputs, traced_states, call)
            leaves, skeleton = flatten_state(output)
            self.output = keep_tensors(skeleton)
            return [tracer.read(t) for _, t in leaves], [tracer.read(t) for t in new_states]

    def _track_tensors(self, tracer: Tracer, values: Sequence[Any]) -> None:
        """Let parameters, buffers and the constants of adapters stand for traced tensors."""
        for named, value in zip(self._tensors, values, strict=True):
            traced = TracedTensor(value, differentiable=named.trained)
            tracer.track(named.tensor, traced, read_only=named.name if named.parameter else None)
        for module in self._model.modules():
            adapter = find_adapter(module)
            for tensor in () if adapter is None else adapter.constants(module):
                tracer.track(tensor, TracedTensor(constant(tensor), differentiable=False))


def _tidied(
    closed: ClosedJaxpr, counts: Sequence[int], step: _StepCode
) -> tuple[ClosedJaxpr, list[bool]]:
    """Split complex values and drop what nothing reads; also return which inputs are read."""
    num_tensors, num_states, _, num_inputs = counts
    held = [True] * (num_tensors + num_states + 1) + [False] * num_inputs
    real_outputs = [n >= step.num_outputs for n in range(len(closed.jaxpr.outvars))]
    closed = split_complex(closed, held, real_outputs)
    optional = [*[True] * num_tensors, *[False] * num_states, not step.uses_key]
    optional += [False] * num_inputs
    return simplify(closed, optional, range(step.num_outputs, step.num_outputs + num_states))


def _jax_dtype(dtype: Any) -> Any:
    return to_jax_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype


class _KeyChain:
    """Splits off a fresh key for each random op of a step."""

    def __init__(self, key: Any) -> None:
        self.key, self.used = key, False

    def next(self) -> Any:
        """Return a fresh key."""
        self.used = True
        self.key, fresh = jax.random.split(self.key)
        return fresh


def _split(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


def _track_old_attributes(plan: StepPlan, traced: list[TracedTensor], tracer: Tracer) -> None:
    """Show the traced state through other references to its old tensor (a list of buffers, a
    closure).
    """
    position = sum(len(slot.leaves) for slot in plan.arguments)
    for slot in plan.attributes:
        old = slot.module._buffers.get(slot.name, slot.module.__dict__.get(slot.name))
        tensors = [t for _, t in flatten_state(old)[0]]
        new = traced[position : position + len(slot.leaves)]
        position += len(slot.leaves)
        if len(tensors) == len(new):
            for tensor, state in zip(tensors, new, strict=True):
                if tensor.shape == state.shape:
                    tracer.track(tensor, state)


def _check_states(plan: StepPlan, old: Sequence[Any], new: Sequence[Any]) -> None:
    leaves = plan.leaves
    if len(new) != len(old):
        raise StateError(
            f"The model returned {len(new)} state tensors after a step that began with {len(old)}. "
            f"A state must keep its structure from step to step."
        )
    for leaf, a, b in zip(leaves, old, new, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise StateError(
                f"State `{'.'.join(leaf.path)}` is {a.dtype}{list(a.shape)} before a step and "
                f"{b.dtype}{list(b.shape)} after it. A state must keep its shape and dtype. Check "
                "the input's shape and dtype, or give a matching initial state with `wrap(model, "
                "state=...)`."
            )


def pack_output(step: TracedStep, values: Sequence[Any]) -> Any:
    """Put output values into the structure that the model returned."""
    return unflatten_state(step.output, values)
