"""The step of a model whose `forward` loops over time: traced for a few lengths, split, and put
together as one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from etrace_bridge._errors import NotSupportedError, StateError
from etrace_bridge._jax_compat import ClosedJaxpr, module_scope
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.borders import to_jax, to_torch
from etrace_bridge.frontend.examples import random_like, scaled
from etrace_bridge.frontend.names import NamedTensor, to_path
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype
from etrace_bridge.frontend.ops.ranges import InputRange, trace_with_ranges
from etrace_bridge.frontend.plan import Injector, StateLeaf, StepPlan, TimeAxis
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state import Path, find_adapter, flatten_state
from etrace_bridge.frontend.tensor import INPUT, TracedTensor
from etrace_bridge.frontend.time.draws import same_draws
from etrace_bridge.frontend.time.graph import Graph, Node, evaluate, keys_of
from etrace_bridge.frontend.time.reduction import divisors, find_addends
from etrace_bridge.frontend.time.sequences import Reader, Reduced, Row, Value
from etrace_bridge.frontend.time.split import Column, Split, State, TooShort, split_steps
from etrace_bridge.frontend.time.variables import SEPARATOR, noted_variables
from etrace_bridge.frontend.trace import tracing
from etrace_bridge.frontend.tracer import Tracer, constant
from etrace_bridge.lowering import jit

# of the traced sequences: the next one is tried where a state is older than the last shows
_LENGTHS = (6, 12, 24)
_KEYS = 512
_CUTS = 8  # how many states are tried, the smallest first
_CHECKED = 9  # the length of the sequence on which a step is compared with torch
_MOVED = 0.02  # by how much weights are moved for the comparison
_LOUDER = (5.0, 30.0)  # by how much inputs are enlarged where an output is all zeros
# Inputs on which exploding models are compared; values from which on they count as such
_SMALL, _LARGE = 0.03, 1e3
FIRST = ("first_step",)
_Output = tuple[Column, TimeAxis | None, str | None]  # step by step, time axis, reduction


@dataclass
class TracedSequence:
    """`forward` of one whole sequence as a jaxpr, the structure of what it gives, and how many
    random keys it draws.

    `ranges` is what it demands of one step of the inputs that it uses as indices.
    """

    jaxpr: ClosedJaxpr
    skeleton: Any
    num_keys: int
    ranges: list[InputRange]


@dataclass
class LoopStep:
    """One step of a model that loops over time.

    Attributes:
        split: Outputs and new states in terms of inputs and old states.
        axes: Where each output tensor has its steps; None for one without.
        reductions: How each output tensor was reduced over time: `"sum"`, `"mean"`, `"last"` or
            None.
        skeleton: The output with holes for tensors.
        leaves: The states, and whether this is the first step if that matters.
        starts: For each state, what it is computed from at the first step; None if it starts as a
            constant.
        first_differs: The first step has a program of its own.
        tensor_nodes: Parameters and buffers.
        input_shapes: Shapes of one step of the inputs, with the time axis.
        batch: Batch size, or None.
        ranges: What the step demands of inputs that it uses as indices.
    """

    split: Split
    axes: tuple[TimeAxis | None, ...]
    reductions: tuple[str | None, ...]
    skeleton: Any
    leaves: list[StateLeaf]
    starts: list[Node | None]
    first_differs: bool
    tensor_nodes: list[Node]
    graph: Graph
    time_axis: int
    batch: int | None
    ranges: list[InputRange]

    def __call__(
        self,
        tensors: Sequence[Any],
        states: Sequence[Any],
        keys: Callable[[], Any],
        inputs: Sequence[Any],
    ) -> tuple[list, list]:
        """Compute outputs and new states."""
        split = self.split
        first, states = (states[-1], states[:-1]) if self.has_first else (None, states)
        known = {id(node): value for node, value in zip(self.tensor_nodes, tensors, strict=True)}
        parts = [lax.expand_dims(x, (min(self.time_axis, x.ndim),)) for x in inputs]

        def inputs_at(step: int) -> dict[int, Any]:
            return {id(self.graph.input(i, step, p.shape, p.dtype)): p for i, p in enumerate(parts)}

        chosen = list(states)
        own = (
            [*split.first_outputs, *[state.column[1] for state in split.states]]
            if self.first_differs
            else []
        )
        at_first = {**known, **inputs_at(1)}
        at_first.update(
            {id(key): keys() for key in keys_of([n for n in (*self.starts, *own) if n is not None])}
        )
        for i, (state, start) in enumerate(zip(states, self.starts, strict=True)):
            if start is not None:
                chosen[i] = self._select(first, evaluate([start], at_first)[0], state)
        here = {**known, **inputs_at(split.step)}
        here.update(
            {id(state.before): value for state, value in zip(split.states, chosen, strict=True)}
        )
        here.update({id(key): keys() for key in split.keys})
        wanted = [*split.outputs, *[state.after for state in split.states]]
        results = evaluate(wanted, here)
        if self.first_differs:
            at_start = evaluate(own, at_first)  # type: ignore[arg-type]
            results = [self._select(first, a, b) for a, b in zip(at_start, results, strict=True)]
        count = len(split.outputs)
        outputs = [
            y if axis is None else axis.select(y, 0)
            for y, axis in zip(results[:count], self.axes, strict=True)
        ]
        return outputs, [*results[count:], *([jnp.zeros_like(first)] if self.has_first else [])]

    @property
    def has_first(self) -> bool:
        """Whether a state tells that a step is the first."""
        return self.first_differs or any(start is not None for start in self.starts)

    def _select(self, first: Any, a: Any, b: Any) -> Any:
        """Choose `a` in the first step of a sequence, for each sample by itself where the batch
        axis is known.
        """
        axis = next((i for i, size in enumerate(b.shape) if size == self.batch), None)
        which = (
            jnp.all(first)
            if axis is None or first.ndim == 0
            else first.reshape([-1 if i == axis else 1 for i in range(b.ndim)])
        )
        return lax.select(jnp.broadcast_to(which, b.shape), jnp.asarray(a, b.dtype), b)


def find_loop(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    inputs: tuple,
    plan: StepPlan,
    given: tuple | None,
    batch: int | None,
) -> LoopStep:
    """Find the step of a model that consumes sequences in the plan's layout.

    Args:
        model: The torch model; it is left as it was.
        tensors: Parameters and buffers that the step may read.
        inputs: One time step of each input.
        plan: The layout, and the adapter of the root.
        given: The user's initial state of the root's state arguments.
        batch: The batch size, or None.
    """
    problem = None
    for length in _LENGTHS:
        finder = _Finder(model, tensors, inputs, plan, given, batch, length)
        try:
            return finder.find()
        except TooShort:
            problem = problem or finder.problem
    raise problem or NotSupportedError(
        f"`{type(model).__name__}.forward` reads values that are more than {_LENGTHS[-1] // 2 - 2} "
        "steps old, or its state grows with the sequence (attention over all past steps, a list "
        "of all states). A step needs a state of fixed size."
    )


class _Finder:
    """Finds the step in sequences of one length."""

    def __init__(
        self, model: nn.Module, tensors: Sequence[NamedTensor], inputs: tuple, plan: StepPlan, given: tuple | None, batch: int | None,
        length: int,
    ) -> None:  # fmt: skip
        self.model, self.tensors, self.inputs, self.plan, self.given = (
            model,
            tensors,
            inputs,
            plan,
            given,
        )
        self.batch, self.length, self.graph = batch, length, Graph()
        self.axis = 1 if plan.layout == "batch_first" else 0
        self.attempt = 0  # which of the attempts was right
        self.problem: StateError | None = None  # why the first one was not
        self.step = length // 2 + 1  # the step that is read: late enough to be like all later ones
        self.reader = Reader(self.graph, length)
        self.tensor_nodes = [
            self.graph.tensor(i, n.tensor.shape, to_jax_dtype(n.tensor.dtype), n.trained)
            for i, n in enumerate(tensors)
        ]

    def find(self) -> LoopStep:
        """Give the first step that agrees with torch, of those that `_attempts` makes."""
        traced, outputs = self._read(self.length)
        columns = [self._column(i, output) for i, output in enumerate(outputs)]
        for number, step in enumerate(self._attempts(traced, columns)):
            self.attempt = number
            found = find_difference(
                self.model, self.tensors, self.inputs, self.plan, self.given, step
            )
            if found is None:
                return step
            self.problem = self.problem or found
        # Torch drew other random numbers: what is right in evaluation mode is right here
        if traced.num_keys:
            attempts = self._attempts(traced, columns)
            return next(itertools.islice(attempts, self._attempt_in_evaluation(), None))
        raise self.problem or TooShort

    def _attempts(self, traced: TracedSequence, outputs: list[_Output]) -> Iterator[LoopStep]:
        """Make steps that may be right: with the smallest state, then with the smallest of those
        whose start is known; each with several ways to start.
        """
        columns, axes, reductions = zip(*outputs, strict=True)
        avoided: set[int] = set()
        for _ in range(_CUTS):
            split = split_steps(columns, self.step, set(self.reader.names), avoided)
            if split is None:
                return
            leaves = [
                StateLeaf(path, zeros_of(s.before), is_float(s.before) and s.after is not s.before)
                for path, s in zip(self._paths(split.states), split.states, strict=True)
            ]
            unknown = {id(s.before) for s in split.states if s.column[0] is None}
            if not (avoided and unknown):
                blank: list[Node | None] = [None] * len(leaves)
                step = LoopStep(
                    split, axes, reductions, traced.skeleton, leaves, blank, False, self.tensor_nodes, self.graph, self.axis,
                    self.batch, traced.ranges,
                )  # fmt: skip
                yield from self._starts(step)
            if not unknown:
                return
            avoided |= unknown

    def _starts(self, step: LoopStep) -> Iterator[LoopStep]:
        """Let a step start as the first step shows it, from zeros, or with a first step of its
        own.
        """
        yield self._complete(self._as_read(step))
        yield self._complete(step)
        split = step.split
        first = [*split.first_outputs, *[state.column[1] for state in split.states]]
        if all(node is not None and node.level <= 1 for node in first):
            yield self._complete(dataclasses.replace(step, first_differs=True))

    def _complete(self, step: LoopStep) -> LoopStep:
        """Add the state that tells that a step is the first, where it matters."""
        if not step.has_first:
            return step
        flag = StateLeaf(
            FIRST, torch.ones(() if self.batch is None else (self.batch,), dtype=torch.bool), False
        )
        return dataclasses.replace(step, leaves=[*step.leaves, flag])

    def _attempt_in_evaluation(self) -> int:
        """Which attempt is right in evaluation mode."""
        if not any(module.training for module in self.model.modules()):
            raise NotSupportedError(
                f"`{type(self.model).__name__}.forward` loops over time and draws random numbers "
                "in evaluation mode too, so its step cannot be compared with torch. Draw them "
                "outside and pass them as an input."
            )
        with restored(self.model, values=False):
            self.model.eval()
            finder = _Finder(
                self.model,
                self.tensors,
                self.inputs,
                self.plan,
                self.given,
                self.batch,
                self.length,
            )
            finder.find()
            return finder.attempt

    def _as_read(self, step: LoopStep) -> LoopStep:
        """Let states start as the first step shows them."""
        leaves, starts = [], []
        for leaf, state in zip(step.leaves, step.split.states, strict=True):
            start = state.column[0]
            fits = (
                start is not None
                and start.level <= 1
                and (start.shape, start.dtype) == (state.before.shape, state.before.dtype)
            )
            fixed = (
                start is not None
                and fits
                and not (start.level or start.trained or keys_of([start]))
            )
            if fixed:
                leaf = dataclasses.replace(
                    leaf, initial=to_torch(np.asarray(evaluate([start], self._values())[0]))
                )
            starts.append(start if fits and not fixed else None)
            leaves.append(leaf)
        return dataclasses.replace(step, leaves=leaves, starts=starts)

    def _values(self) -> dict[int, Any]:
        return {
            id(node): to_jax(named.tensor)
            for node, named in zip(self.tensor_nodes, self.tensors, strict=True)
        }

    # ---- outputs

    def _read(self, length: int) -> tuple[TracedSequence, list[Value]]:
        """Trace a sequence of some length and read it into the graph."""
        traced = trace_sequence(
            self.model, self.tensors, self.inputs, self.plan, self.given, length
        )
        rows = []
        for i, x in enumerate(self.inputs):
            axis = min(self.axis, x.dim())
            shape = (*x.shape[:axis], 1, *x.shape[axis:])
            rows.append(
                Row(
                    axis,
                    1,
                    tuple(
                        self.graph.input(i, t, shape, to_jax_dtype(x.dtype))
                        for t in range(1, length + 1)
                    ),
                )
            )
        drawn = [
            self.graph.make(lambda k: lax.expand_dims(k, (0,)), self.graph.random_key(i))
            for i in range(traced.num_keys)
        ]
        unused = self.graph.constant(np.zeros((1, 2), np.uint32))
        keys = Row(0, 1, (*drawn, *[unused] * (_KEYS - len(drawn))))
        self.reader.length = length
        return traced, self.reader.read(traced.jaxpr, [*self.tensor_nodes, keys, *rows])

    def _column(self, index: int, output: Value) -> _Output:
        """Give an output step by step, its time axis, and how it was reduced over time."""
        length = self.length
        if isinstance(output, Row):
            if len(output.parts) != length:
                raise NotSupportedError(
                    f"Output {index} of `{type(self.model).__name__}.forward` has "
                    f"{len(output.parts)} steps for an input of {length}. A step gives one output "
                    "for one input: return as many steps as there are, or the last one, or a sum "
                    "or mean over time."
                )
            return output.parts, TimeAxis(output.axis, output.outer, output.inner), None
        if output.level == 0:
            return (output,) * length, None, "last"
        found = self._addends(index, output)
        if found is not None:
            return found.parts, None, found.kind
        column: list[Node | None] = [None] * length
        column[-1] = output
        for shorter in (1, 2, *range(self.step, length)):
            try:
                column[shorter - 1] = self.reader.whole(self._read(shorter)[1][index])
            except Exception:
                if shorter > 2:
                    raise
        return tuple(column), None, "last"

    def _addends(self, index: int, output: Node) -> Reduced | None:
        """Give what a sum or mean adds up. A sum's addends do not depend on the length: if they do,
        it is a mean over other axes too.
        """
        found = find_addends(self.graph, output, self.reader.reductions, self.length)
        if found is None or found.kind != "sum":
            return found
        shorter = self.length - 1
        short = self.reader.whole(self._read(shorter)[1][index])
        for batch in (1, *divisors(output, self.length)):
            pair = [
                find_addends(self.graph, n, self.reader.reductions, t, batch)
                for n, t in ((output, self.length), (short, shorter))
            ]
            if all(pair) and pair[0].parts[0] is pair[1].parts[0]:  # type: ignore[union-attr]
                return pair[0]
        return None

    # ---- names

    def _paths(self, states: Sequence[State]) -> list[Path]:
        """Name states after the variables that hold them, else after their module."""
        taken: list[Path] = [to_path(name) for n in self.tensors for name in n.names]
        paths = []
        for state in states:
            counts: dict[str, int] = {}
            for node in state.column:
                for name in self.reader.names.get(id(node), ()):
                    counts[name] = counts.get(name, 0) + 1
            ranked = sorted(counts, key=lambda n: (-counts[n], n.count(SEPARATOR)))
            scope = module_scope(state.after.eqn) if state.after.eqn is not None else ""
            prefix = tuple(part for part in scope.replace("/", ".").split(".") if part)
            options = [tuple(name.split(SEPARATOR)) for name in ranked] + [
                (*prefix, f"state_{k}") for k in range(len(taken) + len(states) + 1)
            ]
            path = next(
                p for p in options if not any(p[: len(t)] == t or t[: len(p)] == p for t in taken)
            )
            taken.append(path)
            paths.append(path)
        return paths


def zeros_of(node: Node) -> torch.Tensor:
    """Make zeros of a node's shape and dtype."""
    return to_torch(np.zeros(node.shape, node.dtype))


