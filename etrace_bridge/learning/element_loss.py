"""The loss of single batch elements, where the loss of a batch is their mean or sum.

A mask of single sequences needs a loss for each sequence, but a loss returns one number per batch.
So the loss runs on every element as a batch of one. Random numbers test whether that is the same
loss: `loss(batch)` must be the mean or the sum of these losses or, with class weights `c_b`,
torch's mean `sum of c_b l_b / sum of c_b`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import InputRange

_CLASS_LOSSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)


def class_weights(loss: Any) -> np.ndarray | None:
    """Return the class weights of a torch loss, module or `functools.partial`; None without any."""
    weight = None
    if isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        weight = loss.weight
    elif isinstance(loss, functools.partial) and loss.func in _CLASS_LOSSES:
        weight = loss.keywords.get("weight")
    return None if weight is None else weight.detach().cpu().numpy()


def ignored_value(ranges: Sequence[InputRange]) -> tuple[int, int] | None:
    """Return which target has labels that may be ignored, and the label that is ignored."""
    found = [
        (r.position, r.range.ignore)
        for r in ranges
        if r.range.ignore is not None and r.elements is None
    ]
    return found[0] if found else None


def without_empty_steps(function: Callable, ignored: tuple[int, int] | None) -> Callable:
    """Return a loss that is zero where every label is ignored, instead of torch's 0/0."""
    if ignored is None:
        return function
    position, value = ignored

    def loss(output: Any, target: Any) -> Any:
        leaves, tree = jax.tree.flatten(target)
        some = jnp.any(leaves[position] != value)
        leaves[position] = jnp.where(some, leaves[position], 0)
        found = function(output, jax.tree.unflatten(tree, leaves))
        return jnp.where(some, found, jnp.zeros_like(found))

    return loss


class Weighted(NamedTuple):
    """Targets, and factors (…, B) for the losses of the batch elements."""

    target: Any
    factors: Any


