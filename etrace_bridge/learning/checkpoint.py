"""Checkpoints: everything that a learner holds, by name, and how it gets into a new learner.

`checkpoint_files` writes and reads the files, `checkpoint_facts` says what besides arrays stands in
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import (
    BridgeError,
    CheckpointError,
    InputError,
    NonFiniteError,
    StateError,
)
from etrace_bridge.frontend import BridgedModule, to_jax, to_torch
from etrace_bridge.learning.checkpoint_arrays import as_tensor, compare, like, raise_differences
from etrace_bridge.learning.checkpoint_facts import check_facts
from etrace_bridge.learning.checkpoint_files import Tensors, read_checkpoint, write_checkpoint
from etrace_bridge.learning.checkpoint_sharded import (
    is_sharded,
    read_host,
    read_state,
    write_sharded,
)
from etrace_bridge.learning.checkpoint_torch import (
    pack_torch_optimizer,
    plain_group,
    restore_groups,
    unpack_torch_optimizer,
)
from etrace_bridge.learning.module_states import state_names
from etrace_bridge.learning.place_in_fit import PlaceInFit
from etrace_bridge.rules import Rule, make_rule

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner
    from etrace_bridge.learning.runtime import Runtime
    from etrace_bridge.learning.store import Store

# Begins the names of the model's weights and buffers, where they lie beside other arrays
WEIGHT = "weight "
NEVER_NAN = ("parameter ", "hidden state ", "trace ")  # what the guard keeps finite


# -- what is saved --------------------------------------------------------------------------------


def save_learner(learner: OnlineLearner, path: str | os.PathLike) -> Path:
    """Writes a learner; raises before anything is written if it holds NaN and is guarded against
    it.
    """
    runtime, store = learner.runtime, learner.runtime.store
    runtime.watch.look()
    store.lend()  # which also takes back what was changed in the model
    named = named_arrays(store)
    if runtime.options.guard:
        bad = _with_nan(named)
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
    """What a checkpoint holds besides weights and state: further arrays, and facts."""
    runtime, store = learner.runtime, learner.runtime.store
    arrays: Tensors = {}
    is_torch = isinstance(runtime.optimizer, torch.optim.Optimizer)
    facts: dict[str, Any] = {
        "rule": {"name": learner.rule.name, "options": _rule_options(learner.rule)},
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


def _with_nan(arrays: Mapping[str, Any]) -> list[str]:
    """Names of the arrays (JAX or torch) that must not hold NaN and do."""

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
    """What the weights file holds: a torch model's state dict, or a brainstate module's parameters."""
    if isinstance(runtime.net, BridgedModule):
        return {name: t.clone().contiguous() for name, t in runtime.net.state_dict().items()}
    return {name: to_torch(x) for name, x in _parameters(runtime.net)}


def _parameters(net: brainstate.nn.Module) -> list[tuple[str, Any]]:
    """Name and value of every array in a brainstate module's parameters."""
    states = [(path, state.value) for path, state in net.states(brainstate.ParamState).items()]
    return list(
        zip(state_names(states), jax.tree.leaves([value for _, value in states]), strict=True)
    )


def named_arrays(store: Store) -> dict[str, Any]:
    """All arrays of a learner by a name that does not depend on their position in a list."""
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


def _rule_options(rule: Rule) -> dict[str, Any] | None:
    """The rule's options, if they are plain values."""
    options = dataclasses.asdict(rule) if dataclasses.is_dataclass(rule) else {}
    try:
        return json.loads(json.dumps(options))
    except TypeError:
        return None


# -- loading --------------------------------------------------------------------------------------


