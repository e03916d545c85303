"""Finding the step of a model whose `forward` loops over time: traced for a few lengths, split, and
put together as one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from etrace_bridge._errors import BridgeError, NotSupportedError, StateError
from etrace_bridge._jax_compat import module_scope
from etrace_bridge.frontend.borders import to_jax, to_torch
from etrace_bridge.frontend.later_steps import MANY_STEPS, CountedCalls, first_uneven_length
from etrace_bridge.frontend.layout import repeat_in_time
from etrace_bridge.frontend.names import NamedTensor, Path, to_path
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.slots import StateLeaf
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.time.comparison import find_difference
from etrace_bridge.frontend.time.cut import origin_of
from etrace_bridge.frontend.time.graph import Graph, Node, evaluate, keys_of
from etrace_bridge.frontend.time.reduction import divide_by_count, divisors, find_addends
from etrace_bridge.frontend.time.rows import Reduced, Row, Value
from etrace_bridge.frontend.time.sequences import Reader
from etrace_bridge.frontend.time.split import (
    Column,
    State,
    TooShort,
    UnlikeSteps,
    check_joins,
    fixed_output,
    grows,
    split_steps,
)
from etrace_bridge.frontend.time.step import LoopStep
from etrace_bridge.frontend.time.traced import KEYS, LENGTHS, TracedSequence, trace_sequence
from etrace_bridge.frontend.time.variables import SEPARATOR
from etrace_bridge.frontend.time_axis import TimeAxis

_CUTS = 8  # how many states are tried, the smallest first
FIRST = ("first_step",)
_Output = tuple[Column, TimeAxis | None, str | None]  # step by step, time axis, reduction


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
    problem: BridgeError | None = None
    for length in LENGTHS:
        finder = _Finder(model, tensors, inputs, plan, given, batch, length)
        try:
            step = finder.find()
            finder.check_longer()
            return step
        except TooShort:
            problem = problem or finder.problem
        except UnlikeSteps as error:  # steps that still read what stands before the sequence
            problem = problem or error
    raise problem or grows(type(model).__name__, finder.outputs)  # type: ignore[possibly-undefined]


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
        self.outputs: list[Node] = []  # of the last step
        self.step = length // 2 + 1  # the step that is read: late enough to be like all later ones
        self.reader = Reader(self.graph, length)
        self.tensor_nodes = [
            self.graph.tensor(i, n.tensor.shape, to_jax_dtype(n.tensor.dtype), n.trained)
            for i, n in enumerate(tensors)
        ]

    def find(self) -> LoopStep:
        """Return the first step that agrees with torch, of those that `_attempts` makes."""
        traced, outputs = self._read(self.length)
        columns = [self._column(i, output) for i, output in enumerate(outputs)]
        self.outputs = [node for column, _, _ in columns if (node := column[-1]) is not None]
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

    def check_longer(self) -> None:
        """Raise if a longer sequence has steps that are not like the one that was found."""

        def count(length: int) -> Counter[Any]:
            sequences = repeat_in_time(self.inputs, self.plan.layout, length)
            with restored(self.model, values=False), torch.no_grad(), CountedCalls() as calls:
                self.plan.call_from(self.model, sequences, self.given)
            return calls.counts

        unlike = first_uneven_length(count, self.length)
        if unlike is None:
            return
        # The steps may differ near the end of a sequence or far from it
        for length in (unlike + 1, min(2 * unlike + 2, MANY_STEPS)):
            with contextlib.suppress(TooShort):
                _Finder(
                    self.model,
                    self.tensors,
                    self.inputs,
                    self.plan,
                    self.given,
                    self.batch,
                    length,
                ).find()

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
                StateLeaf(
                    path, _zeros_of(s.before), _is_float(s.before) and s.after is not s.before
                )
                for path, s in zip(self._paths(split.states), split.states, strict=True)
            ]
            # Earlier values of these too: with the inputs since, they would be cheaper than a state
            unknown = {
                id(origin_of(node))
                for s in split.states
                if s.column[0] is None
                for node in s.column[: self.step]
                if node is not None
            }
            if not (avoided and unknown):
                blank: list[Node | None] = [None] * len(leaves)
                step = LoopStep(
                    split, axes, reductions, traced.skeleton, leaves, blank, False, self.tensor_nodes, self.graph, self.axis,
                    self.batch, traced.ranges, traced.starts, traced.coarse,
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
            yield self._complete(
                dataclasses.replace(step, first_differs=True, start_is_guessed=False)
            )

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
        leaves, starts, guessed = [], [], not step.split.first_is_alike
        for leaf, state in zip(step.leaves, step.split.states, strict=True):
            start = state.column[0]
            here = state.before.shape, state.before.dtype
            if start is None or start.level > 1 or (start.shape, start.dtype) != here:
                guessed, start = True, None
            elif not (start.level or start.trained or keys_of([start])):
                (initial,) = evaluate([start], self._values())
                leaf, start = dataclasses.replace(leaf, initial=to_torch(np.asarray(initial))), None
            starts.append(start)
            leaves.append(leaf)
        return dataclasses.replace(step, leaves=leaves, starts=starts, start_is_guessed=guessed)

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
        rows = [self._input_row(i, length) for i in range(len(self.inputs))]
        drawn = [
            self.graph.make(lambda k: lax.expand_dims(k, (0,)), self.graph.random_key(i))
            for i in range(traced.num_keys)
        ]
        unused = self.graph.constant(np.zeros((1, 2), np.uint32))
        keys = Row(0, 1, (*drawn, *[unused] * (KEYS - len(drawn))))
        self.reader.length = length
        return traced, self.reader.read(traced.jaxpr, [*self.tensor_nodes, keys, *rows])

    def _input_row(self, index: int, length: int) -> Row:
        """Return one input, step by step."""
        x = self.inputs[index]
        axis, dtype = min(self.axis, x.dim()), to_jax_dtype(x.dtype)
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        steps = range(1, length + 1)
        return Row(axis, 1, tuple(self.graph.input(index, t, shape, dtype) for t in steps))

    def _column(self, index: int, output: Value) -> _Output:
        """Return an output step by step, its time axis, and how it was reduced over time."""
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
        check_joins(output, self.reader.joins)
        by_length = {length: output}
        for shorter in (1, 2, *range(self.step, length)):
            try:
                by_length[shorter] = self.reader.whole(self._read(shorter)[1][index])
            except Exception:
                if shorter > 2:
                    raise
        if by_length[length - 1] is output:
            raise fixed_output(type(self.model).__name__, index, output, length)
        by_length = self._with_count(by_length)
        return tuple(by_length.get(t) for t in range(1, length + 1)), None, "last"

    def _with_count(self, by_length: dict[int, Node]) -> dict[int, Node]:
        """Let means over time in an output count the steps. The shortest sequences may be read in
        another way (a join of two values looks like one of two steps), and are left out then.
        """
        longest, clock = max(by_length), self._input_row(0, self.length).parts
        late = {length: node for length, node in by_length.items() if length > 2}
        for some in (by_length, late):
            found = divide_by_count(self.graph, some, self.reader.reductions, clock)
            if found[longest] is not by_length[longest]:
                return found
        return by_length

    def _addends(self, index: int, output: Node) -> Reduced | None:
        """Return what a sum or mean adds up, if a shorter sequence is reduced in the same way. A
        sum's addends do not depend on the length: if they do, it is a mean over other axes too.
        """
        found = find_addends(self.graph, output, self.reader.reductions, self.length)
        others = divisors(output, self.length)
        if found is None or (found.kind == "total" and not others):
            return None
        shorter = self.length - 1
        short = self.reader.whole(self._read(shorter)[1][index])
        for batch in (
            1,
            *others,
            math.inf,
        ):  # the last: a number that only happens to be the length
            long, brief = [
                find_addends(self.graph, n, self.reader.reductions, t, batch)
                for n, t in ((output, self.length), (short, shorter))
            ]
            if long is None or brief is None or long.kind != brief.kind:
                continue
            if long.kind == "mean" or (long.kind == "sum" and long.parts[0] is brief.parts[0]):
                return long
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


def _zeros_of(node: Node) -> torch.Tensor:
    """Make zeros of a node's shape and dtype."""
    return to_torch(np.zeros(node.shape, node.dtype))


def _is_float(node: Node) -> bool:
    """Return whether a node can carry a derivative."""
    return bool(jnp.issubdtype(node.dtype, jnp.inexact))
