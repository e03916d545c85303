"""Short batches, padded to the size of the others so that no new program is compiled for them.

Copies of the last batch element are appended, with the factor zero for their losses. This gives the
results of the short batch wherever an element's results are the same in a batch of any size, and
the loss is a mean or a sum over the batch. Where that is not certain, the batch stays short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from etrace_bridge.learning.batches import split_batch
from etrace_bridge.learning.reader import SequenceData
from etrace_bridge.rules import Rule


def full_batch_size(batches: Any, is_batch_first: Callable[[Any], bool]) -> int | None:
    """Return the size of all batches but the last; None unless the last is known to be shorter.

    Args:
        batches: as for `fit`; known are a DataLoader, a list or tuple, and what has a
            `full_batch_size` of its own.
        is_batch_first: tells whether sequences such as these are (batch, time, …).
    """
    own = getattr(batches, "full_batch_size", None)
    if own is not None:
        return own
    if isinstance(batches, DataLoader):
        return _of_loader(batches)
    if not isinstance(batches, (list, tuple)) or len(batches) < 2:
        return None
    axis = 0 if is_batch_first(split_batch(batches[0])[0]) else 1
    shapes = [_first_shape(split_batch(item)[0])[axis : axis + 1] for item in batches]
    if not all(shapes) or len(set(shapes[:-1])) != 1:
        return None
    full, last = int(shapes[0][0]), int(shapes[-1][0])
    return full if last < full else None


def _first_shape(xs: Any) -> tuple:
    """Return the shape of the first input; `()` for a packed sequence, which has no batch axis."""
    leaves = jax.tree.leaves(xs, is_leaf=lambda x: isinstance(x, PackedSequence))
    return tuple(getattr(leaves[0], "shape", ())) if leaves else ()


def _of_loader(loader: DataLoader) -> int | None:
    size = loader.batch_size
    try:
        count = len(loader.sampler)  # pyright: ignore[reportArgumentType] - not all have a length
    except TypeError:  # of an iterable dataset
        return None
    return None if size is None or loader.drop_last else size_to_fill(count, size)


def size_to_fill(count: int, size: int) -> int | None:
    """Return `size` if batches of it leave a shorter one at the end of `count` elements."""
    return size if count > size and count % size else None


class Filling:
    """Pads a learner's short batches.

    Args:
        rule: the learner's rule.
        per_sequence: targets are one for each sequence, without a time axis.
        by_step: the loss is one of each step, not of a whole sequence.

    Attributes:
        size: batch elements to fill up to; None: batches stay as they are.
    """

    def __init__(self, rule: Rule, per_sequence: bool, by_step: bool) -> None:
        self.size: int | None = None
        self._by_step = by_step
        self._by_row = not rule.needs_loss and not rule.mixes_batch
        self._target_axis = 0 if per_sequence else 1

    @contextmanager
    def up_to(self, size: int | None) -> Iterator[None]:
        """Pad batches up to `size` elements in this context; None changes nothing."""
        before, self.size = self.size, size or self.size
        try:
            yield
        finally:
            self.size = before

    def fill(self, data: SequenceData, learns: bool) -> SequenceData | None:
        """Return a sequence with more batch elements, of which `rows` count; None if it stays as it
        is.

        Args:
            data: the sequence.
            learns: a gradient is wanted, so that the rule matters.
        """
        size, rows = self.size, np.shape(data.args[0])[1]
        if size is None or rows > size or not self._by_step or (learns and not self._by_row):
            return None
        axis, targets = self._target_axis, jax.tree.leaves(data.targets)
        if any(np.shape(a)[1] != rows for a in data.args) or any(
            np.shape(t)[axis : axis + 1] != (rows,) for t in targets
        ):
            return None
        mask = data.mask
        if np.ndim(0 if mask is None else mask) == 2:
            mask = np.pad(np.asarray(mask), ((0, 0), (0, size - rows)))
        return replace(
            data,
            args=[_lengthened(a, 1, size) for a in data.args],
            target=jax.tree.map(lambda t: _lengthened(t, 0, size), data.target),
            targets=jax.tree.map(lambda t: _lengthened(t, axis, size), data.targets),
            mask=mask,
            rows=rows,
        )


def cut_outputs(outputs: Any, data: SequenceData) -> Any:
    """Return the outputs of the batch elements that the user gave."""
    if data.rows is None or data.rows == np.shape(data.args[0])[1]:
        return outputs
    return jax.tree.map(lambda x: np.asarray(x)[:, : data.rows], outputs)


def _lengthened(x: Any, axis: int, size: int) -> Any:
    """Append copies of an array's last element along an axis."""
    rows = x.shape[axis]
    if rows == size:
        return x
    index = np.minimum(np.arange(size), rows - 1)
    if isinstance(x, torch.Tensor):
        return x.index_select(axis, torch.from_numpy(index))
    return np.take(np.asarray(x), index, axis)
