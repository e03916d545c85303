"""Losses over a whole sequence: one pass for the outputs, one online pass with the loss's
derivative by each of them.

Every rule is linear in the derivative of the loss by the outputs. So the gradient of any function L
of all outputs is that of the step losses `<c_t, y_t>` with `c_t = dL/dy_t`, which is known once the
outputs of all steps are. The first pass keeps outputs only, not activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge.frontend import InputRange
from etrace_bridge.learning.losses import JaxLoss

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: jnp.mean(x, axis=0),
    "sum": lambda x: jnp.sum(x, axis=0),
}


@dataclass(frozen=True, eq=False)
class LossInTorch:
    """A loss of one output tensor that asks for values while it runs, and so cannot be compiled:
    torch computes it and its derivative.

    Attributes:
        function: the loss, on torch tensors.
    """

    function: Any
    ranges: ClassVar[list[InputRange]] = []

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss, from within a compiled program."""
        shapes = (
            jax.ShapeDtypeStruct((), output.dtype),
            jax.ShapeDtypeStruct(output.shape, output.dtype),
        )
        value, gradient = jax.pure_callback(
            self._run, shapes, jax.lax.stop_gradient(output), target
        )
        offset = output - jax.lax.stop_gradient(output)  # zero, with the output's derivative
        return value + jnp.sum(gradient * offset)

    def _run(self, output: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
        given = torch.tensor(np.array(output)).requires_grad_()
        labels = jax.tree.map(lambda t: _as_torch(np.array(t)), target)
        with torch.enable_grad():
            value = self.function(given, labels).reshape(())
            gradient = torch.autograd.grad(value, given)[0]
        dtype = np.asarray(output).dtype
        return value.detach().numpy().astype(dtype), gradient.numpy().astype(dtype)


def _as_torch(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array if array.dtype.kind in "fcb" else array.astype(np.int64))


@dataclass(frozen=True, eq=False)
class SequenceLoss:
    """A loss of all outputs; as a loss of one step, `(output, cotangent) -> <cotangent, output>`.

    Attributes:
        loss: `(outputs, target) -> scalar`.
        arrange: what brings time-major outputs into the form that the loss takes.
    """

    loss: JaxLoss | LossInTorch
    arrange: Callable[[Any], Any]

    @property
    def ranges(self) -> list[InputRange]:
        """What the loss demands of targets that are indices."""
        return self.loss.ranges

    def __call__(self, output: Any, cotangent: Sequence[Any]) -> Any:
        """The loss of one step, given the derivative by its output."""
        return sum(jnp.sum((c * o).real) for c, o in zip(cotangent, _inexact(output), strict=True))

    def value(self, outputs: Any, target: Any) -> Any:
        """The loss of a sequence, from time-major outputs."""
        return self.loss(jax.tree.map(self.arrange, outputs), target)

    def differentiate(self, outputs: Any, target: Any) -> tuple[Any, list[Any]]:
        """The loss, and its derivative by the floating outputs of every step."""
        leaves, tree = jax.tree.flatten(outputs)

        def of_inexact(some: list[Any]) -> Any:
            given = iter(some)
            full = [next(given) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves]
            return self.value(jax.tree.unflatten(tree, full), target)

        return jax.value_and_grad(of_inexact)(_inexact(outputs))

    def in_place(self, value: Any, length: int) -> Any:
        """The loss as losses of the steps: all of it at the last."""
        return jnp.zeros(length, value.dtype).at[-1].set(value)


def _inexact(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
