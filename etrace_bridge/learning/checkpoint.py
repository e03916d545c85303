"""Checkpoints: weights as a safetensors file that plain torch can load, everything else in a second file beside it.

The weights file names the state file that belongs to it, and each save gives the state file a new name. So replacing the
weights file, one atomic rename, turns the old checkpoint into the new one; whatever is killed before or after it leaves one of them
whole.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.torch
import torch

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.frontend import BridgedModule, to_jax, to_torch
from etrace_bridge.rules import Rule, make_rule

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner
    from etrace_bridge.learning.runtime import Runtime

FORMAT = 1
SUFFIX = ".safetensors"


# -- files ------------------------------------------------------------------------------------------------------


def weights_file(path: str | os.PathLike) -> Path:
    """The file that holds the weights of a checkpoint: `path`, with `.safetensors` added if it is missing."""
    path = Path(path)
    if path.is_dir():
        return path / f"model{SUFFIX}"
    return path if path.suffix == SUFFIX else path.with_name(path.name + SUFFIX)


def write_checkpoint(path: str | os.PathLike, weights: dict, arrays: dict, facts: dict) -> Path:
    """Writes both files; returns that of the weights."""
    target = weights_file(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = target.name.removesuffix(SUFFIX)
    state = target.with_name(f"{stem}.{secrets.token_hex(4)}.state{SUFFIX}")
    _write(state, safetensors.torch.save(arrays, {"etrace_bridge": json.dumps(facts)}))
    passing = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    _write(passing, safetensors.torch.save(weights, {"etrace_bridge": json.dumps({"state": state.name})}))
    os.replace(passing, target)
    _sync_folder(target.parent)
    for old in target.parent.glob(f"{glob.escape(stem)}.????????.state{SUFFIX}"):
        if old != state:
            old.unlink(missing_ok=True)
    for old in target.parent.glob(f".{glob.escape(target.name)}.????????.part"):
        old.unlink(missing_ok=True)
    return target


def read_checkpoint(path: str | os.PathLike) -> tuple[dict, dict, dict]:
    """Weights, other arrays and facts."""
    target = weights_file(path)
    if not target.is_file():
        raise InputError(f"There is no checkpoint {str(target)!r}.")
    weights, about = _read(target)
    if "state" not in about:
        raise InputError(f"{str(target)!r} holds weights only: it was not written by `save`. Load it with torch's `load_state_dict`.")
    state = target.with_name(about["state"])
    if not state.is_file():
        raise InputError(f"The checkpoint {str(target)!r} needs the file {state.name!r} beside it, which is missing.")
    arrays, facts = _read(state)
    if facts.get("format") != FORMAT:
        raise InputError(f"The checkpoint has format {facts.get('format')}; this version reads format {FORMAT}.")
    return weights, arrays, facts


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> tuple[dict, dict]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("etrace_bridge", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 - not a dict
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise InputError(f"{str(path)!r} is no checkpoint that can be read: {error}") from error


# -- what is saved ----------------------------------------------------------------------------------------------


def save_learner(learner: OnlineLearner, path: str | os.PathLike) -> Path:
    """Writes a learner."""
    runtime = learner._runtime
    runtime.look()
    facts: dict[str, Any] = {
        "format": FORMAT,
        "rule": {"name": learner.rule.name, "options": _rule_options(learner.rule)},
        "steps": runtime.steps,
        "updates": runtime.updates,
        "chunk": runtime.options.chunk,
        "reduction": runtime.options.reduction,
        "inputs": runtime.session.signature if runtime.started else None,
        "in_stream": runtime.stream is not None,
        "history": None if learner.history is None else dataclasses.asdict(learner.history),
    }
    arrays = {name: _as_tensor(x) for name, x in _named(runtime).items()}
    if isinstance(runtime.optimizer, torch.optim.Optimizer):
        facts["groups"] = [_plain(g) for g in runtime.optimizer.param_groups]
    if runtime.torch_update is not None:
        held, facts["torch_optimizer"] = _pack_torch_optimizer(runtime)
        arrays |= held
    return write_checkpoint(path, _weights(runtime, learner), arrays, facts)


def _weights(runtime: Runtime, learner: OnlineLearner) -> dict[str, torch.Tensor]:
    if isinstance(runtime.net, BridgedModule):
        return {name: t.clone().contiguous() for name, t in learner.net.state_dict().items()}  # pyright: ignore[reportAttributeAccessIssue]
    if not runtime.started:
        return {}
    return {name: to_torch(x) for name, x in zip(runtime.session.weight_names, runtime.values.theta, strict=True)}


def _named(runtime: Runtime) -> dict[str, Any]:
    """All arrays of a learner by a name that does not depend on their place in a list."""
    if not runtime.started:
        return {}
    values, session = runtime.values, runtime.session
    named = {f"parameter {n}": x for n, x in zip(session.weight_names, values.theta, strict=True)}
    named |= {f"hidden state {n}": x for n, x in zip(session.hidden_names, values.hidden, strict=True)}
    named |= {f"carried {n}": x for n, x in zip(session.other_names, values.other, strict=True)}
    for kind, tree in (("trace", values.trace), ("optimizer", values.opt), ("alarm", values.alarm)):
        named |= {f"{kind} {jax.tree_util.keystr(keys)}": x for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return named


def _as_tensor(x: Any) -> torch.Tensor:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return to_torch(x)


def _rule_options(rule: Rule) -> dict[str, Any] | None:
    """The rule's options, if they are plain values."""
    options = dataclasses.asdict(rule) if dataclasses.is_dataclass(rule) else {}
    try:
        return json.loads(json.dumps(options))
    except TypeError:
        return None


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
    return {k: v for k, v in values.items() if v is None or isinstance(v, (bool, int, float, str, tuple, list))}


