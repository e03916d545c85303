"""`forward` of a whole sequence, traced from the initial state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from etrace_bridge._errors import NotSupportedError
from etrace_bridge._jax_compat import ClosedJaxpr
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.injector import Injector
from etrace_bridge.frontend.names import NamedTensor
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype
from etrace_bridge.frontend.ops.ranges import InputRange, trace_with_ranges
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.tensor import INPUT, TracedTensor
from etrace_bridge.frontend.time.variables import noted_variables
from etrace_bridge.frontend.trace import tracing
from etrace_bridge.frontend.tracer import Tracer, constant

# of the traced sequences: the next one is tried where a state is older than the last shows
LENGTHS = (6, 12, 24)
KEYS = 512  # how many random keys a sequence may draw


@dataclass
class TracedSequence:
    """`forward` of one whole sequence as a jaxpr, the structure of what it gives, and how many
    random keys it draws.

    `ranges` is what it demands of one step of the inputs that it uses as indices. `starts` are the
    attributes `(path, module, name)` that `forward` reads before it sets them: what is in them is
    where the sequence starts.
    """

    jaxpr: ClosedJaxpr
    skeleton: Any
    num_keys: int
    ranges: list[InputRange]
    starts: list[tuple[str, nn.Module, str]]

    @property
    def coarse(self) -> bool:
        """Whether some values are computed in less than double precision: a model in float64 may
        say `.float()` on the way.
        """
        dtypes = [v.aval.dtype for eqn in self.jaxpr.jaxpr.eqns for v in eqn.outvars]
        return any(jnp.issubdtype(d, jnp.inexact) and jnp.finfo(d).bits < 64 for d in dtypes)


def trace_sequence(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    inputs: tuple,
    plan: StepPlan,
    given: tuple | None,
    length: int,
) -> TracedSequence:
    """Trace `forward` on a whole sequence from the initial state: tensors, keys and sequences in,
    output tensors out.
    """
    axis = 1 if plan.layout == "batch_first" else 0
    found: dict[str, Any] = {}

    def run(*flat: Any) -> list[Any]:
        values, keys, sequences = flat[: len(tensors)], flat[len(tensors)], flat[len(tensors) + 1 :]
        found["keys"] = 0

        def make_key() -> Any:
            found["keys"] += 1
            return lax.index_in_dim(keys, found["keys"] - 1, 0, keepdims=False)

        tracer = Tracer({id(m): path for path, m in model.named_modules()}, make_key=make_key)
        before = {(path, name): value for path, _, name, value in _attributes(model)}
        with restored(model, values=False), tracing(tracer):
            for named, value in zip(tensors, values, strict=True):
                traced = TracedTensor(value, differentiable=named.trained)
                tracer.track(
                    named.tensor, traced, read_only=named.name if named.parameter else None
                )
            for tensor in (
                t
                for m in model.modules()
                if (a := find_adapter(m)) is not None
                for t in a.constants(m)
            ):
                tracer.track(tensor, TracedTensor(constant(tensor), differentiable=False))
            tracer.on_module_call = Injector(StepPlan(root=plan.root), model, [])
            args = tuple(TracedTensor(x, origin=INPUT) for x in sequences)
            with noted_variables(model) if length >= LENGTHS[0] else contextlib.nullcontext():
                returned = plan.call_from(model, args, given)
            written = [
                n.name
                for n, value in zip(tensors, values, strict=True)
                if tracer.read(n.tensor) is not value
            ]
            found["starts"] = [
                (path, module, name)
                for path, module, name, value in _attributes(model)
                if isinstance(value, TracedTensor)
                and isinstance(old := before.get((path, name)), torch.Tensor)
                and tracer.used_constant(old)
            ]
            if written:
                raise buffer_in_loop(type(model).__name__, written)
            leaves, found["skeleton"] = flatten_state(plan.output_of(model, returned))
            return [tracer.read(t) for _, t in leaves]

    def whole(x: torch.Tensor) -> Any:
        place = min(axis, x.dim())
        return jax.ShapeDtypeStruct(
            (*x.shape[:place], length, *x.shape[place:]), to_jax_dtype(x.dtype)
        )

    shapes = [
        jax.ShapeDtypeStruct(tuple(n.tensor.shape), to_jax_dtype(n.tensor.dtype)) for n in tensors
    ]
    shapes += [jax.ShapeDtypeStruct((KEYS, 2), jnp.uint32), *[whole(x) for x in inputs]]
    closed, ranges = trace_with_ranges(run, *shapes)
    first = len(shapes) - len(inputs)
    of_step = [
        _range_of_step(r, r.position - first, inputs[r.position - first], length, axis)
        for r in ranges
        if r.position >= first
    ]
    return TracedSequence(closed, found["skeleton"], found["keys"], of_step, found["starts"])


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Go through the attributes of all modules: path, module, name, value."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            yield path, module, name, value


def _range_of_step(
    found: InputRange, position: int, x: torch.Tensor, length: int, axis: int
) -> InputRange:
    """What a range for a sequence demands of one time step: elements that are indices in any step
    are indices in each.
    """
    if found.elements is None:
        return dataclasses.replace(found, position=position, size=x.numel())
    place = min(axis, x.dim())
    is_index = np.zeros(found.size, bool)
    is_index[found.elements] = True
    in_any = is_index.reshape(*x.shape[:place], length, *x.shape[place:]).any(place).reshape(-1)
    elements = None if in_any.all() else np.flatnonzero(in_any)
    return dataclasses.replace(found, position=position, size=x.numel(), elements=elements)


def buffer_in_loop(model: str, names: list[str]) -> NotSupportedError:
    """A loop over time that writes to the model's tensors."""
    listed = ", ".join(f"`{name}`" for name in names)
    return NotSupportedError(
        f"`{model}.forward` loops over time and writes to {listed} on the way (running statistics "
        "in training mode, for one). The step that is found in a loop does not carry such writes. "
        "Call `model.eval()`, or put those layers into evaluation mode, before `wrap`."
    )
