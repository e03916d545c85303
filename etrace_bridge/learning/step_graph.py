"""The graph of a model's step on given inputs, with states that fit them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import brainstate
import jax
import numpy as np

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.frozen import FrozenStep
from etrace_bridge.learning.module_states import (
    belongs_to_sequence,
    hidden_values,
    persistent_paths,
    set_hidden_values,
)


def fit_bridged_states(
    net: BridgedModule, examples: Sequence[np.ndarray], batch: int | None
) -> None:
    """Make the states of a bridged model fit inputs like these, if they do not."""
    steps = [jax.numpy.asarray(x) for x in examples]  # NumPy's float64 may mean any float type
    with contextlib.suppress(StateError):
        if any(h.ndim and h.shape[0] != batch for h in net.hidden_values()[:1]):
            net.init_state(batch_size=batch)
    try:
        net.ensure_state(*steps)
    except InputError:  # made for inputs of another shape
        net.init_state(batch_size=batch)
        net.ensure_state(*steps)


def make_graph(
    net: brainstate.nn.Module,
    examples: Sequence[np.ndarray],
    keep: Sequence[np.ndarray],
    batch: int | None,
) -> tuple[ETraceGraph, int | None]:
    """Compile the graph of a model's step.

    Args:
        net: the model; its states are made or changed to fit the inputs.
        examples: one time step of each input.
        keep: the argument of `FrozenStep`, or nothing.
        batch: size of the inputs' first axis.

    Returns:
        The graph, and the size of the batch; None if inputs and states have no batch axis.
    """
    if isinstance(net, BridgedModule):
        fit_bridged_states(net, examples, batch)
        return _graph(net, examples, keep, batch), batch
    return _graph_of_plain(net, examples, keep, batch)


def _graph(
    net: brainstate.nn.Module,
    examples: Sequence[np.ndarray],
    keep: Sequence[np.ndarray],
    batch: int | None,
) -> ETraceGraph:
    persistent = persistent_paths(net)
    if keep:
        belongs = lambda path, state: belongs_to_sequence(path, state, persistent)
        net = FrozenStep(net, batch, belongs)
    args = map(jax.numpy.asarray, [*examples, *keep])
    return compile_etrace_graph(net, *args, include_hidden_perturb=False)


def _graph_of_plain(
    net: brainstate.nn.Module,
    examples: Sequence[np.ndarray],
    keep: Sequence[np.ndarray],
    batch: int | None,
) -> tuple[ETraceGraph, int | None]:
    """Compile a brainstate module: use its states if a step runs on them, or make new ones.

    New states must have the rank of the old ones: the user decides whether a state without a batch
    axis gets one.
    """
    x, before = examples[0], hidden_values(net)
    if x.ndim == 1 and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        batch = None  # these are the features of one element, not a batch of numbers
    failure: Exception | None = None
    if before:
        try:
            graph = _graph(net, examples, keep, batch)
        except Exception as error:  # a batch that does not fit fails anywhere in the model's code
            failure = error
        else:
            is_batched = all(v.shape[:1] == x.shape[:1] for v in jax.tree.leaves(before))
            return graph, batch if is_batched else None
        set_hidden_values(net, before)
    if batch is None:
        brainstate.nn.init_all_states(net)
    else:
        brainstate.nn.init_all_states(net, batch_size=batch)
    after = hidden_values(net)
    if any(
        jax.tree.map(np.ndim, after[path]) != jax.tree.map(np.ndim, value)
        for path, value in before.items()
    ):
        set_hidden_values(net, before)
        shapes = ", ".join(str(np.shape(v)) for v in jax.tree.leaves(list(before.values())))
        raise InputError(
            f"The hidden states have shapes {shapes}, and a step on inputs "
            f"{[x.shape for x in examples]} does not run on them ({failure}). Make states for this "
            f"batch with `brainstate.nn.init_all_states(net, batch_size={batch})`, or change the "
            "input."
        ) from failure
    return _graph(net, examples, keep, batch), batch