def is_float(node: Node) -> bool:
    """Whether a node can carry a derivative."""
    return bool(jnp.issubdtype(node.dtype, jnp.inexact))


def find_difference(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    inputs: tuple,
    plan: StepPlan,
    given: tuple | None,
    step: LoopStep,
) -> StateError | None:
    """Run a step over a random sequence of another length, and torch on it and its beginnings;
    describe the first difference.

    The weights are moved a little, since a step must be right for all of them: a state that starts
    at minus a bias starts at zero while the bias is zero, and its gradient is wrong. Where the
    values explode on such numbers, so that rounding errors do too, smaller inputs decide.
    """
    steps = [tuple(random_like(x, 100 + t) for x in inputs) for t in range(_CHECKED)]
    with _moved_weights(tensors):
        for scale in (1.0, *_LOUDER):  # a spiking model that is silent agrees with everything
            problem, silent = _difference(
                model, tensors, [scaled(x, scale) for x in steps], plan, given, step
            )
            if isinstance(problem, _Exploded):
                return (
                    _difference(
                        model, tensors, [scaled(x, _SMALL) for x in steps], plan, given, step
                    )[0]
                    if scale == 1
                    else None
                )
            if problem is not None or not silent:
                return problem
        return None


@contextlib.contextmanager
def _moved_weights(tensors: Sequence[NamedTensor]) -> Iterator[None]:
    """Within this, all trained parameters differ by a few percent, and at least by a little, in
    memory of their own.
    """
    generator = torch.Generator().manual_seed(0)
    saved = [(named.tensor, named.tensor.data) for named in tensors if named.trained]
    try:
        for tensor, data in saved:
            noise = torch.randn(data.shape, generator=generator, dtype=torch.float64)
            tensor.data = data + (_MOVED * noise * data.abs().clamp(min=0.5)).to(data.dtype)
        yield
    finally:
        for tensor, data in saved:
            tensor.data = data


