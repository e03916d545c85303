"""The States of a module: their names, their arrays, and which belong to a sequence.

A State that belongs to a sequence starts anew with each; the others (weights, running statistics,
random keys) belong to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import numpy as np

from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.frontend import BridgedModule


def state_names(values: Sequence[tuple[Path, Any]]) -> list[str]:
    """Name every array in the values of States."""
    names = []
    for path, value in values:
        keys = [k for k, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
        # A quantity is a tree with its number as the only leaf; that leaf has the State's name
        is_quantity = len(keys) == 1 and isinstance(
            keys[0][-1] if keys[0] else None, jax.tree_util.FlattenedIndexKey
        )
        names += [show_path(path) + ("" if is_quantity else jax.tree_util.keystr(k)) for k in keys]
    return names


def array_of(state: brainstate.State) -> Any:
    """Return the array of a hidden state; that of a quantity is without its unit."""
    return jax.tree.leaves(state.value)[0]


def set_array(state: brainstate.State, array: Any) -> None:
    """Put an array into a hidden state, which keeps its unit."""
    state.value = jax.tree.unflatten(jax.tree.structure(state.value), [array])


def hidden_values(net: brainstate.nn.Module) -> dict[Path, Any]:
    """Return the values of a module's hidden states by path."""
    return {path: state.value for path, state in net.states(brainstate.HiddenState).items()}


def set_hidden_values(net: brainstate.nn.Module, values: dict[Path, Any]) -> None:
    """Put values into the hidden states at their paths."""
    for path, state in net.states(brainstate.HiddenState).items():
        if path in values:
            state.value = values[path]


def is_key(x: Any) -> bool:
    """Return whether an array is a random key."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def has_equal_rows(x: Any, batch: int | None) -> bool:
    """Return whether an array holds the same for every batch element, or has no batch axis."""
    if is_key(x) or np.shape(x)[:1] != (batch,):
        return True
    return bool((np.asarray(x) == np.asarray(x)[:1]).all())


def persistent_paths(net: brainstate.nn.Module) -> set[Path] | None:
    """Return the paths of a torch model's parameters, buffers and random key; None for others."""
    if not isinstance(net, BridgedModule):
        return None
    names = {name for name, _ in net.model.named_buffers(remove_duplicate=False)}
    names |= {name for name, _ in net.model.named_parameters(remove_duplicate=False)}
    return {tuple(name.split(".")) for name in names} | {("rng_key",)}


def resets(path: Path | None, state: brainstate.State, persistent: set[Path] | None) -> bool:
    """Return whether a State that is neither weight nor hidden state belongs to a sequence."""
    if persistent is not None:
        return path not in persistent
    return isinstance(state, brainstate.ShortTermState)


def belongs_to_sequence(
    path: Path | None, state: brainstate.State, persistent: set[Path] | None
) -> bool:
    """Return whether a State belongs to a sequence rather than to the model."""
    if isinstance(state, brainstate.ParamState):
        return False
    return isinstance(state, brainstate.HiddenState) or resets(path, state, persistent)
