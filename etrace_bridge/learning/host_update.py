"""Updates that pass through torch: parameter hooks, and optimizers without a translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge.frontend import held_shape, to_real_jax
from etrace_bridge.frontend.complex import real_dtype
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.losses import jax_dtype
from etrace_bridge.learning.store import Store
from etrace_bridge.learning.torch_update import TorchUpdate, has_hooks, run_hooks
from etrace_bridge.learning.torch_watch import TorchWatch


class HostUpdate:
    """Passes gradients to torch and takes the new weights from it.

    Args:
        store: the learner's store.
        programs: its programs.
        parameters: the torch model's trained parameters by name; empty for other models.
        torch_update: the optimizer that runs in torch, if it does.
        torch_watch: is told of the weights that the optimizer writes.
    """

    def __init__(
        self,
        store: Store,
        programs: JittedPrograms,
        parameters: dict[str, torch.Tensor],
        torch_update: TorchUpdate | None,
        torch_watch: TorchWatch,
    ) -> None:
        self._store, self._programs, self._parameters = store, programs, parameters
        self._torch_update, self._torch_watch = torch_update, torch_watch

    @property
    def is_needed(self) -> bool:
        """Whether updates must leave the compiled program."""
        return self._torch_update is not None or has_hooks(self._parameters.values())

    def all_gradients(self, grads: Sequence[Any]) -> dict[str, Any]:
        """Return gradients by name, with zeros for torch parameters that the step does not use."""
        named = self._store.compiled.by_weight_name(grads)
        if not self._parameters:
            return named
        return {n: named[n] if n in named else _zeros_like(p) for n, p in self._parameters.items()}

    def apply(self, grads: Mapping[str, Any], unreached: frozenset[str]) -> None:
        """Run hooks and optimizer, and take over the new weights.

        Args:
            grads: gradients by name.
            unreached: names of the parameters that the loss's gradient cannot reach.
        """
        store, names = self._store, self._store.compiled.weight_names
        store.refresh_numbers()
        state = store.state
        theta = store.compiled.by_weight_name(state.theta)
        finished = run_hooks(grads, self._parameters)
        if self._torch_update is not None:
            new, opt = self._torch_update.apply(finished, theta, unreached), state.opt
            self._torch_watch.note()
        else:
            wanted = {n: to_real_jax(finished[n]) for n in names}
            new, opt = self._programs.apply(store.updater, unreached)(wanted, state.opt, theta)  # pyright: ignore[reportArgumentType] - one of the two is there
        theta = store.placement.put_weights(
            [jnp.asarray(new[n]) for n in names], store.compiled.program
        )
        store.state = state.replace(theta=theta, opt=opt)
        store.updates += 1


def _zeros_like(parameter: torch.Tensor) -> np.ndarray:
    return np.zeros(held_shape(parameter), real_dtype(jax_dtype(parameter)))