class _Exploded(messages.NotChained):
    """A difference between values so large that rounding errors may be the reason."""


def _difference(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    steps: list[tuple],
    plan: StepPlan,
    given: tuple | None,
    step: LoopStep,
) -> tuple[StateError | None, bool]:
    """Compare one sequence; give the first difference, and whether an output is all zeros."""
    silent = False
    values = [to_jax(named.tensor) for named in tensors]
    run = jit(lambda t, s, x: step(t, s, lambda: jnp.zeros(2, jnp.uint32), x), one_step=True)
    states, outputs = [to_jax(leaf.initial) for leaf in step.leaves], []
    for x in steps:
        now, states = run(values, states, [to_jax(v) for v in x])
        outputs.append([np.asarray(y) for y in now])
    lengths = [_CHECKED] if all(axis is not None for axis in step.axes) else [1, 2, 3, _CHECKED]
    for length in lengths:
        whole = tuple(
            torch.stack(x, min(step.time_axis, x[0].dim()))
            for x in zip(*steps[:length], strict=True)
        )
        try:
            wanted = _run_whole(model, whole, plan, given)
        except Exception:  # some models do not take sequences as short as this
            if length == _CHECKED:
                raise
            continue
        for i, (target, axis, reduction) in enumerate(
            zip(wanted, step.axes, step.reductions, strict=True)
        ):
            column, expected = (
                np.stack([y[i] for y in outputs[:length]]),
                np.asarray(to_jax(target)),
            )
            if axis is None:
                total = {"sum": column.sum(0), "mean": column.mean(0), "last": column[-1]}[
                    reduction or "last"
                ]
                pairs = [(length, total, expected)]
            else:
                pairs = [(t + 1, column[t], axis.select(expected, t)) for t in range(length)]
            for number, found, value in pairs:
                if not _agree(found, value):
                    problem = not_chained(
                        type(model).__name__,
                        i,
                        number,
                        [".".join(leaf.path) for leaf in step.leaves],
                    )
                    return (
                        problem if np.abs(expected).max() < _LARGE else _Exploded(str(problem))
                    ), False
            silent |= length == _CHECKED and not np.any(expected)
    return None, silent


