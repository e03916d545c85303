"""A torch optimizer in a checkpoint: its parameter groups, and its state where it runs in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from etrace_bridge._errors import StateError
from etrace_bridge.learning.checkpoint_arrays import raise_differences
from etrace_bridge.learning.checkpoint_packing import Tensors
from etrace_bridge.learning.torch_rules import TORCH_RULES

if TYPE_CHECKING:
    from etrace_bridge.learning.runtime import Runtime


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that JSON can store."""
    values = {
        k: float(v) if isinstance(v, torch.Tensor) else v
        for k, v in group.items()
        if k not in ("params", "param_names")
    }
    return {
        k: v
        for k, v in values.items()
        if v is None or isinstance(v, (bool, int, float, str, tuple, list))
    }


def pack_torch_optimizer(runtime: Runtime) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of an optimizer that runs in torch: its tensors, and the rest as plain
    values.
    """
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
    for name, p in runtime.parameters.items() if update.waiting else ():  # pyright: ignore[reportOptionalMemberAccess]
        if p.grad is not None:
            tensors[f"torch gradient {name}"] = p.grad.detach().cpu().clone().contiguous()
    return tensors, plain


def restore_groups(optimizer: Any, facts: Mapping[str, Any]) -> None:
    """Restore the saved parameter groups, if all their options are valid for this optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    groups, name = facts["groups"], type(optimizer).__name__
    if groups is None:
        raise StateError(
            "The checkpoint does not fit:\n  optimizer: not a torch optimizer in the checkpoint."
        )
    lines = []
    if facts["optimizer"] != name:
        lines.append(f"optimizer: `{facts['optimizer']}` in the checkpoint, `{name}` here")
    elif len(groups) != len(optimizer.param_groups):
        lines.append(
            f"optimizer: {len(groups)} parameter groups in the checkpoint, "
            f"{len(optimizer.param_groups)} in `{name}`"
        )
    else:
        for n, (own, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            problems = _group_problems(plain_group(own), saved, set(optimizer.defaults))
            problems = problems or _other_equations(type(optimizer), own, saved)
            lines += [f"parameter group {n}: {problem}" for problem in problems]
    raise_differences(lines)
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            own[key] = tuple(value) if isinstance(own.get(key), tuple) else value


def _group_problems(
    own: Mapping[str, Any], saved: Mapping[str, Any], options: set[str]
) -> list[str]:
    """Return what is invalid in a saved parameter group.

    Options that the optimizer does not know belong to a scheduler and are not problems.
    """

    def kind(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [kind(v) for v in value]
        return (
            "number"
            if isinstance(value, (int, float)) and not isinstance(value, bool)
            else type(value).__name__
        )

    problems = [
        f"`{key}` is missing in the checkpoint" for key in sorted((set(own) - set(saved)) & options)
    ]
    problems += [
        f"`{key}` is in the checkpoint only" for key in sorted((set(saved) - set(own)) & options)
    ]
    for key in sorted(set(own) & set(saved)):
        a, b = own[key], saved[key]
        flags = all(value is None or isinstance(value, bool) for value in (a, b))
        if kind(a) != kind(b) and not flags:
            problems.append(f"`{key}` is {b!r} in the checkpoint, {a!r} here")
        elif key == "lr" and b < 0:
            problems.append(f"`lr` is {b!r} in the checkpoint")
    return problems


def _other_equations(kind: type, own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return the saved options that would change the equations of a translated optimizer."""
    rule = TORCH_RULES.get(kind)
    if rule is None:
        return []
    same = {key: bool(own.get(key)) == bool(saved.get(key)) for key in (*rule.fixed, "momentum")}
    if rule.slots(own).keys() != rule.slots(saved).keys() or not all(same[k] for k in rule.fixed):
        return [
            f"`{key}` is {saved.get(key)!r} in the checkpoint, {own.get(key)!r} here"
            for key, is_same in same.items()
            if not is_same
        ]
    return []


def unpack_torch_optimizer(
    runtime: Runtime, arrays: Tensors, plain: Mapping[str, Any] | None
) -> None:
    """Restore the state of an optimizer that runs in torch."""
    saved = {n: t for n, t in arrays.items() if n.startswith("torch ")}
    update = runtime.torch_update
    if update is None:
        if runtime.optimizer is not None and (saved or plain is not None):
            raise StateError(
                "The checkpoint does not fit:\n"
                f"  optimizer: it runs in torch there, and not here: {sorted(saved)[:3]}"
            )
        return
    if plain is None or plain["waiting"] >= update.accumulate:
        raise StateError(
            "The checkpoint does not fit:\n"
            f"  optimizer: {plain} in the checkpoint, `accumulate={update.accumulate}` here."
        )
    lines = [
        f"optimizer state of `{name}`: in the checkpoint only"
        for name in sorted(set(plain["state"]) - set(update.names))
    ]
    state: dict[str, dict[str, Any]] = {
        name: dict(plain["state"].get(name, {})) for name in update.names
    }
    gradients: Tensors = {}
    for full, tensor in saved.items():
        _, part, name, *key = full.split(" ", 3)
        p = runtime.parameters.get(name)
        if (
            p is None
            or (part, len(key)) not in (("optimizer", 1), ("gradient", 0))
            or (part == "optimizer" and name not in state)
        ):
            lines.append(f"`{full}`: in the checkpoint only")
        elif (
            tensor.shape != p.shape
            and (part == "gradient" or tensor.numel() != 1)
            and not _is_factor(tensor, p)
        ):
            lines.append(
                f"`{full}`: shape {tuple(tensor.shape)}, the parameter has {tuple(p.shape)}"
            )
        elif part == "gradient":
            gradients[name] = tensor.to(p)
        else:
            state[name][key[0]] = tensor
    if bool(gradients) != bool(plain["waiting"]):
        lines.append(
            f"gradients: {len(gradients)} in the checkpoint, after {plain['waiting']} of "
            f"{update.accumulate} batches of an update"
        )
    raise_differences(lines)
    update.waiting = plain["waiting"]
    for name, held in state.items():
        if held:
            runtime.optimizer.state[runtime.parameters[name]].update(held)
    for name, gradient in gradients.items():
        runtime.parameters[name].grad = gradient


def _is_factor(tensor: torch.Tensor, p: torch.Tensor) -> bool:
    """Return whether a slot has the parameter's shape up to axes that are reduced (Adafactor)."""
    return tensor.dim() == p.dim() and all(
        a in (1, b) for a, b in zip(tensor.shape, p.shape, strict=True)
    )
