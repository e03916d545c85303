"""Saves a learner: everything that it holds, by name.

`checkpoint_files` writes and reads the files, `checkpoint_restore` puts what they contain into a
new learner, and `checkpoint_facts` checks the facts that are stored beside the arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
import torch

from etrace_bridge._errors import NonFiniteError
from etrace_bridge.frontend import BridgedModule, to_torch
from etrace_bridge.learning.checkpoint_arrays import as_tensor
from etrace_bridge.learning.checkpoint_files import write_checkpoint
from etrace_bridge.learning.checkpoint_packing import Tensors
from etrace_bridge.learning.checkpoint_sharded import write_sharded
from etrace_bridge.learning.checkpoint_torch import pack_torch_optimizer, plain_group
from etrace_bridge.learning.module_states import state_names
from etrace_bridge.rules import Rule

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner
    from etrace_bridge.learning.runtime import Runtime
    from etrace_bridge.learning.store import Store

# The beginning of the names of weights and buffers that are stored beside other arrays
WEIGHT = "weight "
NEVER_NAN = ("parameter ", "hidden state ", "trace ")  # what the guard keeps finite


# -- what is saved --------------------------------------------------------------------------------


def save_learner(learner: OnlineLearner, path: str | os.PathLike) -> Path:
    """Write a learner.

    Raises before anything is written if a guarded learner holds NaN.
    """
    runtime, store = learner.runtime, learner.runtime.store
    runtime.watch.look()
    store.lend()  # this also reads what was changed in the model
    named = named_arrays(store)
    if runtime.options.guard:
        bad = names_with_nan(named)
        if bad:
            raise NonFiniteError(
                f"The learner is not saved: there is NaN in {', '.join(bad)}. Reset it, or load an "
                "older checkpoint."
            )
    held, facts = _facts(learner)
    if store.placement.spans_processes:
        weights = {f"{WEIGHT}{name}": tensor for name, tensor in _weights(runtime).items()}
        return write_sharded(path, named, weights | held, facts)
    return write_checkpoint(
        path, _weights(runtime), {name: as_tensor(x) for name, x in named.items()} | held, facts
    )


def _facts(learner: OnlineLearner) -> tuple[Tensors, dict[str, Any]]:
    """Return what a checkpoint holds besides weights and state: further arrays, and facts."""
    runtime, store = learner.runtime, learner.runtime.store
    arrays: Tensors = {}
    is_torch = isinstance(runtime.optimizer, torch.optim.Optimizer)
    facts: dict[str, Any] = {
        "rule": {"name": learner.rule.name, "options": rule_options(learner.rule)},
        "steps": store.steps,
        "updates": store.updates,
        "chunk": runtime.options.chunk,
        "reduction": runtime.options.reduction,
        "inputs": store.compiled.signature if store.started else None,
        "in_stream": store.stream is not None,
        "history": None if learner.history is None else dataclasses.asdict(learner.history),
        "fit": None,
        "optimizer": type(runtime.optimizer).__name__ if is_torch else None,
        "groups": [plain_group(g) for g in runtime.optimizer.param_groups] if is_torch else None,
        "torch_optimizer": None,
        "versions": _versions(),
    }
    if runtime.torch_update is not None:
        held, facts["torch_optimizer"] = pack_torch_optimizer(runtime)
        arrays |= held
    place = learner.place_in_fit
    if place is not None and place.epoch:
        held, facts["fit"] = place.pack()
        arrays |= held
    return arrays, facts


def names_with_nan(arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays (JAX or torch) that hold NaN and must not."""

    def has_nan(x: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.is_floating_point() and bool(torch.isnan(x).any())
        return bool(jnp.issubdtype(x.dtype, jnp.floating)) and bool(jnp.isnan(x).any())

    return [n for n, x in arrays.items() if n.startswith(NEVER_NAN) and has_nan(x)]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("etrace-bridge", "torch", "jax"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _weights(runtime: Runtime) -> Tensors:
    """Return the content of the weights file.

    That is the state dict of a torch model, or the parameters of a brainstate module.
    """
    if isinstance(runtime.net, BridgedModule):
        return {name: t.clone().contiguous() for name, t in runtime.net.state_dict().items()}
    return {name: to_torch(x) for name, x in module_parameters(runtime.net)}


def module_parameters(net: brainstate.nn.Module) -> list[tuple[str, Any]]:
    """Return name and value of every array in a brainstate module's parameters."""
    states = [(path, state.value) for path, state in net.states(brainstate.ParamState).items()]
    return list(
        zip(state_names(states), jax.tree.leaves([value for _, value in states]), strict=True)
    )


def named_arrays(store: Store) -> dict[str, Any]:
    """Return all arrays of a learner by names that do not depend on positions in a list."""
    if not store.started:
        return {}
    state, compiled = store.state, store.compiled
    named = {f"parameter {n}": x for n, x in compiled.by_weight_name(state.theta).items()}
    named |= {
        f"hidden state {n}": x for n, x in zip(compiled.hidden_names, state.hidden, strict=True)
    }
    named |= {f"carried {n}": x for n, x in zip(compiled.other_names, state.other, strict=True)}
    for kind, tree in (("trace", state.trace), ("optimizer", state.opt), ("alarm", state.alarm)):
        named |= {
            f"{kind} {jax.tree_util.keystr(keys)}": x
            for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
    return named


def rule_options(rule: Rule) -> dict[str, Any] | None:
    """Return the options that make the rule, if they are plain values."""
    options = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if f.init}
    try:
        return json.loads(json.dumps(options))
    except TypeError:
        return None


# -- loading --------------------------------------------------------------------------------------
