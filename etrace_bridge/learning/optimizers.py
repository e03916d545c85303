"""The update inside a learner's compiled program: clipping, the optimizer, schedule, accumulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import common_dtype
from etrace_bridge.learning.torch_rules import TORCH_RULES, Arrays
from etrace_bridge.learning.translated_optimizers import Translated, has_own_step

# -- translation ----------------------------------------------------------------------------------


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
        translated: the torch optimizer that it was translated from, if there is one.
        track_norm: store the norm of the last gradients.
        seen: the torch groups' options at the last look; None to read them again.
    """

    transform: optax.GradientTransformationExtraArgs
    translated: Translated | None = None
    track_norm: bool = False
    seen: tuple | None = field(default=None, repr=False)

    def init(self, theta: Arrays) -> UpdateState:
        """Return the state before the first update."""
        norm = jnp.zeros((), _widest(theta)) if self.track_norm else None
        return UpdateState(self.transform.init(theta), self.numbers(theta), norm)

    def update(
        self, grads: Arrays, state: UpdateState, theta: Arrays, unreached: Collection[str] = ()
    ) -> tuple[Arrays, UpdateState]:
        """Return new weights and the new state.

        A torch optimizer leaves the parameters in `unreached` alone.
        """
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
        """Return the current numbers of the torch groups; None for optax."""
        if self.translated is None:
            return None
        self.seen = self.translated.signature()
        return jnp.asarray(self.translated.numbers().astype(_widest(theta)))


def gradient_norm(grads: Any) -> Any:
    """Return the norm of all gradients together."""
    widest = _widest(grads)
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)).astype(widest) for g in jax.tree.leaves(grads)))


def _widest(tree: Any) -> Any:
    return common_dtype(*(x.dtype for x in jax.tree.leaves(tree)))


def clip_by_norm(most: float) -> optax.GradientTransformation:
    """Scale gradients to a norm of at most `most`, as `torch.nn.utils.clip_grad_norm_` does."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(most / (gradient_norm(updates) + 1e-6), 1)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class AveragingState(NamedTuple):
    """Gradients that wait for an update.

    Attributes:
        inner: state of the transformation that takes the mean.
        total: sum of the gradients so far, each divided by `number`.
        waiting: number of gradients in the sum.
    """

    inner: Any
    total: Any
    waiting: Any


def average_gradients(
    inner: optax.GradientTransformationExtraArgs, number: int
) -> optax.GradientTransformationExtraArgs:
    """Make one update from the mean of every `number` gradients.

    `optax.MultiSteps` averages in float32 whatever the dtype of the weights.
    """

    def init(params: Any) -> AveragingState:
        zero = jax.tree.map(jnp.zeros_like, params)
        return AveragingState(inner.init(params), zero, jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, AveragingState]:
        total = jax.tree.map(lambda t, g: t + g / number, state.total, updates)
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
    """Make the update that a learner's options describe.

    Args:
        optimizer: optax transformation, torch optimizer, or None for no update at all.
        parameters: the torch model's parameters by name; None for a model without torch.
        clip_norm: most that the norm of all gradients may be.
        clip_value: most that the size of an element may be.
        accumulate: gradients averaged for one update.
        schedule: factor of the learning rate by number of updates, an optax schedule.
        track_norm: store the norm of the last gradients.

    Returns:
        The update; None for a torch optimizer that has no translation.
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
