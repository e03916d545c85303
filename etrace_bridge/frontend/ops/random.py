"""Random ops. Values come from JAX's generator, so they have torch's distribution, not torch's
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.arrays import expand_to, full, ints, scalar, select, zeros_like
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, to_jax_dtype
from etrace_bridge.frontend.ops.mathematics import scaled
from etrace_bridge.frontend.ops.registry import implements, next_key


def _uniform(shape: Any, dtype: torch.dtype) -> Any:
    return jax.random.uniform(next_key(), tuple(shape), to_jax_dtype(dtype))


def _normal(shape: Any, dtype: torch.dtype) -> Any:
    return jax.random.normal(next_key(), tuple(shape), to_jax_dtype(dtype))


# ---- dropout


def _keep_mask(shape: Any, p: float) -> Any:
    return jax.random.bernoulli(next_key(), 1 - p, tuple(shape))


def _drop(x: Any, p: float, shape: Any) -> Any:
    """Set entries (or whole features, by a mask of smaller shape) to 0 and scale up the others."""
    if p == 0:
        return x
    if p == 1:
        return zeros_like(x)
    return select(_keep_mask(shape, p), scaled(x, 1 / (1 - p)), zeros_like(x))


@implements("dropout", may_return_input=True)
def dropout(
    input: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> Any:
    """Set entries to 0 with probability p and scale the others by `1 / (1 - p)`."""
    return _drop(input, p, np.shape(input)) if (training if train is None else train) else input


def _feature_dropout(batched_ndim: int | None) -> Callable:
    def rule(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        batched = batched_ndim is None or np.ndim(input) == batched_ndim
        kept = 2 if batched else 1
        return (
            _drop(input, p, (*np.shape(input)[:kept], *(1,) * (np.ndim(input) - kept)))
            if training
            else input
        )

    return rule


# torch's `dropout2d` takes any tensor as batched; the others accept one without a batch.
implements("dropout1d", may_return_input=True)(_feature_dropout(3))
implements("dropout2d", "feature_dropout", may_return_input=True)(_feature_dropout(None))
implements("dropout3d", may_return_input=True)(_feature_dropout(5))


def _alpha_drop(x: Any, p: float, shape: Any) -> Any:
    """Drop to the negative saturation of selu and restore mean 0 and variance 1."""
    if p == 0:
        return x
    low = -1.6732632423543772 * 1.0507009873554805
    a = (1 - p + p * (1 - p) * low**2) ** -0.5 if p < 1 else 0.0
    dropped = (
        select(_keep_mask(shape, p), x, scalar(low, x))
        if p < 1
        else full(np.shape(x), low, dtype_of(x))
    )
    return lax.add(scaled(dropped, a), scalar(-a * low * p, x))


def _enter_alpha(name: str, by_feature: bool) -> None:
    def rule(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        shape = (
            (*np.shape(input)[:2], *(1,) * (np.ndim(input) - 2)) if by_feature else np.shape(input)
        )
        return _alpha_drop(input, p, shape) if training else input

    implements(name, may_return_input=True)(rule)


_enter_alpha("alpha_dropout", False)
_enter_alpha("feature_alpha_dropout", True)


@implements("native_dropout")
def native_dropout(input: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """Dropout with its mask."""
    keep = (
        _keep_mask(np.shape(input), p)
        if train is not False and p > 0
        else full(np.shape(input), True, torch.bool)
    )
    if train is False:
        return input, keep
    return select(keep, scaled(input, 1 / (1 - p) if p < 1 else 0.0), zeros_like(input)), keep


# ---- samples with the shape of a tensor


@implements("bernoulli")
def bernoulli(input: Any, p: Any = None, *, generator: Any = None) -> Any:
    """0 or 1, with the probabilities given by the tensor itself or by `p`; no gradient."""
    probability = input if p is None else p
    probability = (
        probability if isinstance(probability, (int, float)) else lax.stop_gradient(probability)
    )
    return cast(jax.random.bernoulli(next_key(), probability, np.shape(input)), dtype_of(input))


implements("bernoulli_")(lambda input, p=0.5, *, generator=None: bernoulli(input, p))


@implements("normal_")
def normal_(input: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    """Fill with normal samples."""
    return lax.add(scaled(_normal(np.shape(input), dtype_of(input)), std), scalar(mean, input))


@implements("uniform_")
def uniform_(input: Any, *bounds: float, generator: Any = None, **named: float) -> Any:
    """Fill with uniform samples from [from, to)."""
    low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
    low, high = named.get("from", low), named.get("to", high)
    return lax.add(
        scaled(_uniform(np.shape(input), dtype_of(input)), high - low), scalar(low, input)
    )


@implements("exponential_")
def exponential_(input: Any, lambd: float = 1.0, *, generator: Any = None) -> Any:
    """Fill with exponential samples."""
    return scaled(jax.random.exponential(next_key(), np.shape(input), input.dtype), 1 / lambd)


@implements("random_")
def random_(input: Any, *bounds: int, generator: Any = None) -> Any:
    """Fill with integers from [from, to)."""
    limits = {torch.float32: 2**24, torch.float64: 2**53, torch.bool: 2, torch.uint8: 256}
    low, high = (
        bounds
        if len(bounds) == 2
        else (0, *bounds)
        if bounds
        else (0, limits.get(dtype_of(input), 2**31))
    )
    return cast(randint(low, min(high, 2**31 - 1), np.shape(input)), dtype_of(input))


@implements("normal")
def normal(
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    *,
    generator: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Normal samples around tensors or numbers of means and deviations."""
    arrays = [v for v in (mean, std) if hasattr(v, "dtype")]
    shape = ints((size,)) if size is not None else np.broadcast_shapes(*map(np.shape, arrays))
    dtype = dtype or (dtype_of(arrays[0]) if arrays else torch.get_default_dtype())
    noise = _normal(shape, dtype)
    mean, std = (
        expand_to(lax.stop_gradient(v) if hasattr(v, "dtype") else cast(v, dtype), shape)
        for v in (mean, std)
    )
    return lax.add(lax.mul(noise, std), mean)


