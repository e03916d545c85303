"""Losses over a whole sequence: one pass for the outputs, then one online pass with the loss's
derivative with respect to each of them.

Every rule is linear in the derivative of the loss with respect to the outputs. So the gradient of
any function L of all outputs is that of the step losses `<c_t, y_t>` with `c_t = dL/dy_t`, which is
known once the outputs of all steps are. The first pass stores outputs only, not activations.
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
    """A loss that reads values while it runs and so cannot be compiled; torch computes it and its
    derivative.

    Attributes:
        function: the loss, on torch tensors.
        ranges: what it demands of targets that are indices; not known.
        reads: the outputs by which it has a derivative; not known.
    """

    function: Any
    ranges: ClassVar[list[InputRange]] = []
    reads: ClassVar[None] = None

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss, from within a compiled program."""
        floating = inexact(output)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in floating]
        held = jax.tree.map(jax.lax.stop_gradient, output)
        value, gradients = jax.pure_callback(
            self._run, (jax.ShapeDtypeStruct((), floating[0].dtype), shapes), held, target
        )
        for gradient, x, fixed in zip(gradients, floating, inexact(held), strict=True):
            # The difference is zero, with the derivative of `x`.
            value = value + jnp.sum(gradient * (x - fixed))
        return value

    def _run(self, output: Any, target: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        given, labels = jax.tree.map(lambda t: _as_torch(np.array(t)), (output, target))
        floating = [t for t in jax.tree.leaves(given) if t.is_floating_point() or t.is_complex()]
        with torch.enable_grad():
            for t in floating:
                t.requires_grad_()
            value = self.function(given, labels).reshape(())
            # A loss may read some outputs only.
            gradients = torch.autograd.grad(value, floating, materialize_grads=True)
        dtype = floating[0].detach().numpy().dtype
        return value.detach().numpy().astype(dtype), [
            g.numpy().astype(t.detach().numpy().dtype)
            for g, t in zip(gradients, floating, strict=True)
        ]


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

    @property
    def reads(self) -> frozenset[int] | None:
        """Positions of the outputs by which the loss has a derivative; None if it may be all."""
        return self.loss.reads

    def __call__(self, output: Any, cotangent: Sequence[Any]) -> Any:
        """Return the loss of one step, given the derivative with respect to its output."""
        return linear_loss(output, cotangent)

    def value(self, outputs: Any, target: Any) -> Any:
        """Return the loss of a sequence, from time-major outputs."""
        return self.loss(jax.tree.map(self.arrange, outputs), target)

    def differentiate(self, outputs: Any, target: Any) -> tuple[Any, list[Any]]:
        """Return the loss, and its derivative with respect to the floating-point outputs of every
        step.
        """
        leaves, tree = jax.tree.flatten(outputs)

        def of_floats(some: list[Any]) -> Any:
            given = iter(some)
            full = [next(given) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves]
            return self.value(jax.tree.unflatten(tree, full), target)

        return jax.value_and_grad(of_floats)(inexact(outputs))

    def in_place(self, value: Any, length: int) -> Any:
        """Return the loss as losses of the steps: all of it at the last."""
        return jnp.zeros(length, value.dtype).at[-1].set(value)


def linear_loss(output: Any, cotangent: Sequence[Any]) -> Any:
    """Return `<cotangent, output>` over the floating-point arrays of an output."""
    return sum(jnp.sum((c * o).real) for c, o in zip(cotangent, inexact(output), strict=True))


def inexact(tree: Any) -> list[Any]:
    """Return the floating-point and complex arrays of a tree."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
