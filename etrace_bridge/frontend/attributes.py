"""Find state in attributes and buffers: run a step, compare, and check how the state starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import StateError
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.later_steps import after_very_many, first_unlike_step
from etrace_bridge.frontend.names import Path
from etrace_bridge.frontend.slots import AttributeSlot, PythonAttribute, StateLeaf
from etrace_bridge.frontend.state_values import children, flatten_state

# What nn.Module keeps in `__dict__` for itself.
MODULE_OWN = frozenset(nn.Module().__dict__) | {"forward"}
Step = Callable[[], Any]
_DEPTH = 6  # containers in containers that are searched
_ABSENT = object()


@dataclass
class Attribute:
    """The value of one attribute at one moment, its tensors copied."""

    value: Any
    tensors: dict[Path, torch.Tensor]
    others: dict[Path, Any]
    identity: dict[Path, tuple[int, int]]


def read_attributes(model: nn.Module) -> dict[tuple[int, str], Attribute]:
    """Copy the attributes and buffers of every module of a model, except parameters and submodules."""
    found = {}
    for module in model.modules():
        items = {
            **{k: v for k, v in module.__dict__.items() if k not in MODULE_OWN},
            **module._buffers,
        }
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
    items = children(value) if not isinstance(value, nn.Module) and len(path) < _DEPTH else None
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
    # Every step draws the same random numbers, so that two steps can be compared
    rng = torch.get_rng_state()
    before = read_attributes(model)
    first_output = step()
    after = read_attributes(model)
    shaped = {
        key: flatten_state(now.value)
        for key, now in after.items()
        if all(len(path) < _DEPTH for path in now.others)
    }
    torch.set_rng_state(rng)
    second_output = step()
    third = read_attributes(model)
    changed = [
        key
        for key, now in after.items()
        if key in shaped and now.tensors and _differs(before.get(key), now)
    ]
    numbers = [
        key for key in shaped if key in third and _changing(before.get(key), after[key], third[key])
    ]
    if not changed and not numbers:
        if not _has_generator(after) and not _equal(
            flatten_state(second_output)[0], flatten_state(first_output)[0]
        ):
            raise messages.unseen_state([])
        return [], []
    slots = [
        _slot(modules[i], name, before.get((i, name)), after[i, name], shaped[i, name], paths[i])
        for i, name in changed
    ]
    _check_shapes(third, after, changed, slots)
    python = []
    for key in numbers:
        i, name = key
        (leaves, now), (_, later) = shaped[key], flatten_state(third[key].value)
        values = (now, later, after_very_many(now, later))
        slot = next((s for s in slots if s.module is modules[i] and s.name == name), None)
        if slot is not None:
            slot.later = values[1:]
        tensors = tuple(t for _, t in leaves)
        labels = _changing(before.get(key), after[key], third[key])
        python.append(
            PythonAttribute(modules[i], name, paths[i], values, tensors, labels, slot is None)
        )
    found = _Found(
        slots, python, {key: after[key] for key in changed}, {key: third[key] for key in changed}
    )
    _check_start(found, model, step, reset, rng, first_output, second_output, _has_generator(after))
    if any(attribute.goes_on for attribute in python):
        _look_far(step, reset, found)
    return slots, python


def _look_far(step: Step, reset: Callable[[], None], found: _Found) -> None:
    """Run many steps; if one makes other torch calls than the second, as by `if self.t % 20 == 0`,
    add the Python values before that step to those with which the step is traced.
    """
    reset()
    unlike = first_unlike_step(step)
    if unlike is None:
        return
    reset()
    for _ in range(unlike):
        step()
    for attribute in found.python:
        value = flatten_state(attribute.module.__dict__[attribute.name])[1]
        attribute.values = (*attribute.values, value)
        for slot in found.slots:
            if (slot.module, slot.name) == (attribute.module, attribute.name):
                slot.later = attribute.values[1:]


@dataclass
class _Found:
    """Slots and Python attributes, and the slots' attributes after the first and the second step."""

    slots: list[AttributeSlot]
    python: list[PythonAttribute]
    after: dict[tuple[int, str], Attribute]
    third: dict[tuple[int, str], Attribute]


