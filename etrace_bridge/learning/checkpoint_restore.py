"""Reads a checkpoint and puts it into a new learner."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import BridgeError, CheckpointError, InputError, StateError
from etrace_bridge.frontend import BridgedModule, to_jax, to_torch
from etrace_bridge.learning.checkpoint import (
    WEIGHT,
    module_parameters,
    named_arrays,
    names_with_nan,
    rule_options,
)
from etrace_bridge.learning.checkpoint_arrays import as_tensor, compare, like, raise_differences
from etrace_bridge.learning.checkpoint_facts import check_facts
from etrace_bridge.learning.checkpoint_files import read_checkpoint
from etrace_bridge.learning.checkpoint_packing import Tensors
from etrace_bridge.learning.checkpoint_sharded import is_sharded, read_host, read_state
from etrace_bridge.learning.checkpoint_torch import restore_groups, unpack_torch_optimizer
from etrace_bridge.learning.place_in_fit import PlaceInFit
from etrace_bridge.rules import Rule, make_rule

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner
    from etrace_bridge.learning.runtime import Runtime
    from etrace_bridge.learning.store import Store


def read_learner(path: str | os.PathLike) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Return weights, other arrays and facts of an intact checkpoint.

    Of a checkpoint of several processes, the arrays do not include the state.
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
                f"`{name}`. Use an older checkpoint."
            )
    return weights, arrays, facts


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.all((a == b) | (torch.isnan(a) & torch.isnan(b))))


def rule_of(facts: Mapping[str, Any], rule: str | Rule | None) -> Rule:
    """Return the rule to continue with: the checkpoint's, or the given one if it is the same."""
    saved = facts["rule"]
    if rule is None:
        if saved["options"] is None:
            raise InputError(
                f"The options of the rule {saved['name']!r} cannot be stored. Pass `rule=` to "
                "`load`."
            )
        return _saved_rule(saved)
    given = make_rule(rule)
    options = rule_options(given)
    if given.name != saved["name"] or (
        options is not None and saved["options"] is not None and options != saved["options"]
    ):
        raise StateError(
            "The checkpoint does not fit:\n"
            f"  rule: {saved['name']} {saved['options']} in the checkpoint, {given.name} {options} "
            "given.\n"
            "Leave `rule` out to continue with the checkpoint's rule."
        )
    return given


def _saved_rule(saved: Mapping[str, Any]) -> Rule:
    plain = make_rule(saved["name"])
    wrong = CheckpointError(
        f"The checkpoint's facts are wrong: the rule {saved['name']!r} has no options "
        f"{saved['options']}."
    )
    known = rule_options(plain) or {}
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
    """Put a checkpoint into a new learner.

    If it does not fit, raises with a list of the differences; model and optimizer are unchanged.
    """
    runtime, store = learner.runtime, learner.runtime.store
    with _undo_on_error(runtime):
        if runtime.options.guard and names_with_nan(arrays):
            raise StateError(
                f"The checkpoint holds NaN in {', '.join(names_with_nan(arrays))}; it was saved with "
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
    """Restore the model's States and the torch optimizer if this context raises."""
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
        compare({name: to_torch(x) for name, x in module_parameters(net)}, weights, "parameter ")
    )
    names = iter(weights[name] for name, _ in module_parameters(net))
    for state in net.states(brainstate.ParamState).values():
        state.value = jax.tree.map(lambda x: to_jax(next(names)).astype(x.dtype), state.value)


def _prepare(store: Store, facts: Mapping[str, Any]) -> None:
    """Compile the step for the inputs of the saved learner."""
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
    """Put a state by name into a learner: tensors of a file, or JAX arrays on their devices."""
    everything = named_arrays(store)
    own = everything
    if not has_optimizer:  # a learner without an optimizer ignores the saved state of one
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