def _pack_torch_optimizer(runtime: Runtime) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State of an optimizer that runs in torch: its tensors, and the rest as plain values."""
    update = runtime.torch_update
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {"waiting": update.waiting, "state": {}}  # pyright: ignore[reportOptionalMemberAccess]
    for name in update.names:  # pyright: ignore[reportOptionalMemberAccess]
        p = runtime.parameters[name]
        for key, value in runtime.optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"torch optimizer {name} {key}"] = value.detach().cpu().clone().contiguous()
            else:
                plain["state"].setdefault(name, {})[key] = value
        if update.waiting and p.grad is not None:  # pyright: ignore[reportOptionalMemberAccess]
            tensors[f"torch gradient {name}"] = p.grad.detach().cpu().clone().contiguous()
    return tensors, plain


# -- loading ----------------------------------------------------------------------------------------------------


def rule_of(facts: Mapping[str, Any], rule: str | Rule | None) -> Rule:
    """The rule to go on with: the checkpoint's, or the given one if it is the same."""
    saved = facts["rule"]
    if rule is None:
        if saved["options"] is None:
            raise InputError(f"The options of the rule {saved['name']!r} cannot be stored. Pass `rule=` to `load`.")
        return dataclasses.replace(make_rule(saved["name"]), **saved["options"])  # pyright: ignore[reportArgumentType]
    given = make_rule(rule)
    options = _rule_options(given)
    if given.name != saved["name"] or (options is not None and saved["options"] is not None and options != saved["options"]):
        raise StateError(
            f"The checkpoint does not fit:\n  rule: {saved['name']} {saved['options']} in the checkpoint, {given.name} {options} given.\n"
            "Leave `rule` out to go on with the checkpoint's."
        )
    return given


def restore_learner(learner: OnlineLearner, weights: dict, arrays: dict, facts: dict) -> None:
    """Puts a checkpoint into a new learner; raises with a list if it does not fit."""
    runtime = learner._runtime
    if isinstance(runtime.net, BridgedModule):
        _raise_differences(_compare(runtime.net.state_dict(), weights, "parameter or buffer "))
        runtime.net.load_state_dict(weights)
    if isinstance(runtime.optimizer, torch.optim.Optimizer):
        _restore_groups(runtime.optimizer, facts.get("groups"))
    if facts["inputs"] is not None:
        examples = [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in facts["inputs"]]
        runtime.prepare(examples, continues=facts["in_stream"])
        _restore_values(runtime, arrays)
    if runtime.torch_update is not None and facts.get("torch_optimizer"):
        _unpack_torch_optimizer(runtime, arrays, facts["torch_optimizer"])
    if runtime.started:
        runtime.look()  # the guard counts on from the checkpoint's alarm
    if runtime.updater is not None:
        runtime.updater.seen = None  # learning rates come from the groups, which may have changed after the last update
    runtime.steps, runtime.updates = facts["steps"], facts["updates"]