def _changing(before: Attribute | None, now: Attribute, third: Attribute) -> tuple[Path, ...]:
    """Return the paths of the Python values of an attribute that a step changes."""
    old = {} if before is None else before.others
    first = [
        path
        for path, value in now.others.items()
        if before is not None and old.get(path, _ABSENT) != value
    ]
    again = [path for path, value in now.others.items() if third.others.get(path, _ABSENT) != value]
    new = [path for path in third.others if path not in now.others and path not in now.tensors]
    return tuple(dict.fromkeys([*first, *again, *new]))


def _has_generator(found: dict[tuple[int, str], Attribute]) -> bool:
    """Return whether a module draws from its own generator: its steps then differ by chance, not by
    state.
    """
    return any(isinstance(attribute.value, torch.Generator) for attribute in found.values())


def _differs(before: Attribute | None, now: Attribute) -> bool:
    if before is None or set(before.tensors) != set(now.tensors):
        return True
    # batch norm's kernel writes its statistics without counting the write, so versions are not
    # enough
    return any(
        before.identity[p] != now.identity[p] or not torch.equal(before.tensors[p], now.tensors[p])
        for p in now.tensors
    )


def _slot(
    module: nn.Module, name: str, before: Attribute | None, after: Attribute, shaped: Any, path: str
) -> AttributeSlot:
    adapter = find_adapter(module)
    prefix = tuple(path.split(".")) if path else ()
    found, skeleton = shaped  # made before a later step changed the containers
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
    """Return the value that a state has before the first step, in the shape that it has after one."""
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
                f"Attribute `{slot.name}` of module `{slot.path or '(root)'}` changes its shape or "
                "structure from step to step (a list that grows, a history). One step is compiled "
                "once, so a state must keep its shape. Keep a tensor of fixed shape, or store "
                "histories outside the model."
            )


def _check_start(
    found: _Found,
    model: nn.Module,
    step: Step,
    reset: Callable[[], None],
    rng: torch.Tensor,
    first_output: Any,
    second_output: Any,
    by_chance: bool,
) -> None:
    """Run the first two steps again from the start values; they must give what the model itself
    gave.
    """
    slots, python = found.slots, found.python

    def repeats(states: list[list[torch.Tensor]], output: Any, attributes: dict) -> bool:
        reset()
        for attribute in python:
            attribute.put(0)
        for slot, tensors in zip(slots, states, strict=True):
            slot.put(tensors)
        torch.set_rng_state(rng)
        again = flatten_state(step())[0]
        now = read_attributes(model)
        return _equal(again, flatten_state(output)[0]) and all(
            _equal(list(now[key].tensors.items()), list(then.tensors.items()))
            for key, then in attributes.items()
        )

    if not repeats(
        [[leaf.initial.clone() for leaf in slot.leaves] for slot in slots],
        first_output,
        found.after,
    ):
        counters = [a.label for a in python if a.goes_on]
        if counters:
            raise messages.python_state(counters)
        names = ", ".join(
            [f"`{'.'.join(leaf.path)}`" for slot in slots for leaf in slot.leaves]
            + [f"`{a.label}`" for a in python]
        )
        raise StateError(
            "The first step of the model could not be reproduced from a guessed initial state "
            f"({names}): it does something else when its state does not exist yet. Set the "
            "attributes to their initial tensors before `wrap`, with the batch size that will be "
            "used (for example by one call of the model's own reset function)."
        )
    states = [[tensor.detach().clone() for tensor in slot.get()] for slot in slots]
    # Twice, because the first step was run as often as the second by now: something that alternates
    # would not show.
    if not by_chance and not all(
        repeats([[t.clone() for t in s] for s in states], second_output, found.third)
        for _ in range(2)
    ):
        raise messages.unseen_state([".".join(leaf.path) for slot in slots for leaf in slot.leaves])


def _equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)
        if x.is_floating_point()
        else torch.equal(x, y)
        for (_, x), (_, y) in zip(a, b, strict=True)
    )