@implements("poisson")
def poisson(input: Any, generator: Any = None) -> Any:
    """Poisson samples with the rates given by the tensor."""
    return cast(
        jax.random.poisson(next_key(), lax.stop_gradient(input), np.shape(input)), dtype_of(input)
    )


@implements("multinomial")
def multinomial(
    input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Indices drawn with weights, with or without replacement."""
    scores = lax.log(lax.stop_gradient(input))
    if replacement:
        shape = (num_samples, *np.shape(input)[:-1])
        drawn = jax.random.categorical(next_key(), scores, shape=shape)
        return cast(lax.transpose(drawn, (*range(1, len(shape)), 0)), torch.int64)
    # The largest of independently Gumbel-perturbed scores are a weighted draw without replacement.
    noisy = lax.add(scores, jax.random.gumbel(next_key(), np.shape(scores), scores.dtype))
    return cast(lax.top_k(noisy, num_samples)[1], torch.int64)


# ---- new random tensors


def _enter_random(name: str, draw: Callable) -> None:
    def make(*size: Any, dtype: torch.dtype | None = None, generator: Any = None) -> Any:
        return draw(ints(size), dtype or torch.get_default_dtype())

    def like(input: Any, *, dtype: torch.dtype | None = None, generator: Any = None) -> Any:
        return draw(np.shape(input), dtype or dtype_of(input))

    implements(name)(make)
    implements(f"{name}_like")(like)


_enter_random("rand", _uniform)
_enter_random("randn", _normal)


@implements("randint")
def randint(
    *bounds: Any,
    dtype: torch.dtype = torch.int64,
    generator: Any = None,
    low: int = 0,
    high: Any = None,
) -> Any:
    """Integers from [low, high); called as `(high, size)` or `(low, high, size)`."""
    *numbers, size = bounds
    low, high = numbers if len(numbers) == 2 else (low, *numbers) if numbers else (low, high)
    drawn = jax.random.randint(next_key(), ints((size,)), low, high, to_jax_dtype(torch.int64))
    return cast(drawn, dtype)


@implements("randint_like")
def randint_like(input: Any, *bounds: int, dtype: torch.dtype | None = None, **named: int) -> Any:
    """Integers from [low, high) with the shape of a tensor."""
    return randint(*bounds, np.shape(input), dtype=dtype or dtype_of(input), **named)


@implements("randperm")
def randperm(n: int, *, dtype: torch.dtype = torch.int64, generator: Any = None) -> Any:
    """A random order of the integers below n."""
    return cast(jax.random.permutation(next_key(), n), dtype)