class ElementLoss:
    """A loss `(output, Weighted(target, factors)) -> scalar`: the losses of the batch elements
    times their factors.

    Args:
        function: the loss of a batch.
        output: shapes of the output of one step.
        target: shapes of its target.
        ranges: what the loss demands of targets that are indices.
        weights: class weights of its mean; None if it has none.
        name: what the loss is called.
        reads: as for `JaxLoss`.

    Attributes:
        is_mean: the batch's loss is the mean of its elements' losses rather than their sum.
    """

    def __init__(
        self,
        function: Callable,
        output: Any,
        target: Any,
        ranges: Sequence[InputRange],
        weights: Any,
        name: str,
        reads: frozenset[int],
    ) -> None:
        self.function, self.ranges, self.reads = function, list(ranges), reads
        self._weights, self._ignored, self._name = weights, ignored_value(ranges), name
        self._shapes = output, target
        self.is_mean = self._find_kind(output, target)

    def __call__(self, output: Any, wanted: Weighted) -> Any:
        """Return the masked loss of one step."""
        target, factors = wanted
        counts = factors != 0
        losses = self.of_elements(*jax.tree.map(lambda x: _keep(counts, x), (output, target)))
        found = jnp.where(counts, losses * factors.astype(losses.dtype), 0)
        return jnp.mean(found) if self.is_mean else jnp.sum(found)

    def of_elements(self, output: Any, target: Any) -> Any:
        """Return the loss of each batch element."""

        def one(output: Any, target: Any) -> Any:
            return self.function(*jax.tree.map(lambda x: x[None], (output, target)))

        return jax.vmap(one)(output, target)

    def counts(self, targets: Sequence[Any]) -> np.ndarray | None:
        """Return each element's weight in the loss's mean, (T, B), from flat targets with time in
        front.

        None if all elements weigh the same, or if the loss is a sum, where ignored labels add
        nothing.
        """
        if self._ignored is None or not self.is_mean:
            return None
        position, value = self._ignored
        labels = np.asarray(targets[position])
        valid = labels != value
        if valid.all() and not self.weighs_classes:
            return None
        share = valid.astype(np.float64)
        if self.weighs_classes:
            share = share * self._weights[np.where(valid, labels, 0)]
        return share.reshape(*share.shape[:2], -1).mean(-1)

    @property
    def weighs_classes(self) -> bool:
        """Whether the mean has class weights, which do not show in the loss of a single element."""
        return self.is_mean and self._weights is not None

    @cached_property
    def _takes_mean_of_others(self) -> bool:
        """Return whether an ignored label leaves the mean over the other elements."""
        draw, (position, value) = np.random.default_rng(1), self._ignored or (0, 0)
        outputs, targets = self._draw(draw, 3, *self._shapes, 0.1, 0.9)
        leaves, tree = jax.tree.flatten(targets)
        leaves[position] = leaves[position].at[0].set(value)
        others = jax.tree.map(lambda x: x[1:], (outputs, targets))
        whole = self.function(outputs, jax.tree.unflatten(tree, leaves))
        return bool(np.allclose(whole, self.function(*others), rtol=1e-4, atol=0))

    def check_ignored(self) -> None:
        """Raise if ignored labels are not simply left out of the loss's mean."""
        if not self._takes_mean_of_others:
            self._refuse(
                "with a label that is to be ignored, it is not the loss of the other elements (a "
                "second term, such as a penalty, counts all of them)"
            )

    def _find_kind(self, output: Any, target: Any) -> bool:
        sizes = {s.shape[:1] for s in jax.tree.leaves((output, target))}
        if len(sizes) != 1 or sizes == {()}:
            self._refuse("its output and target do not share a batch axis")
        draw = np.random.default_rng(0)
        count = max(2, next(iter(sizes))[0])
        # Probabilities, which every loss takes, and numbers of other sizes and signs, where the
        # loss may have other branches; what it cannot take is NaN or infinite there.
        ranges = (0.1, 0.9), (-2.0, 2.0), (-40.0, 40.0)
        trials = [self._try(draw, count, output, target, *limits) for limits in ranges]
        for is_mean in (True, False):
            if trials[0][is_mean] and all(agrees[is_mean] for agrees in trials):
                return is_mean
        return self._refuse(
            "the loss of a batch is neither the mean nor the sum of the losses of its elements"
        )

    def _try(
        self,
        draw: np.random.Generator,
        count: int,
        output: Any,
        target: Any,
        low: float,
        high: float,
    ) -> dict[bool, bool]:
        """Return whether the loss of random numbers is the mean (True) or the sum (False) of its
        elements' losses.

        Returns both if the loss is not finite for negative numbers.
        """
        outputs, targets = self._draw(draw, count, output, target, low, high)
        try:
            whole = self.function(outputs, targets)
            losses = self.of_elements(outputs, targets)
        except Exception as error:  # user code may fail in any way on a batch of another size
            self._refuse(f"it does not run on a batch of one ({type(error).__name__}: {error})")
        share = np.ones(count)
        if self._weights is not None and self._ignored is not None:
            labels = np.asarray(jax.tree.leaves(targets)[self._ignored[0]])
            share = self._weights[labels].reshape(count, -1).mean(-1)
        whole, losses = np.float64(whole), np.asarray(losses, np.float64)
        if not np.isfinite(whole) or not np.isfinite(losses).all():
            return dict.fromkeys((True, False), low < 0)
        eps = 1e3 * float(jnp.finfo(jax.tree.leaves(outputs)[0].dtype).eps)
        sums = {True: losses * share / share.sum(), False: losses}
        return {
            kind: bool(abs(whole - each.sum()) <= eps * max(abs(each).sum(), 1e-8))
            for kind, each in sums.items()
        }

    def _draw(
        self,
        draw: np.random.Generator,
        count: int,
        output: Any,
        target: Any,
        low: float,
        high: float,
    ) -> tuple[Any, Any]:
        """Return random outputs and targets of a batch."""
        outputs = jax.tree.map(
            lambda s: jnp.asarray(draw.uniform(low, high, (count, *s.shape[1:])), s.dtype), output
        )
        leaves, tree = jax.tree.flatten(target)
        limits = {r.position: (r.range.low, r.range.high) for r in self.ranges}
        ignored = {} if self._ignored is None else {self._ignored[0]: self._ignored[1]}
        made = []
        for n, s in enumerate(leaves):
            shape = (count, *s.shape[1:])
            if jnp.issubdtype(s.dtype, jnp.inexact):
                made.append(jnp.asarray(draw.uniform(low, high, shape), s.dtype))
            else:
                first, end = limits.get(n, (0, 2))
                drawn = draw.integers(first, end, shape)
                # The value that is ignored may be one of the classes; none of it is drawn.
                other = first if ignored.get(n) != first else end - 1
                made.append(jnp.asarray(np.where(drawn == ignored.get(n), other, drawn), s.dtype))
        return outputs, jax.tree.unflatten(tree, made)

    def _refuse(self, reason: str) -> Any:
        raise InputError(
            f"The loss `{self._name}` cannot leave out single sequences: {reason}. A mask of "
            "single sequences, and labels that are to be ignored, need a loss that is a mean or a "
            "sum over the batch. Write it so; or leave out whole time steps by a mask (T,), with "
            "labels that all count."
        )


def _keep(counts: Any, x: Any) -> Any:
    """Replace batch elements that do not count by zeros, so that their values do not matter."""
    return jnp.where(counts.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))