def read_learner(path: str | os.PathLike) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Weights, other arrays and facts of a checkpoint that is whole; of several processes', arrays
    without the state.
    """
    if is_sharded(path):
        arrays, facts = read_host(path)
        check_facts(facts)
        weights = {n.removeprefix(WEIGHT): t for n, t in arrays.items() if n.startswith(WEIGHT)}
        return weights, {n: t for n, t in arrays.items() if not n.startswith(WEIGHT)}, facts
    weights, arrays, facts = read_checkpoint(path)
    check_facts(facts)
    for name, weight in weights.items():
        array = arrays.get(f"parameter {name}")
        # as the learner holds it
        weight = torch.view_as_real(weight) if weight.is_complex() else weight
        if array is not None and (
            array.shape != weight.shape or not _equal(array, weight.to(array.dtype))
        ):
            raise CheckpointError(
                f"The two files of the checkpoint {os.fspath(path)!r} disagree about the parameter "
                f"`{name}`."
            )
    return weights, arrays, facts


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.all((a == b) | (torch.isnan(a) & torch.isnan(b))))


def rule_of(facts: Mapping[str, Any], rule: str | Rule | None) -> Rule:
    """The rule to go on with: the checkpoint's, or the given one if it is the same."""
    saved = facts["rule"]
    if rule is None:
        if saved["options"] is None:
            raise InputError(
                f"The options of the rule {saved['name']!r} cannot be stored. Pass `rule=` to "
                "`load`."
            )
        return _saved_rule(saved)
    given = make_rule(rule)
    options = _rule_options(given)
    if given.name != saved["name"] or (
        options is not None and saved["options"] is not None and options != saved["options"]
    ):
        raise StateError(
            "The checkpoint does not fit:\n"
            f"  rule: {saved['name']} {saved['options']} in the checkpoint, {given.name} {options} "
            "given.\n"
            "Leave `rule` out to go on with the checkpoint's."
        )
    return given


def _saved_rule(saved: Mapping[str, Any]) -> Rule:
    plain = make_rule(saved["name"])
    wrong = CheckpointError(
        f"The checkpoint's facts are wrong: the rule {saved['name']!r} has no options "
        f"{saved['options']}."
    )
    known = _rule_options(plain) or {}
    if set(known) != set(saved["options"]):
        raise wrong
    for name, value in saved["options"].items():
        default = known[name]
        if (
            isinstance(value, bool) != isinstance(default, bool)
            and default is not None
            and value is not None
        ):
            raise wrong
    try:
        return dataclasses.replace(plain, **saved["options"])  # pyright: ignore[reportArgumentType]
    except BridgeError:
        raise
    except Exception as error:
        raise wrong from error


def restore_learner(
    learner: OnlineLearner,
    path: str | os.PathLike,
    weights: Tensors,
    arrays: Tensors,
    facts: dict[str, Any],
) -> None:
    """Puts a checkpoint into a new learner; raises with a list if it does not fit, and leaves model
    and optimizer as they were.
    """
    runtime, store = learner.runtime, learner.runtime.store
    with _undo_on_error(runtime):
        if runtime.options.guard and _with_nan(arrays):
            raise StateError(
                f"The checkpoint holds NaN in {', '.join(_with_nan(arrays))}; it was saved with "
                "`guard=False`. Load it with `guard=False` if you want it nevertheless."
            )
        _restore_weights(runtime, weights)
        restore_groups(runtime.optimizer, facts)
        own = {n: t for n, t in arrays.items() if not n.startswith(("torch ", "fit "))}
        if facts["inputs"] is not None:
            _prepare(store, facts)
            saved = (
                read_state(path, named_arrays(store), store.placement) if is_sharded(path) else own
            )
            _restore_state(store, saved, runtime.optimizer is not None)
        elif own:
            raise CheckpointError(
                "The checkpoint has arrays of a learner that has seen no input: "
                f"{', '.join(sorted(own))}."
            )
        unpack_torch_optimizer(runtime, arrays, facts["torch_optimizer"])
        if store.started:
            runtime.watch.look()  # the guard counts on from the checkpoint's alarm
        if store.updater is not None:
            # Learning rates come from the groups, which may have changed after the last update
            store.updater.seen = None
        place = None if facts["fit"] is None else PlaceInFit.unpack(arrays, facts["fit"], store)
        store.steps, store.updates = facts["steps"], facts["updates"]
    learner.place_in_fit = place


