"""The brainstate States of a bridged module, in a tree by the torch names: parameters, buffers,
recurrent states and the random key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import brainstate
import jax
import torch

from etrace_bridge.frontend import messages
from etrace_bridge.frontend.borders import held_shape, to_real_jax, to_torch
from etrace_bridge.frontend.core import Core
from etrace_bridge.frontend.names import Path, to_path, versions_of
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.slots import StateLeaf
from etrace_bridge.frontend.step import TracedStep
from etrace_bridge.frontend.tree import insert, lookup, outside_traces, remove

KEY_PATH: Path = ("rng_key",)


class BufferState(brainstate.State):
    """A tensor that a step reads or carries without training it: a buffer, a frozen parameter,
    running statistics.
    """


class KeyState(brainstate.State):
    """The random key of a bridged module, split at each random op."""


def insert_tensors(core: Core, tree: dict[str, Any]) -> None:
    """Make a state for every parameter and buffer that a step can read, unless there is one."""
    for named in core.step_tensors:
        if lookup(tree, to_path(named.name)) is None:
            kind = brainstate.ParamState if named.trained else BufferState
            insert(tree, to_path(named.name), outside_traces(kind(to_real_jax(named.tensor))))


def adopt_plan(core: Core, tree: dict[str, Any], plan: StepPlan, made: Sequence[Path]) -> None:
    """Fit the tree to the states of a plan; states of the previous plan (`made`) that fit keep
    their values.
    """
    old = {path: lookup(tree, path) for path in made}
    for path, state in old.items():
        if not (isinstance(state, BufferState) and path in core.tensor_paths):
            remove(tree, path)
    insert_tensors(core, tree)
    for leaf in plan.leaves:
        kind = _state_kind(leaf)
        state: Any = old.get(leaf.path)
        if type(state) is not kind or state.value.shape != held_shape(leaf.initial):
            state = outside_traces(kind(to_real_jax(leaf.initial)))
        insert(tree, leaf.path, state, replace=BufferState)
    if plan.uses_random and lookup(tree, KEY_PATH) is None:
        key = outside_traces(KeyState(jax.random.PRNGKey(core.options.seed)))
        insert(tree, KEY_PATH, key)


def _state_kind(leaf: StateLeaf) -> type[brainstate.State]:
    """Return the kind of a state; a complex one is a group of two hidden states, its real and its
    imaginary part.
    """
    if not leaf.hidden:
        return BufferState
    return brainstate.HiddenGroupState if leaf.initial.is_complex() else brainstate.HiddenState


def tensor_values(
    core: Core,
    tree: dict[str, Any],
    step: TracedStep,
    instead: Mapping[str, Any] = MappingProxyType({}),
) -> list[Any]:
    """Read the parameters and buffers that a step reads, and touch no others."""
    return [
        instead[named.name] if named.name in instead else lookup(tree, to_path(named.name)).value
        for named, used in zip(core.step_tensors, step.used_tensors, strict=True)
        if used
    ]


# ---- torch state dicts


def torch_state_dict(core: Core, tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the current parameters and buffers as copies, under all their torch names."""
    current: dict[str, torch.Tensor] = {}
    for named in core.tensors:
        state = lookup(tree, to_path(named.name))
        same = isinstance(state, brainstate.State) and state.value.shape == held_shape(named.tensor)
        value = (
            to_torch(state.value, named.tensor).to(named.tensor.dtype)
            if same
            else named.tensor.detach().clone()
        )
        current.update(dict.fromkeys(named.names, value))
    return {name: current[name] for name in core.model.state_dict() if name in current}


def load_torch_state_dict(
    core: Core, tree: dict[str, Any], state_dict: Mapping[str, torch.Tensor], strict: bool
) -> None:
    """Take parameters and buffers from a torch state dict."""
    own = torch_state_dict(core, tree)
    core.versions_read = versions_of(core.tensors)
    missing, unexpected = sorted(set(own) - set(state_dict)), sorted(set(state_dict) - set(own))
    if strict and (missing or unexpected):
        raise messages.wrong_names(missing, unexpected)
    for named in core.tensors:
        given = [state_dict[name] for name in named.names if name in state_dict]
        state = lookup(tree, to_path(named.name))
        if not given or not isinstance(state, brainstate.State):
            continue
        if tuple(given[0].shape) != tuple(named.tensor.shape):
            raise messages.wrong_shape(named.name, tuple(given[0].shape), tuple(named.tensor.shape))
        if given[0].is_complex() != named.tensor.is_complex():
            raise messages.wrong_kind(named.name, given[0].dtype, named.tensor.dtype)
        if state.value.shape == held_shape(named.tensor):
            state.value = to_real_jax(given[0]).astype(state.value.dtype)
