"""Which positions of the states a value feeds, as arrays, and how they are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MANY = "many"  # an element that feeds several positions of one state


# by hidden state, the positions that a value's elements feed: one array for each way
Feeds = dict[int, list[Any]]


def merge_feeds(known: Feeds, new: Feeds) -> Feeds:
    """Return what two readers of a value feed together."""
    merged = {target: list(arrays) for target, arrays in known.items()}
    for target, arrays in new.items():
        for array in arrays:
            merge_positions(merged.setdefault(target, []), array)
    return merged


def feeds_by_group(feeds: Feeds, group_of: Sequence[int]) -> Feeds:
    """Return what a value feeds by hidden group: the states of a group share positions."""
    merged: Feeds = {}
    for target, arrays in sorted(feeds.items()):
        merged = merge_feeds(merged, {group_of[target]: arrays})
    return merged


def merge_positions(arrays: list[Any], new: Any) -> None:
    """Add positions to a list; they are joined with an entry that they do not contradict."""
    for n, old in enumerate(arrays):
        if old is MANY or new is MANY:
            if old is new:
                return
            continue
        both = np.greater_equal(old, 0) & np.greater_equal(new, 0)
        if (old[both] == new[both]).all():
            arrays[n] = np.where(old >= 0, old, new)
            return
    arrays.append(new)