@contextlib.contextmanager
def _undo_on_error(runtime: Runtime) -> Iterator[None]:
    """Within this, an error leaves the model's States and the torch optimizer as they were."""
    optimizer = runtime.optimizer
    gradients = {name: p.grad for name, p in runtime.parameters.items()}
    is_torch = isinstance(optimizer, torch.optim.Optimizer)
    groups = [dict(g) for g in optimizer.param_groups] if is_torch else []
    slots = {p: dict(held) for p, held in optimizer.state.items()} if is_torch else {}
    try:
        with _states_restored_on_error(runtime.net):
            yield
    except BaseException:
        for name, grad in gradients.items():
            runtime.parameters[name].grad = grad
        if is_torch:
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            optimizer.state.clear()
            optimizer.state.update(slots)
        raise


@contextlib.contextmanager
def _states_restored_on_error(net: brainstate.nn.Module) -> Iterator[None]:
    if isinstance(net, BridgedModule):
        with net.restored_on_error():
            yield
        return
    values = [(state, state.value) for state in net.states().values()]
    try:
        yield
    except BaseException:
        for state, value in values:
            state.value = value
        raise


def _restore_weights(runtime: Runtime, weights: Tensors) -> None:
    net = runtime.net
    if isinstance(net, BridgedModule):
        raise_differences(compare(net.state_dict(), weights, "parameter or buffer "))
        net.load_state_dict(weights)
        return
    raise_differences(
        compare({name: to_torch(x) for name, x in _parameters(net)}, weights, "parameter ")
    )
    names = iter(weights[name] for name, _ in _parameters(net))
    for state in net.states(brainstate.ParamState).values():
        state.value = jax.tree.map(lambda x: to_jax(next(names)).astype(x.dtype), state.value)


def _prepare(store: Store, facts: Mapping[str, Any]) -> None:
    """Compiles the step for the inputs that the saved learner had."""
    try:
        examples = [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in facts["inputs"]]
        store.prepare(examples, continues=facts["in_stream"])
    except BridgeError as error:
        error.add_note(f"This was for the inputs in the checkpoint, {facts['inputs']}.")
        raise
    except Exception as error:
        raise StateError(
            f"The model cannot run on the inputs in the checkpoint, {facts['inputs']}: {error}"
        ) from error


def _restore_state(store: Store, saved: Mapping[str, Any], has_optimizer: bool) -> None:
    """Puts a state by name into a learner: tensors of a file, or JAX arrays in their places."""
    everything = named_arrays(store)
    own = everything
    if not has_optimizer:  # a learner without an optimizer leaves the saved one's state alone
        saved = {n: t for n, t in saved.items() if not n.startswith("optimizer ")}
        own = {n: x for n, x in own.items() if not n.startswith("optimizer ")}
    if not all(isinstance(x, jax.Array) for x in saved.values()):
        raise_differences(compare({n: as_tensor(x) for n, x in own.items()}, saved, ""))
        saved = {n: like(own[n], t) for n, t in saved.items()}
    leaves = list({**everything, **saved}.values())
    state, compiled = store.state, store.compiled
    counts = [len(compiled.weight_names), len(compiled.hidden_names), len(compiled.other_names)]
    parts, at = [], 0
    for n in counts:
        parts.append(leaves[at : at + n])
        at += n
    trees = []
    for tree in (state.trace, state.opt, state.alarm):
        shape = jax.tree.structure(tree)
        trees.append(jax.tree.unflatten(shape, leaves[at : at + shape.num_leaves]))
        at += shape.num_leaves
    place = store.placement
    theta, opt = (place.put_weights(x, compiled.program) for x in (parts[0], trees[1]))
    hidden = place.put_state(parts[1], compiled.batch)
    trace = place.put_state(trees[0], compiled.batch, store.core.unit_axes)
    store.state = state.replace(
        theta=theta,
        opt=opt,
        hidden=hidden,
        other=place.put_batch(parts[2], 0, compiled.batch),
        trace=trace,
        alarm=place.put(trees[2]),
    )
