"""Finding state that a model keeps in attributes and buffers: run a step, compare, and check how the state starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import StateError
from etrace_bridge.frontend.plan import AttributeSlot, PythonAttribute, StateLeaf
from etrace_bridge.frontend.state import Path, children, find_adapter, flatten_state

# What nn.Module keeps in `__dict__` for itself.
_OWN = frozenset(nn.Module().__dict__) | {"forward"}
Step = Callable[[], Any]


@dataclass
class Attribute:
    """The value of one attribute at one moment, its tensors copied."""

    value: Any
    tensors: dict[Path, torch.Tensor]
    others: dict[Path, Any]
    identity: dict[Path, tuple[int, int]]


def read_attributes(model: nn.Module) -> dict[tuple[int, str], Attribute]:
    """Copy what every module of a model keeps in attributes and buffers, parameters and submodules aside."""
    found = {}
    for module in model.modules():
        items = {**{k: v for k, v in module.__dict__.items() if k not in _OWN}, **module._buffers}
        for name, value in items.items():
            if isinstance(value, (nn.Module, nn.Parameter)):
                continue
            tensors: dict[Path, torch.Tensor] = {}
            others: dict[Path, Any] = {}
            identity: dict[Path, tuple[int, int]] = {}
            _visit(value, (), tensors, others, identity)
            found[id(module), name] = Attribute(value, tensors, others, identity)
    return found


def _visit(value: Any, path: Path, tensors: dict, others: dict, identity: dict) -> None:
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().clone()
        identity[path] = (id(value), value._version)
        return
    items = children(value) if not isinstance(value, nn.Module) and len(path) < 6 else None
    if items is None:
        others[path] = value if isinstance(value, (int, float, bool, str, type(None))) else None
        return
    for key, child in items:
        _visit(child, (*path, key), tensors, others, identity)


def find_attribute_slots(
    model: nn.Module, step: Step, reset: Callable[[], None], paths: dict[int, str]
) -> tuple[list[AttributeSlot], list[PythonAttribute]]:
    """Find the attributes that a step changes, and the value each tensor has before the first step.

    Args:
        model: The model, in its state before the first step; the caller restores it.
        step: Runs one step on plain tensors and returns the output.
        reset: Puts the model back to its state before the first step.
        paths: Module path by `id(module)`.

    Returns:
        Attributes that hold tensors, and those that hold Python values.
    """
    modules = {id(module): module for module in model.modules()}
    before = read_attributes(model)
    first_output = step()
    after = read_attributes(model)
    changed = [key for key, now in after.items() if now.tensors and _differs(before.get(key), now)]
    numbers = [key for key, now in after.items() if () in now.others and key in before and before[key].others.get(()) != now.others[()]]
    if not changed and not numbers:
        return [], []
    slots = [_slot(modules[i], name, before.get((i, name)), after[i, name], paths[i]) for i, name in changed]
    step()
    third = read_attributes(model)
    _check_shapes(third, after, changed, slots)
    python = [PythonAttribute(modules[i], name, paths[i], (after[i, name].value, third[i, name].value)) for i, name in numbers]
    _check_start(slots, python, step, reset, first_output, model, after, changed)
    return slots, python


def _differs(before: Attribute | None, now: Attribute) -> bool:
    if before is None or set(before.tensors) != set(now.tensors):
        return True
    # batch norm's kernel writes its statistics without counting the write, so versions are not enough
    return any(before.identity[p] != now.identity[p] or not torch.equal(before.tensors[p], now.tensors[p]) for p in now.tensors)


def _slot(module: nn.Module, name: str, before: Attribute | None, after: Attribute, path: str) -> AttributeSlot:
    adapter = find_adapter(module)
    prefix = tuple(path.split(".")) if path else ()
    found, skeleton = flatten_state(after.value)
    leaves = []
    for local, _ in found:
        own = (name, *local)
        own = adapter.state_path(module, own) if adapter is not None else own
        hidden = adapter is None or adapter.is_hidden(module, own)
        now = after.tensors[local]
        hidden = hidden and (now.is_floating_point() or now.is_complex())
        leaves.append(StateLeaf((*prefix, *own), _start_value(before, local, now), hidden))
    return AttributeSlot(module, name, path, skeleton, leaves)


def _start_value(before: Attribute | None, path: Path, now: torch.Tensor) -> torch.Tensor:
    """Give the value that a state has before the first step, in the shape that it has after one."""
    if before is not None and path in before.tensors:
        old = before.tensors[path]
        try:
            return old.to(now.dtype).expand(now.shape).clone()
        except RuntimeError:  # a placeholder of another shape, such as an empty tensor
            return torch.zeros_like(now)
    old = before.others.get(path) if before is not None else None
    return torch.full_like(now, old) if isinstance(old, (int, float)) else torch.zeros_like(now)


def _check_shapes(third: dict, after: dict, changed: list, slots: list[AttributeSlot]) -> None:
    for key, slot in zip(changed, slots, strict=True):
        again = third.get(key)
        shapes = [tuple(t.shape) for t in after[key].tensors.values()]
        if again is None or [tuple(t.shape) for t in again.tensors.values()] != shapes:
            raise StateError(
                f"Attribute `{slot.name}` of module `{slot.path or '(root)'}` changes its shape or structure from step "
                f"to step (a list that grows, a history). One step is compiled once, so a state must keep its shape. "
                f"Keep a tensor of fixed shape, or store histories outside the model."
            )


def _check_start(
    slots: list[AttributeSlot],
    python: list[PythonAttribute],
    step: Step,
    reset: Callable[[], None],
    first_output: Any,
    model: nn.Module,
    after: dict,
    changed: list,
) -> None:
    """Run the first step again as a later step, from the values found; it must give what the model itself gave."""
    reset()
    for slot in slots:
        slot.put([leaf.initial.clone() for leaf in slot.leaves])
    for attribute in python:
        attribute.put(0)
    output = step()
    again = read_attributes(model)
    same = _equal(flatten_state(output)[0], flatten_state(first_output)[0]) and all(
        _equal(list(again[key].tensors.items()), list(after[key].tensors.items())) for key in changed
    )
    if not same:
        names = ", ".join([f"`{'.'.join(leaf.path)}`" for slot in slots for leaf in slot.leaves] + [f"`{a.label}`" for a in python])
        raise StateError(
            f"The first step of the model could not be reproduced from a guessed initial state ({names}): it does "
            f"something else when its state does not exist yet. Set the attributes to their initial tensors before "
            f"`wrap`, with the batch size that will be used (for example by one call of the model's own reset "
            f"function)."
        )


def _equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True) if x.is_floating_point() else torch.equal(x, y)
        for (_, x), (_, y) in zip(a, b, strict=True)
    )
