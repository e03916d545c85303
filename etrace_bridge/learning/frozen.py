"""A step in which single sequences may stand still: their states and traces do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np


class FrozenStep(brainstate.nn.Module):
    """A module's step with one more argument, (batch,): where it is zero, the states of that batch
    element do not change.

    It is compiled like any model: new states are `where(keep, new, old)`, position by position, so
    every rule that follows the states leaves the trace of such an element as it is.

    Args:
        net: the module.
        batch: size of the batch axis; None: no state has one, so none is frozen.
        belongs: whether a State at a path belongs to a sequence rather than to the model.
    """

    def __init__(
        self,
        net: brainstate.nn.Module,
        batch: int | None,
        belongs: Callable[[Any, brainstate.State], bool],
    ) -> None:
        super().__init__()
        self.net, self._batch, self._belongs = net, batch, belongs

    def states(self, *filters: Any, **options: Any) -> Any:
        """Return the module's own States, under its own paths."""
        return self.net.states(*filters, **options)

    def update(self, *args: Any) -> Any:
        """Run one step."""
        *inputs, keep = args
        moving = [state for path, state in self.net.states().items() if self._belongs(path, state)]
        before = [state.value for state in moving]
        output = self.net(*inputs)
        for state, old in zip(moving, before, strict=True):
            state.value = jax.tree.map(
                lambda new, old: self._chosen(keep, new, old), state.value, old
            )
        return output

    def _chosen(self, keep: Any, new: Any, old: Any) -> Any:
        if np.shape(new)[:1] != (self._batch,):
            return new
        return jnp.where(keep.reshape(-1, *(1,) * (new.ndim - 1)) != 0, new, old)
