"""torch optimizers as optax transformations.

A translated optimizer uses torch's own names for its slots (`exp_avg`, `momentum_buffer`, …), so
its state can be read from the torch optimizer and written back to it. Learning rates and the other
numbers of a parameter group are read from the torch optimizer whenever they change, so torch's
schedulers work on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.frontend import to_real_jax, to_torch
from etrace_bridge.learning.torch_rules import TORCH_RULES, Arrays


class TranslatedState(NamedTuple):
    """State of a translated optimizer.

    Attributes:
        count: number of updates.
        slots: arrays by slot name and parameter name.
    """

    count: Any
    slots: dict[str, Arrays]


class Translated:
    """A `torch.optim` optimizer as an optax transformation.

    Args:
        optimizer: the torch optimizer, whose groups determine the learning rates.
        parameters: the model's parameters by torch name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self.optimizer = optimizer
        self.rule = TORCH_RULES[type(optimizer)]
        self.tensors = parameters
        self.group_of = group_indices(optimizer, parameters)
        self._held = optimizer.state
        self._fixed = self._structure()
        self._left_out: set[str] = set()
        self._names = list(self.rule.numbers(optimizer.param_groups[0]))
        self.transform = optax.GradientTransformationExtraArgs(self._init, self._update)

    def signature(self) -> tuple:
        """Return the values of all that may change from step to step."""
        optimizer = self.optimizer
        options = (
            float(v) if isinstance(v, torch.Tensor) else v
            for group in optimizer.param_groups
            for key, v in group.items()
            if key != "params"
        )
        return (id(optimizer.state), has_own_step(optimizer), *options)

    def numbers(self) -> np.ndarray:
        """Return the groups' numbers, (groups, numbers)."""
        if self._structure() != self._fixed:
            raise InputError(
                f"The parameter groups of `{type(self.optimizer).__name__}` changed after the "
                "learner was made, and not only in their numbers (a group was added, or a flag such as "
                "`nesterov` was switched). Make a new learner."
            )
        if self.optimizer.state is not self._held or has_own_step(self.optimizer):
            raise InputError(
                f"`{type(self.optimizer).__name__}` was given another state (`load_state_dict`), a "
                "hook or a `step` of its own after the learner had taken it over. Do so before the "
                "learner's first input, or make a new learner."
            )
        # torch's schedulers warn unless the optimizer says that it has stepped.
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        return np.array(
            [[float(v) for v in self.rule.numbers(g).values()] for g in self.optimizer.param_groups]
        )

    def _structure(self) -> tuple:
        groups = self.optimizer.param_groups
        return tuple(
            (
                tuple(map(id, g["params"])),
                tuple(self.rule.slots(g)),
                tuple(bool(g.get(k)) for k in self.rule.fixed),
            )
            for g in groups
        )

    def _init(self, params: Any) -> TranslatedState:
        self._held = self.optimizer.state
        slots: dict[str, Arrays] = {}
        counts: dict[str, int] = {}
        for name, value in params.items():
            if name not in self.group_of:
                continue
            held = self.optimizer.state.get(self.tensors[name], {})
            group = self.optimizer.param_groups[self.group_of[name]]
            counts[name] = _count_in(held)
            for slot, start in self.rule.slots(group).items():
                old = held.get(slot)
                array = jnp.full_like(value, start) if old is None else to_real_jax(old)
                slots.setdefault(slot, {})[name] = array
        count = max(counts.values(), default=0)
        # As torch does, the optimizer may have left out parameters that no gradient reaches.
        self._left_out = {name for name, n in counts.items() if n != count}
        if any(counts[name] for name in self._left_out):
            self._refuse_counts()
        return TranslatedState(jnp.asarray(count, jnp.int32), slots)

    def _refuse_counts(self) -> NoReturn:
        counts = {_count_in(self.optimizer.state.get(self.tensors[n], {})) for n in self.group_of}
        raise NotSupportedError(
            f"The parameters of this `{type(self.optimizer).__name__}` were updated different "
            f"numbers of times: {sorted(counts)}. Make a new optimizer, or step all parameters "
            "equally often."
        )

    def _update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        numbers: Any = None,
        unreached: Collection[str] = (),
        **_: Any,
    ) -> tuple[Any, TranslatedState]:
        if params is None:
            raise InputError("A torch optimizer's update needs the parameters.")
        count = state.count + 1
        changes: Arrays = {}
        new: dict[str, Arrays] = {slot: dict(held) for slot, held in state.slots.items()}
        for name, g in updates.items():
            if name not in self.group_of or name in unreached:
                # the optimizer does not have this parameter, or torch would give it no `.grad`
                changes[name] = jnp.zeros_like(params[name])
                continue
            if name in self._left_out:
                self._refuse_counts()
            index = self.group_of[name]
            group = self.optimizer.param_groups[index]
            n = {key: numbers[index, i].astype(g.dtype) for i, key in enumerate(self._names)}
            held = {slot: arrays[name] for slot, arrays in state.slots.items() if name in arrays}
            g = -g if group["maximize"] else g
            changes[name], slots = self.rule.update(
                params[name], g, held, n, count.astype(g.dtype), group
            )
            for slot, array in slots.items():
                new[slot][name] = array
        return changes, TranslatedState(count, new)

    def export(self, state: Any) -> None:
        """Write the slots into the torch optimizer, which can then continue by itself."""
        states = [s for s in jax.tree.leaves(state, is_leaf=_is_translated) if _is_translated(s)]
        for one in states:
            count = int(one.count)
            for name in self.group_of:
                mine = {
                    slot: to_torch(arrays[name], self.tensors[name])
                    for slot, arrays in one.slots.items()
                    if name in arrays
                }
                if not mine or not count:
                    continue
                if type(self.optimizer) is not torch.optim.SGD:
                    mine["step"] = torch.tensor(float(count))
                self.optimizer.state[self.tensors[name]].update(mine)


def _is_translated(value: Any) -> bool:
    return isinstance(value, TranslatedState)


def _count_in(held: Mapping) -> int:
    if "step" in held:
        return int(held["step"])
    return int(held.get("momentum_buffer") is not None)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` does more than its class says: it has hooks or was replaced."""
    step = vars(optimizer).get("step")
    # A scheduler replaces `step` by a function that only notes the call.
    replaced = step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return replaced or any(hooks)


def group_indices(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Return the index of the parameter group of each named parameter that the optimizer has.

    As in torch, the optimizer may hold tensors that are not to be trained: it skips them.
    """
    names = {id(p): name for name, p in reversed(list(parameters.items()))}
    indices: dict[str, int] = {}
    unknown = []
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) in names:
                indices[names[id(p)]] = index
            elif p.requires_grad:
                unknown.append(f"group {index}, shape {tuple(p.shape)}")
    if unknown:
        raise InputError(
            f"`{type(optimizer).__name__}` holds {len(unknown)} tensor(s) that are not parameters "
            f"of the model ({'; '.join(unknown[:5])}). The learner can only update the model's "
            "own parameters: make the optimizer from `model.parameters()`."
        )
    return indices