def _run_whole(
    model: nn.Module, whole: tuple, plan: StepPlan, given: tuple | None
) -> list[torch.Tensor]:
    """Run torch on a whole sequence from the initial state; give the output tensors."""
    with (
        restored(model, values=False),
        torch.no_grad(),
        same_draws(lambda: jnp.zeros(2, jnp.uint32)),
    ):
        returned = plan.call_from(model, whole, given)
        return [t.detach() for _, t in flatten_state(plan.output_of(model, returned))[0]]


def _agree(found: np.ndarray, value: np.ndarray) -> bool:
    scale = max(1.0, float(np.abs(value).max(initial=0.0)))
    tolerance = 1e-9 if value.dtype == np.float64 else 1e-4
    return found.shape == value.shape and np.allclose(
        found, value, rtol=0, atol=tolerance * scale, equal_nan=True
    )


def not_chained(model: str, output: int, step: int, states: list[str]) -> StateError:
    """A step that does not give what the whole sequence gives."""
    return messages.NotChained(
        f"`{model}.forward` takes sequences, and the step that was found in it does not give what "
        f"it gives for a whole sequence: output {output} differs from step {step} on. States: "
        f"{', '.join(f'`{s}`' for s in states) or 'none'}. The loop depends on the length of the "
        "sequence, on the step's number or on something that is in no tensor. Write one time step "
        "as `forward(x, state) -> (output, state)`, or pass `wrap(model, sequence=False)` if "
        "`forward` takes one time step."
    )


def buffer_in_loop(model: str, names: list[str]) -> NotSupportedError:
    """A loop over time that writes to the model's tensors."""
    listed = ", ".join(f"`{name}`" for name in names)
    return NotSupportedError(
        f"`{model}.forward` loops over time and writes to {listed} on the way (running statistics "
        "in training mode, for one). The step that is found in a loop does not carry such writes. "
        "Call `model.eval()`, or put those layers into evaluation mode, before `wrap`."
    )


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
            with noted_variables(model) if length >= _LENGTHS[0] else contextlib.nullcontext():
                returned = plan.call_from(model, args, given)
            written = [
                n.name
                for n, value in zip(tensors, values, strict=True)
                if tracer.read(n.tensor) is not value
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
    shapes += [jax.ShapeDtypeStruct((_KEYS, 2), jnp.uint32), *[whole(x) for x in inputs]]
    closed, ranges = trace_with_ranges(run, *shapes)
    first = len(shapes) - len(inputs)
    of_step = [
        _range_of_step(r, r.position - first, inputs[r.position - first], length, axis)
        for r in ranges
        if r.position >= first
    ]
    return TracedSequence(closed, found["skeleton"], found["keys"], of_step)


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
