"""Optimizers inside the learner's one jitted call: optax as it is, `torch.optim` translated to
optax.

A translated optimizer keeps torch's own names for its slots (`exp_avg`, `momentum_buffer`, …), so
its state comes from and goes back to the torch optimizer. Learning rates and the other numbers of a
parameter group are read from the torch optimizer whenever they change, so torch's schedulers work
on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.frontend import to_real_jax, to_torch
from etrace_bridge.learning.torch_rules import TORCH_RULES, Arrays

# -- translation ----------------------------------------------------------------------------------


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
        optimizer: the torch optimizer; its groups keep deciding learning rates.
        parameters: the model's parameters by torch name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self.optimizer = optimizer
        self.rule = TORCH_RULES[type(optimizer)]
        self.tensors = parameters
        self.group_of = group_places(optimizer, parameters)
        self._held = optimizer.state
        self._fixed = self._structure()
        self._names = list(self.rule.numbers(optimizer.param_groups[0]))
        self.transform = optax.GradientTransformationExtraArgs(self._init, self._update)

    def signature(self) -> tuple:
        """The values of all that may change from step to step."""
        optimizer = self.optimizer
        options = (
            float(v) if isinstance(v, torch.Tensor) else v
            for group in optimizer.param_groups
            for key, v in group.items()
            if key != "params"
        )
        return (id(optimizer.state), has_own_step(optimizer), *options)

    def numbers(self) -> np.ndarray:
        """The groups' numbers, (groups, numbers)."""
        if self._structure() != self._fixed:
            raise InputError(
                f"The parameter groups of `{type(self.optimizer).__name__}` changed in more than "
                "their numbers after the learner was made (a group was added, or a flag such as "
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

    def _init(self, theta: Arrays) -> TranslatedState:
        self._held = self.optimizer.state
        slots: dict[str, Arrays] = {}
        counts = set()
        for name, value in theta.items():
            if name not in self.group_of:
                continue
            held = self.optimizer.state.get(self.tensors[name], {})
            group = self.optimizer.param_groups[self.group_of[name]]
            counts.add(_count_in(held))
            for slot, start in self.rule.slots(group).items():
                old = held.get(slot)
                array = jnp.full_like(value, start) if old is None else to_real_jax(old)
                slots.setdefault(slot, {})[name] = array
        if len(counts) > 1:
            raise NotSupportedError(
                f"The parameters of this `{type(self.optimizer).__name__}` were updated different "
                f"numbers of times: {sorted(counts)}. Make a new optimizer, or step all parameters "
                "equally often."
            )
        return TranslatedState(jnp.asarray(counts.pop() if counts else 0, jnp.int32), slots)

    def _update(
        self,
        grads: Arrays,
        state: TranslatedState,
        params: Arrays | None = None,
        *,
        numbers: Any,
        unreached: Collection[str] = (),
        **_: Any,
    ):
        if params is None:
            raise InputError("A torch optimizer's update needs the parameters.")
        count = state.count + 1
        changes: Arrays = {}
        new: dict[str, Arrays] = {slot: dict(held) for slot, held in state.slots.items()}
        for name, g in grads.items():
            if name not in self.group_of or name in unreached:
                # not among the optimizer's parameters, or without `.grad` in torch: stays as it is
                changes[name] = jnp.zeros_like(params[name])
                continue
            place = self.group_of[name]
            group = self.optimizer.param_groups[place]
            n = {key: numbers[place, i].astype(g.dtype) for i, key in enumerate(self._names)}
            held = {slot: arrays[name] for slot, arrays in state.slots.items() if name in arrays}
            g = -g if group["maximize"] else g
            changes[name], slots = self.rule.update(
                params[name], g, held, n, count.astype(g.dtype), group
            )
            for slot, array in slots.items():
                new[slot][name] = array
        return changes, TranslatedState(count, new)

    def export(self, state: Any) -> None:
        """Writes the slots into the torch optimizer, which can then go on by itself."""
        found = [s for s in jax.tree.leaves(state, is_leaf=_is_translated) if _is_translated(s)]
        for one in found:
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
    """Whether `step` does more than its class says: it has hooks, or another function in its place."""
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


def group_places(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """The parameter group of each named parameter that the optimizer has.

    As in torch, tensors that are not to be trained may be among its own: it skips them.
    """
    names = {id(p): name for name, p in reversed(parameters.items())}
    places: dict[str, int] = {}
    strangers = []
    for place, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) in names:
                places[names[id(p)]] = place
            elif p.requires_grad:
                strangers.append(f"group {place}, shape {tuple(p.shape)}")
    if strangers:
        raise InputError(
            f"`{type(optimizer).__name__}` holds {len(strangers)} tensor(s) that are not parameters "
            f"of the model ({'; '.join(strangers[:5])}). The learner can only update the model's "
            "own parameters: make the optimizer from `model.parameters()`."
        )
    return places


# -- what the learner uses ------------------------------------------------------------------------


class UpdateState(NamedTuple):
    """State of an update.

    Attributes:
        inner: the optax state.
        numbers: options of the torch parameter groups; None for optax.
        norm: norm of the last gradients, before clipping; None if it is not wanted.
    """

    inner: Any
    numbers: Any
    norm: Any = None


@dataclass
class Updater:
    """Turns gradients into new weights, purely.

    Attributes:
        transform: clipping, the optimizer, the schedule and accumulation, as one optax
            transformation.
        translated: the torch optimizer behind it, if there is one.
        track_norm: keep the norm of the last gradients.
    """

    transform: optax.GradientTransformationExtraArgs
    translated: Translated | None = None
    track_norm: bool = False
    seen: tuple | None = field(default=None, repr=False)

    def init(self, theta: Arrays) -> UpdateState:
        """The state before the first update."""
        norm = jnp.zeros((), jnp.result_type(*jax.tree.leaves(theta))) if self.track_norm else None
        return UpdateState(self.transform.init(theta), self.numbers(theta), norm)

    def update(
        self, grads: Arrays, state: UpdateState, theta: Arrays, unreached: Collection[str] = ()
    ) -> tuple[Arrays, UpdateState]:
        """New weights and state; a torch optimizer leaves the parameters in `unreached` alone."""
        changes: Any  # optax says a tree; here it is a dict, as `grads` is
        changes, inner = self.transform.update(
            grads, state.inner, theta, numbers=state.numbers, unreached=unreached
        )
        new = {name: theta[name] + changes[name].astype(theta[name].dtype) for name in theta}
        return new, UpdateState(
            inner,
            state.numbers,
            gradient_norm(grads).astype(state.norm.dtype) if self.track_norm else None,
        )

    def numbers(self, theta: Any) -> Any:
        """The torch groups' numbers as they are now; None for optax."""
        if self.translated is None:
            return None
        self.seen = self.translated.signature()
        widest = jnp.result_type(*jax.tree.leaves(theta))
        return jnp.asarray(self.translated.numbers().astype(widest))


def gradient_norm(grads: Any) -> Any:
    """The norm of all gradients together."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))


def clip_by_norm(most: float) -> optax.GradientTransformation:
    """Scales all gradients so that their common norm is at most `most`, as
    `torch.nn.utils.clip_grad_norm_` does.
    """

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(most / (gradient_norm(grads) + 1e-6), 1)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class AveragingState(NamedTuple):
    """Gradients on their way to an update.

    Attributes:
        inner: state of what follows.
        total: sum of the gradients so far, each divided by their final number.
        waiting: how many they are.
    """

    inner: Any
    total: Any
    waiting: Any


def average_gradients(
    inner: optax.GradientTransformationExtraArgs, number: int
) -> optax.GradientTransformationExtraArgs:
    """One update from the mean of every `number` gradients (optax's own averages in float32,
    whatever the weights are).
    """

    def init(theta: Any) -> AveragingState:
        return AveragingState(
            inner.init(theta), jax.tree.map(jnp.zeros_like, theta), jnp.zeros((), jnp.int32)
        )

    def update(
        grads: Any, state: AveragingState, params: Any = None, **extra: Any
    ) -> tuple[Any, AveragingState]:
        total = jax.tree.map(lambda t, g: t + g / number, state.total, grads)
        zero = jax.tree.map(jnp.zeros_like, total)

        def go() -> tuple[Any, AveragingState]:
            changes, after = inner.update(total, state.inner, params, **extra)
            return changes, AveragingState(after, zero, jnp.zeros((), jnp.int32))

        def wait() -> tuple[Any, AveragingState]:
            return zero, AveragingState(state.inner, total, state.waiting + 1)

        return jax.lax.cond(state.waiting + 1 == number, go, wait)

    return optax.GradientTransformationExtraArgs(init, update)


def make_updater(
    optimizer: Any,
    parameters: Mapping[str, torch.Tensor] | None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    schedule: Callable[[Any], Any] | None = None,
    track_norm: bool = False,
) -> Updater | None:
    """The update that a learner's options describe; None for a torch optimizer that has no
    translation.

    Args:
        optimizer: optax transformation, torch optimizer, or None for no update at all.
        parameters: the torch model's parameters by name; None for a model without torch.
        clip_norm: most that the norm of all gradients may be.
        clip_value: most that the size of an element may be.
        accumulate: gradients averaged for one update.
        schedule: factor of the learning rate by number of updates, an optax schedule.
        track_norm: keep the norm of the last gradients.
    """
    translated = None
    if optimizer is None:
        inner = optax.set_to_zero()
    elif isinstance(optimizer, torch.optim.Optimizer):
        if parameters is None:
            raise InputError(
                "A torch optimizer needs a torch model; this learner was made from a brainstate "
                "module. Use optax."
            )
        if type(optimizer) not in TORCH_RULES or has_own_step(optimizer):
            return None
        translated = Translated(optimizer, parameters)
        inner = translated.transform
    elif isinstance(optimizer, optax.GradientTransformation) or (
        hasattr(optimizer, "init") and hasattr(optimizer, "update")
    ):
        inner = optimizer
    else:
        raise InputError(
            f"`optimizer` is a {type(optimizer).__name__}; it must be an optax transformation such "
            "as `optax.adam(1e-3)`, or a torch optimizer such as "
            "`torch.optim.Adam(model.parameters())`."
        )
    steps: Sequence[Any] = [
        *([clip_by_norm(clip_norm)] if clip_norm is not None else []),
        *([optax.clip(clip_value)] if clip_value is not None else []),
        inner,
        *([optax.scale_by_schedule(schedule)] if schedule is not None else []),
    ]
    chained = optax.with_extra_args_support(optax.chain(*steps) if len(steps) > 1 else inner)
    if accumulate > 1:
        chained = average_gradients(chained, accumulate)
    return Updater(chained, translated, track_norm)
