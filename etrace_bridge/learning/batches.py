"""Batches as users give them to `fit` and `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from etrace_bridge._errors import InputError


def split_batch(item: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and mask of a batch.

    A batch is `(xs, targets)`, `(xs, targets, mask)` or a dict with these keys.
    """
    if isinstance(item, Mapping) and "xs" in item and "targets" in item:
        return item["xs"], item["targets"], item.get("mask")
    if isinstance(item, (tuple, list)) and len(item) in (2, 3):
        return item[0], item[1], item[2] if len(item) == 3 else None
    found = (
        f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else type(item).__name__
    )
    raise InputError(
        f"A batch is a {found}; it must be `(xs, targets)` or `(xs, targets, mask)`, or a dict "
        "with the keys 'xs', 'targets' and, if wanted, 'mask'. Several inputs are a tuple: `((x1, "
        "x2), targets)`."
    )


class ReadAhead:
    """Reads batches, and can read one of them early.

    Args:
        batches: an iterator.
        unpack: what is done with the inputs, targets and mask of each batch.
    """

    def __init__(self, batches: Iterator[Any], unpack: Callable[..., tuple]) -> None:
        self._batches, self._unpack = batches, unpack
        self._error: BaseException | None = None
        self.next: tuple | None = None

    def fetch(self) -> None:
        """Read the next batch. An error is raised when the batch is taken."""
        if self.next is None and self._error is None:
            try:
                self.next = self._unpack(*split_batch(next(self._batches)))
            except BaseException as error:
                self._error = error

    def take(self) -> tuple | None:
        """Return inputs, targets and mask of the next batch; None after the last."""
        self.fetch()
        if isinstance(self._error, StopIteration):
            return None
        if self._error is not None:
            raise self._error
        found, self.next = self.next, None
        return found


def count_batches(source: Any, most: int | None) -> int | None:
    """Return the number of batches; None if it is unknown."""
    try:
        length = len(source)
    except TypeError:
        return most
    return length if most is None else min(length, most)


def batch_shapes(item: Any) -> tuple:
    """Return the shapes and dtypes in a batch, which decide whether it needs a new program."""
    return tuple(
        (np.shape(x), str(x.dtype)) if hasattr(x, "shape") else type(x)
        for x in jax.tree.leaves(item)
    )
