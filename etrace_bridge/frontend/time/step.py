"""One step of a model that loops over time, as a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from torch import nn

from etrace_bridge.frontend.ops.ranges import InputRange
from etrace_bridge.frontend.slots import StateLeaf
from etrace_bridge.frontend.time.graph import Graph, Node, evaluate, keys_of
from etrace_bridge.frontend.time.split import Split
from etrace_bridge.frontend.time_axis import TimeAxis


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
        start_is_guessed: A state starts from zeros though no first step shows them.
        tensor_nodes: Parameters and buffers.
        input_shapes: Shapes of one step of the inputs, with the time axis.
        batch: Batch size, or None.
        ranges: What the step demands of inputs that it uses as indices.
        start_attributes: Attributes `(path, module, name)` whose values the sequence starts from.
        coarse: Some values are computed in less than double precision.
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
    start_attributes: list[tuple[str, nn.Module, str]]
    coarse: bool
    start_is_guessed: bool = True

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
        chosen = list(states)
        own = (
            [*split.first_outputs, *[state.column[1] for state in split.states]]
            if self.first_differs
            else []
        )
        at_first = self.values_at(1, tensors, inputs)
        at_first.update(
            {id(key): keys() for key in keys_of([n for n in (*self.starts, *own) if n is not None])}
        )
        for i, (state, start) in enumerate(zip(states, self.starts, strict=True)):
            if start is not None:
                chosen[i] = self._select(first, evaluate([start], at_first)[0], state)
        here = self.values_at(split.step, tensors, inputs)
        here.update(
            {id(state.before): value for state, value in zip(split.states, chosen, strict=True)}
        )
        here.update({id(key): keys() for key in split.keys})
        wanted = [*split.outputs, *[state.after for state in split.states]]
        results = evaluate(wanted, here)
        if self.first_differs:
            at_start = evaluate(cast(list[Node], own), at_first)
            results = [self._select(first, a, b) for a, b in zip(at_start, results, strict=True)]
        count = len(split.outputs)
        outputs = [
            y if axis is None else axis.select(y, 0)
            for y, axis in zip(results[:count], self.axes, strict=True)
        ]
        return outputs, [*results[count:], *([] if first is None else [jnp.zeros_like(first)])]

    def values_at(self, step: int, tensors: Sequence[Any], inputs: Sequence[Any]) -> dict[int, Any]:
        """Return the values of parameters, buffers and the inputs of a step, by their nodes' `id`."""
        known = {id(node): value for node, value in zip(self.tensor_nodes, tensors, strict=True)}
        for i, x in enumerate(inputs):
            part = lax.expand_dims(x, (min(self.time_axis, x.ndim),))
            known[id(self.graph.input(i, step, part.shape, part.dtype))] = part
        return known

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
