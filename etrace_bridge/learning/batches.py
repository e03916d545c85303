"""Batches as users give them to `fit` and `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from etrace_bridge._errors import InputError


def split_batch(item: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and mask of a batch: `(xs, targets)` or `(xs, targets, mask)`, or a dict with
    these keys.
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


def count_batches(source: Any, most: int | None) -> int | None:
    """How many batches there will be, if that is known."""
    try:
        length = len(source)
    except TypeError:
        return most
    return length if most is None else min(length, most)


def batch_shapes(item: Any) -> tuple:
    """The shapes in a batch: a batch of new shapes is compiled for."""
    return tuple(np.shape(x) if hasattr(x, "shape") else type(x) for x in jax.tree.leaves(item))
