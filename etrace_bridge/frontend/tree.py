"""A tree of brainstate States in nested dicts, addressed by path."""

from __future__ import annotations

from typing import Any

import brainstate

from etrace_bridge._errors import StateError
from etrace_bridge.frontend.names import Path


def outside_traces(state: brainstate.State) -> brainstate.State:
    """Make a state created during a brainstate trace count as one that existed before."""
    state.stack_level = 0
    return state


def insert(tree: dict, path: Path, state: brainstate.State, replace: type | None = None) -> None:
    """Put a state at a path; only a state of the type `replace` may be there already."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if isinstance(tree, brainstate.State):
            raise StateError(
                f"State path {path} passes through another state. Rename it with an adapter's "
                "`state_path`."
            )
    old = tree.get(path[-1])
    if old is not None and not (replace is not None and isinstance(old, replace)):
        raise StateError(
            f"Two tensors have the path {path}. Rename one with an adapter's `state_path`."
        )
    tree[path[-1]] = state


def lookup(tree: dict, path: Path) -> Any:
    """Return the state at a path, or None."""
    node: Any = tree
    for key in path:
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return node


def remove(tree: dict, path: Path) -> None:
    """Remove the state at a path from the tree and return it."""
    for key in path[:-1]:
        tree = tree.get(key, {})
    tree.pop(path[-1], None)


def copied(tree: dict) -> dict:
    """Return a tree of new dicts that holds the same States."""
    return {key: copied(x) if isinstance(x, dict) else x for key, x in tree.items()}