def _restore_values(runtime: Runtime, arrays: dict) -> None:
    saved = {n: t for n, t in arrays.items() if not n.startswith("torch ")}
    own = _named(runtime)
    if runtime.optimizer is None:  # a learner without an optimizer leaves the saved one's state alone
        saved = {n: t for n, t in saved.items() if not n.startswith("optimizer ")}
        own = {n: x for n, x in own.items() if not n.startswith("optimizer ")}
    _raise_differences(_compare({n: _as_tensor(x) for n, x in own.items()}, saved, ""))
    everything = _named(runtime)
    found = {n: _like(x, saved[n]) if n in saved else x for n, x in everything.items()}
    leaves = list(found.values())
    values, session = runtime.values, runtime.session
    counts = [len(session.weight_names), len(session.hidden_names), len(session.other_names)]
    parts, at = [], 0
    for n in counts:
        parts.append(leaves[at : at + n])
        at += n
    trees = []
    for tree in (values.trace, values.opt, values.alarm):
        shape = jax.tree.structure(tree)
        trees.append(jax.tree.unflatten(shape, leaves[at : at + shape.num_leaves]))
        at += shape.num_leaves
    place = runtime.placement
    theta, (hidden, other) = place.put(parts[0]), place.put_batch((parts[1], parts[2]), 0, session.batch)
    runtime.values = values._replace(
        theta=theta, hidden=hidden, other=other, trace=place.put(trees[0]), opt=place.put(trees[1]), alarm=place.put(trees[2])
    )


def _like(x: Any, saved: torch.Tensor) -> Any:
    array = to_jax(saved)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(x))
    return array.astype(x.dtype)


def _restore_groups(optimizer: torch.optim.Optimizer, groups: list[dict] | None) -> None:
    if groups is None:
        raise StateError("The checkpoint does not fit:\n  optimizer: not a torch optimizer in the checkpoint.")
    if len(groups) != len(optimizer.param_groups):
        raise StateError(
            f"The checkpoint does not fit:\n  optimizer: {len(groups)} parameter groups in the checkpoint, "
            f"{len(optimizer.param_groups)} in `{type(optimizer).__name__}`."
        )
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in own:
                own[key] = tuple(value) if isinstance(own[key], tuple) else value


def _unpack_torch_optimizer(runtime: Runtime, arrays: dict, plain: dict) -> None:
    runtime.torch_update.waiting = plain["waiting"]  # pyright: ignore[reportOptionalMemberAccess]
    for name, p in runtime.parameters.items():
        start = f"torch optimizer {name} "
        state = {n.removeprefix(start): t for n, t in arrays.items() if n.startswith(start)} | plain["state"].get(name, {})
        if state:
            runtime.optimizer.state[p].update(state)
        if f"torch gradient {name}" in arrays:
            p.grad = arrays[f"torch gradient {name}"].to(p)


def _compare(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], kind: str) -> list[str]:
    lines = [f"{kind}{n}: missing in the checkpoint" for n in sorted(set(own) - set(saved))]
    lines += [f"{kind}{n}: in the checkpoint only" for n in sorted(set(saved) - set(own))]
    for n in sorted(set(own) & set(saved)):
        a, b = own[n], saved[n]
        if a.shape != b.shape or a.dtype != b.dtype:
            show = lambda t: f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"  # noqa: E731
            lines.append(f"{kind}{n}: {show(b)} in the checkpoint, {show(a)} here")
    return lines


def _raise_differences(lines: list[str]) -> None:
    if lines:
        raise StateError("The checkpoint does not fit:\n" + "\n".join(f"  {line}" for line in lines))
