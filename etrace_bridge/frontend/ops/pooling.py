"""Pooling over space: average, maximum, and their adaptive forms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.derivatives import replace_value
from etrace_bridge.frontend.ops.arrays import expand_to, scalar
from etrace_bridge.frontend.ops.convolution import Sizes, each
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype
from etrace_bridge.frontend.ops.indexing import take_along
from etrace_bridge.frontend.ops.ranges import require_range
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import reshape, slice_dim


def _outputs(n: int, k: int, s: int, p: int, d: int, ceil: bool) -> tuple[int, int]:
    """Count the windows of one dimension, and the padding needed after it for the last one."""
    reach = d * (k - 1) + 1
    count = (n + 2 * p - reach + (s - 1 if ceil else 0)) // s + 1
    # a window must start inside the input or the padding before it
    if ceil and (count - 1) * s >= n + p:
        count -= 1
    return count, (count - 1) * s + reach - n - p


def _windows(
    shape: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[list[int], list]:
    """Return the number of windows in each spatial dimension and the (before, after) padding; after
    may be negative.
    """
    sized = [_outputs(*v, ceil) for v in zip(shape, kernel, stride, padding, dilation, strict=True)]
    return [count for count, _ in sized], [
        (p, after) for p, (_, after) in zip(padding, sized, strict=True)
    ]


def _reduce_windows(x: Any, start: Any, op: Any, kernel: Any, stride: Any, space: Any) -> Any:
    """Reduce over windows of the last dimensions."""
    outer = np.ndim(x) - len(kernel)
    # A window that ends before the input does is a negative padding: cut instead.
    for d, (_, after) in enumerate(space, outer):
        x = slice_dim(x, d, 0, np.shape(x)[d] + min(after, 0))
    lead, no_space = (1,) * outer, ((0, 0),) * outer
    space = [(before, max(after, 0)) for before, after in space]
    return lax.reduce_window(x, start, op, (*lead, *kernel), (*lead, *stride), (*no_space, *space))


# ---- average


def _enter_average(n: int) -> None:
    def rule(
        input: Any,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel, pad = each(kernel_size, n), each(padding, n)
        step = kernel if stride is None or stride == [] or stride == () else each(stride, n)
        size = np.shape(input)[-n:]
        counts, space = _windows(size, kernel, step, pad, (1,) * n, ceil_mode)
        total = _reduce_windows(input, scalar(0, input), lax.add, kernel, step, space)
        if divisor_override is not None:
            return lax.div(total, scalar(divisor_override, input))
        per_axis = [
            _covered(*v, count_include_pad)
            for v in zip(size, kernel, step, pad, counts, strict=True)
        ]
        divisor = math.prod(np.ix_(*per_axis)).astype(input.dtype)
        if (divisor == divisor.flat[0]).all():
            return lax.div(total, divisor.flat[0])
        return lax.div(total, expand_to(divisor, np.shape(total)))

    implements(f"avg_pool{n}d")(rule)


def _covered(n: int, k: int, s: int, p: int, count: int, with_padding: bool) -> np.ndarray:
    """How many entries each window of one dimension averages over."""
    start = np.arange(count) * s - p
    end = np.minimum(start + k, n + p)
    return end - start if with_padding else np.minimum(end, n) - np.maximum(start, 0)


# ---- maximum


def _lowest(dtype: Any) -> np.ndarray:
    return np.asarray(
        -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min
    ).astype(dtype)


def _max_with_indices(
    x: Any, kernel: Any, stride: Any, dilation: Any, counts: Any, space: Any
) -> tuple[Any, Any]:
    """Maximum and its flat position in space, from one shifted copy of the input for each place in
    the kernel.
    """
    outer, size = np.ndim(x) - len(kernel), np.shape(x)[-len(kernel) :]
    lowest = _lowest(x.dtype)
    padded = lax.pad(x, lowest, [(0, 0, 0)] * outer + [(*s, 0) for s in space])
    copies, places = [], []
    for offset in itertools.product(*map(range, kernel)):
        copy, place = padded, np.zeros((), np.int64)
        for d, (o, s, dil, count, (before, _), n) in enumerate(
            zip(offset, stride, dilation, counts, space, size, strict=True)
        ):
            begin = o * dil
            copy = slice_dim(copy, outer + d, begin, begin + (count - 1) * s + 1, s)
            place = place[..., None] * n + begin + np.arange(count) * s - before
        copies.append(lax.expand_dims(copy, (np.ndim(x),)))
        places.append(place)
    stacked = lax.concatenate(copies, np.ndim(x))
    best = lax.expand_dims(
        lax.argmax(lax.stop_gradient(stacked), np.ndim(x), np.int32), (np.ndim(x),)
    )
    where = np.stack(places, -1).astype(to_jax_dtype(torch.int64))
    index = take_along(
        lax.broadcast_in_dim(where, np.shape(stacked), tuple(range(outer, np.ndim(x) + 1))),
        best,
        np.ndim(x),
    )
    values = take_along(stacked, best, np.ndim(x))
    return lax.squeeze(values, (np.ndim(x),)), lax.squeeze(index, (np.ndim(x),))


def _enter_maximum(n: int) -> None:
    def pool(
        input: Any,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        kernel, pad, spread = each(kernel_size, n), each(padding, n), each(dilation, n)
        step = kernel if stride is None or stride == [] or stride == () else each(stride, n)
        counts, space = _windows(np.shape(input)[-n:], kernel, step, pad, spread, ceil_mode)
        if return_indices or any(d != 1 for d in spread):
            result = _max_with_indices(input, kernel, step, spread, counts, space)
            return result if return_indices else result[0]
        # The gradient of a tie goes to the first maximum, here and in torch.
        return _reduce_windows(input, _lowest(input.dtype), lax.max, kernel, step, space)

    def with_indices(
        input: Any, kernel_size: Sizes, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = True,
    ) -> Any:  # fmt: skip
        return pool(input, kernel_size, stride, padding, dilation, ceil_mode, True)

    implements(f"max_pool{n}d", f"_max_pool{n}d")(pool)
    implements(f"max_pool{n}d_with_indices")(with_indices)


# ---- adaptive


def _bins(n: int, count: int) -> list[tuple[int, int]]:
    """The window of each output: they cover the input evenly and may overlap by one."""
    return [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]


def _target(size: Sequence[int], output_size: Any, n: int) -> list[int]:
    wanted = (output_size,) * n if isinstance(output_size, int) else tuple(output_size)
    wanted = wanted * n if len(wanted) == 1 else wanted
    return [have if want is None else want for want, have in zip(wanted, size, strict=True)]


def average_axis(x: Any, d: int, count: int) -> Any:
    """Average one axis into `count` bins: a reshape and a sum if they are equal, else a product
    with a fixed matrix.
    """
    n = np.shape(x)[d]
    if n % count == 0:
        width = n // count
        wide = reshape(x, (*np.shape(x)[:d], count, width, *np.shape(x)[d + 1 :]))
        return lax.div(lax.reduce_sum(wide, (d + 1,)), scalar(width, x)) if width > 1 else x
    weights = np.zeros((count, n), x.dtype)
    for row, (start, end) in enumerate(_bins(n, count)):
        weights[row, start:end] = 1 / (end - start)
    return weigh_axis(x, d, weights)


def weigh_axis(x: Any, d: int, weights: np.ndarray) -> Any:
    """Multiply one axis by a fixed matrix `(new, old)`."""
    y = lax.dot_general(x, weights, (((d,), (1,)), ((), ())))
    order = list(range(np.ndim(x) - 1))
    order.insert(d, np.ndim(x) - 1)
    return lax.transpose(y, order) if order != sorted(order) else y


def _enter_adaptive(n: int) -> None:
    def average(input: Any, output_size: Any) -> Any:
        x = input
        for d, count in enumerate(_target(np.shape(x)[-n:], output_size, n), np.ndim(x) - n):
            x = average_axis(x, d, count)
        return x

    def with_indices(input: Any, output_size: Any, return_indices: bool = True) -> tuple[Any, Any]:
        ndim, size = np.ndim(input), np.shape(input)[-n:]
        flat = np.arange(math.prod(size), dtype=to_jax_dtype(torch.int64)).reshape(size)
        x, index = input, lax.broadcast_in_dim(flat, np.shape(input), tuple(range(ndim - n, ndim)))
        # Last dimension first: the first maximum in reading order wins a tie, as in torch.
        for d, count in reversed(list(enumerate(_target(size, output_size, n), ndim - n))):
            picked = []
            for start, end in _bins(np.shape(x)[d], count):
                window = slice_dim(x, d, start, end)
                best = lax.expand_dims(lax.argmax(lax.stop_gradient(window), d, np.int32), (d,))
                picked.append(
                    (
                        take_along(window, best, d),
                        take_along(slice_dim(index, d, start, end), best, d),
                    )
                )
            x, index = (lax.concatenate(parts, d) for parts in zip(*picked, strict=True))
        return x, index

    def maximum(input: Any, output_size: Any, return_indices: bool = False) -> Any:
        pooled = with_indices(input, output_size)
        return pooled if return_indices else pooled[0]

    implements(f"adaptive_avg_pool{n}d", f"_adaptive_avg_pool{n}d")(average)
    # `torch._C._nn` and aten give indices always, the functions in `torch.nn.functional` on demand.
    implements(f"adaptive_max_pool{n}d", f"F.adaptive_max_pool{n}d_with_indices")(with_indices)
    implements(f"F.adaptive_max_pool{n}d", f"F._adaptive_max_pool{n}d")(maximum)


for _n in (1, 2, 3):
    _enter_average(_n)
    _enter_maximum(_n)
    _enter_adaptive(_n)


# ---- maxima put back


def _enter_unpooling(n: int) -> None:
    def put_back(input: Any, indices: Any, output_size: Any, stride: Any = 0, pad: Any = 0) -> Any:
        """Put values back to where their maxima were. Windows that overlap share maxima: one value
        stays, and each gets the whole gradient, as in torch.
        """
        lead, size = np.shape(input)[:-n], math.prod(output_size)
        require_range(indices, f"max_unpool{n}d", 0, size)
        values, places = (jnp.reshape(a, (math.prod(lead), -1)) for a in (input, indices))
        blank, rows = jnp.zeros((len(values), size), values.dtype), np.arange(len(values))[:, None]
        at = blank.at[rows, places]
        return jnp.reshape(replace_value(at.add(values), at.set(values)), (*lead, *output_size))

    implements(f"aten::max_unpool{n}d")(put_back)


for _n in (2, 3):
    _enter_unpooling(_n)
