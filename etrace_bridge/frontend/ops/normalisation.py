"""Normalisation layers: layer, RMS, group, batch and instance norm, and unit vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.arrays import axis, expand_to, scalar
from etrace_bridge.frontend.ops.mathematics import clamp, scaled, shifted
from etrace_bridge.frontend.ops.reductions import linalg_vector_norm, vector_norm
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import reshape


def _standardise(x: Any, over: Sequence[int], eps: float) -> tuple[Any, Any, Any, Any]:
    """Subtract the mean and divide by the deviation; also give mean, variance and inverse
    deviation, same rank.
    """
    over = tuple(over)
    count = math.prod(np.shape(x)[d] for d in over)
    average = lambda v: lax.expand_dims(lax.div(lax.reduce_sum(v, over), scalar(count, v)), over)
    mean = average(x)
    centred = lax.sub(x, expand_to(mean, np.shape(x)))
    variance = average(lax.square(centred))
    inverse = lax.rsqrt(shifted(variance, eps))
    return lax.mul(centred, expand_to(inverse, np.shape(x))), mean, variance, inverse


def _channelwise(vector: Any, ndim: int) -> Any:
    """Reshape a vector over channels to (1, C, 1, ...)."""
    return reshape(vector, (1, np.size(vector)) + (1,) * (ndim - 2))


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else lax.mul(x, expand_to(weight, np.shape(x)))
    return x if bias is None else lax.add(x, expand_to(bias, np.shape(x)))


@implements("aten::native_layer_norm", "native_layer_norm")
def native_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    """Layer norm with the mean and the inverse deviation."""
    over = range(np.ndim(input) - len(normalized_shape), np.ndim(input))
    x, mean, _, inverse = _standardise(input, over, eps)
    return _affine(x, weight, bias), mean, inverse


@implements("layer_norm")
def layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Standardise over the last dimensions, then scale and shift."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@implements("rms_norm")
def rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """Divide by the root of the mean square over the last dimensions."""
    over = tuple(range(np.ndim(input) - len(normalized_shape), np.ndim(input)))
    eps = float(np.finfo(input.dtype).eps) if eps is None else eps
    mean = lax.div(
        lax.reduce_sum(lax.square(input), over), scalar(math.prod(normalized_shape), input)
    )
    inverse = lax.expand_dims(lax.rsqrt(shifted(mean, eps)), over)
    return _affine(lax.mul(input, expand_to(inverse, np.shape(input))), weight, None)


@implements("group_norm")
def group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Standardise over groups of channels, then scale and shift each channel."""
    return _group_norm(input, num_groups, weight, bias, eps)[0]


def _group_norm(x: Any, groups: int, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    shape = np.shape(x)
    grouped = reshape(x, (shape[0], groups, math.prod(shape[1:]) // groups))
    y, mean, _, inverse = _standardise(grouped, (2,), eps)
    weight, bias = (None if v is None else _channelwise(v, len(shape)) for v in (weight, bias))
    return (
        _affine(reshape(y, shape), weight, bias),
        lax.squeeze(mean, (2,)),
        lax.squeeze(inverse, (2,)),
    )


@implements("native_group_norm")
def native_group_norm(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple:
    """Group norm with the mean and the inverse deviation."""
    return _group_norm(input, group, weight, bias, eps)


# ---- batch and instance norm


def _moved(running: Any, new: Any, momentum: float) -> Any:
    """Move a running statistic towards the one of this batch; no gradient goes through it."""
    return lax.stop_gradient(lax.add(scaled(running, 1 - momentum), scaled(new, momentum)))


def normalise_batch(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any, Any, Any]:
    """Batch norm: the result, the statistics used (mean, inverse deviation), and the new running
    statistics or None.
    """
    ndim = np.ndim(x)
    weight, bias = (None if v is None else _channelwise(v, ndim) for v in (weight, bias))
    if not training:
        inverse = lax.rsqrt(shifted(var, eps))
        y = lax.sub(x, expand_to(_channelwise(mean, ndim), np.shape(x)))
        y = lax.mul(y, expand_to(_channelwise(inverse, ndim), np.shape(x)))
        return _affine(y, weight, bias), mean, inverse, None, None
    over = (0, *range(2, ndim))
    y, *statistics = _standardise(x, over, eps)
    batch_mean, variance, inverse = (lax.squeeze(v, over) for v in statistics)
    new_mean = new_var = None
    if mean is not None:
        count = math.prod(np.shape(x)[d] for d in over)
        new_mean = _moved(mean, batch_mean, momentum)
        new_var = _moved(var, scaled(variance, count / max(count - 1, 1)), momentum)
    return _affine(y, weight, bias), batch_mean, inverse, new_mean, new_var


_RUNNING = ("running_mean", "running_var")


@implements("F.batch_norm", writes=_RUNNING)
def functional_batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, Any, Any]:
    """Standardise each channel over batch and space; in training, also give the new running
    statistics.
    """
    y, _, _, mean, var = normalise_batch(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )
    return y, mean, var


@implements("batch_norm", writes=_RUNNING)
def batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float, cudnn_enabled: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`batch_norm` with the arguments of `torch.batch_norm`."""
    return functional_batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )


@implements("native_batch_norm", "aten::_native_batch_norm_legit", writes=_RUNNING)
def native_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[tuple, Any, Any]:
    """Batch norm with the statistics used."""
    *result, mean, var = normalise_batch(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )
    if not training:  # torch saves no statistics then
        result[1:] = [lax.full((0,), scalar(0, input))] * 2
    return tuple(result), mean, var


@implements("aten::_native_batch_norm_legit.no_stats")
def native_batch_norm_without_statistics(
    input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Batch norm by the statistics of the batch alone."""
    return normalise_batch(input, None, None, weight, bias, True, momentum, eps)[:3]


@implements("F.instance_norm", writes=_RUNNING)
def functional_instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, Any, Any]:
    """Standardise each channel of each sample over space, or by the running statistics."""
    if not use_input_stats:
        return functional_batch_norm(
            input, running_mean, running_var, weight, bias, False, momentum, eps
        )
    over = tuple(range(2, np.ndim(input)))
    y, sample_mean, variance, _ = _standardise(input, over, eps)
    weight, bias = (None if v is None else _channelwise(v, np.ndim(input)) for v in (weight, bias))
    new_mean = new_var = None
    if running_mean is not None:
        count, samples = math.prod(np.shape(input)[2:]), np.shape(input)[0]
        variance = scaled(variance, count / max(count - 1, 1))
        new_mean, new_var = (
            _moved(old, scaled(lax.reduce_sum(lax.squeeze(v, over), (0,)), 1 / samples), momentum)
            for old, v in ((running_mean, sample_mean), (running_var, variance))
        )
    return _affine(y, weight, bias), new_mean, new_var


@implements("instance_norm", writes=_RUNNING)
def instance_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool,
    momentum: float, eps: float, cudnn_enabled: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`instance_norm` with the arguments of `torch.instance_norm`."""
    return functional_instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


# ---- unit vectors


@implements("_weight_norm")
def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """A weight with direction `v` and length `g`, the norm being taken over all dimensions but one."""
    over = tuple(d for d in range(np.ndim(v)) if d != axis(dim, np.ndim(v)))
    return lax.mul(v, expand_to(lax.div(g, vector_norm(v, 2.0, over, True)), np.shape(v)))


@implements("normalize")
def normalize(
    input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Any:
    """Divide by the norm along a dimension, which counts as at least `eps`."""
    size = clamp(linalg_vector_norm(input, p, dim, True), eps)
    return lax.div(input, expand_to(size, np.shape(input)))
