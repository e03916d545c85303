"""The two passes over a step that follow positions.

Both work on integer arrays:

- backward, `feeds[v][state]`: the position of the new state that each element of `v` feeds;
- forward, `comes[v]`: the position of an old state that each element of `v` comes from.

-1 stands for none.

Element-wise equations keep positions, structural ones move them. Where a value's two numbers
differ, or an equation mixes positions, the path is not position by position, and that operand is a
cut.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etrace_bridge._jax_compat import Literal, Var
from etrace_bridge.compiler.feeds import MANY, Feeds, merge_feeds, merge_positions
from etrace_bridge.compiler.hidden_leaves import HiddenLeaf
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.primitives import (
    index_maps,
    is_elementwise,
    is_float,
    is_structural,
    passes_derivative,
)
from etrace_bridge.compiler.weight_views import WeightUse

Edge = tuple[int, int]  # (equation, operand)


@dataclass
class Alignment:
    """The result of the passes: what values feed, the cuts, and the equations of the core.

    Attributes:
        leaves: the hidden states.
        targets: indices of those whose future matters.
        feeds: what a variable feeds.
        origins: indices of the hidden states that a variable comes from.
        cuts: operands at which positions do not agree.
        core: indices of the equations of the core.
        dynamic: indices of structural equations that mix, because their indices are data.
    """

    leaves: tuple[HiddenLeaf, ...]
    targets: frozenset[int] = frozenset()
    feeds: dict[Var, Feeds] = field(default_factory=dict)
    origins: dict[Var, frozenset[int]] = field(default_factory=dict)
    cuts: set[Edge] = field(default_factory=set)
    core: tuple[int, ...] = ()
    dynamic: frozenset[int] = frozenset()

    @functools.cached_property
    def joined(self) -> tuple[int, ...]:
        """For each hidden state, the first state that the core joins it with.

        A state that does not matter is joined with none.
        """
        root = list(range(len(self.leaves)))

        def find(i: int) -> int:
            while root[i] != i:
                i = root[i]
            return i

        for leaf in self.leaves:
            is_literal = isinstance(leaf.outvar, Literal)
            for origin in () if is_literal else self.origins.get(leaf.outvar, ()):
                matter = {origin, leaf.index} <= self.targets
                if matter and self.leaves[origin].num_positions == leaf.num_positions:
                    a, b = sorted((find(origin), find(leaf.index)))
                    root[b] = a
        return tuple(find(i) for i in root)


class Aligner:
    """Runs the two passes, and holds what they have determined so far."""

    def __init__(
        self,
        minfo: ModuleInfo,
        use: WeightUse,
        leaves: tuple[HiddenLeaf, ...],
        targets: frozenset[int],
    ) -> None:
        self.eqns = minfo.jaxpr.eqns
        self.leaves, self.targets = leaves, targets
        constants = dict(zip(minfo.jaxpr.constvars, minfo.closed_jaxpr.consts, strict=True))
        self.positions = [leaf.positions() for leaf in leaves]
        self.cuts: set[Edge] = set()
        self.contact_eqns = set(use.contact_of_eqn)
        self.weights = use.weight_paths
        self.maps: dict[int, list[np.ndarray]] = {}
        self.dynamic: set[int] = set()  # structural equations whose indices are data
        for i, eqn in enumerate(self.eqns):
            if is_structural(eqn) and not is_elementwise(eqn) and i not in self.contact_eqns:
                maps = index_maps(eqn, constants)
                if maps is None:
                    self.dynamic.add(i)
                else:
                    self.maps[i] = maps

    def run(self) -> Aligner:
        """Repeat the passes until no cut is new."""
        while True:
            self.backward()
            if not self.forward():
                return self

    def aligned_kind(self, i: int) -> str:
        """Return `same` (element-wise), `moved` (structural) or `mixed` for an equation."""
        eqn = self.eqns[i]
        if i in self.contact_eqns or not passes_derivative(eqn):
            return "mixed"
        if is_elementwise(eqn):
            return "same"
        return "moved" if i in self.maps else "mixed"

    def edge_feeds(self, i: int, k: int, outvars: Sequence[Var] | None = None) -> Feeds:
        """Return what operand `k` of equation `i` feeds through this equation.

        With `outvars`, through a copy of the equation with these outputs.
        """
        eqn, kind = self.eqns[i], self.aligned_kind(i)
        operand = eqn.invars[k]
        result: Feeds = {}
        if kind == "mixed" or isinstance(operand, Literal) or not is_float(operand):
            return result
        for n, out in enumerate(outvars or eqn.outvars):
            for target, arrays in self.feeds.get(out, {}).items():
                for array in arrays:
                    if kind == "moved":
                        array = self._pull(i, k, n, array)
                    elif operand.aval.shape != out.aval.shape:
                        array = MANY
                    if array is not None:
                        merge_positions(result.setdefault(target, []), array)
        return {t: a for t, a in result.items() if a}

    def _pull(self, i: int, k: int, n: int, array: Any) -> Any:
        """Return what operand `k` of a structural equation feeds, from what output `n` feeds."""
        if array is MANY:
            return MANY
        eqn = self.eqns[i]
        sizes = [int(np.prod(v.aval.shape, dtype=np.int64)) for v in eqn.invars]
        start = sum(sizes[:k])
        ids = self.maps[i][n].reshape(-1)
        flat = array.reshape(-1)
        mine = (ids >= start) & (ids < start + sizes[k]) & (flat >= 0)
        if not mine.any():
            return None
        pulled = np.full(sizes[k], -1, dtype=np.int64)
        pulled[ids[mine] - start] = flat[mine]
        if (pulled[ids[mine] - start] != flat[mine]).any():
            return MANY
        return pulled.reshape(eqn.invars[k].aval.shape)

    def backward(self) -> None:
        """Follow the positions of new states."""
        self.feeds: dict[Var, Feeds] = {
            v: self.state_positions(v) for v in variables([leaf.outvar for leaf in self.leaves])
        }
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[i]
            if not any(v in self.feeds for v in eqn.outvars):
                continue
            for k, operand in enumerate(eqn.invars):
                if (i, k) in self.cuts or isinstance(operand, Literal) or operand in self.weights:
                    continue
                fed = self.edge_feeds(i, k)
                if fed:
                    self.feeds[operand] = merge_feeds(self.feeds.get(operand, {}), fed)

    def state_positions(self, out: Var) -> Feeds:
        """Return what a value feeds by being a new hidden state itself."""
        return {
            leaf.index: [self.positions[leaf.index]]
            for leaf in self.leaves
            if leaf.outvar is out and leaf.index in self.targets
        }

    def forward(self) -> bool:
        """Follow old states; return whether there is a new cut."""
        before = len(self.cuts)
        self.comes: dict[Var, np.ndarray] = {
            leaf.invar: self.positions[leaf.index] for leaf in self.leaves
        }
        self.origins: dict[Var, frozenset[int]] = {
            leaf.invar: frozenset([leaf.index]) for leaf in self.leaves
        }
        for i, eqn in enumerate(self.eqns):
            kind = self.aligned_kind(i)
            if kind == "mixed":
                continue
            for k, operand in enumerate(eqn.invars):
                if isinstance(operand, Literal) or operand not in self.comes or (i, k) in self.cuts:
                    continue
                feeds = self.edge_feeds(i, k)
                if feeds and not self._agrees(operand, feeds):
                    self.cuts.add((i, k))
            self._carry(i, kind)
        return len(self.cuts) > before

    def _agrees(self, operand: Var, feeds: Feeds) -> bool:
        comes = self.comes[operand]
        sizes = {self.leaves[o].num_positions for o in self.origins[operand]}
        for target, arrays in feeds.items():
            if sizes != {self.leaves[target].num_positions}:
                continue
            for array in arrays:
                if array is MANY:
                    continue
                both = (array >= 0) & (comes >= 0)
                if both.any() and (array[both] == comes[both]).all():
                    return True
        return False

    def _carry(self, i: int, kind: str) -> None:
        eqn = self.eqns[i]
        live = [
            (k, v)
            for k, v in enumerate(eqn.invars)
            if not isinstance(v, Literal) and v in self.comes and (i, k) not in self.cuts
        ]
        if not live:
            return
        origins = frozenset().union(*(self.origins[v] for _, v in live))
        for n, out in enumerate(eqn.outvars):
            if not is_float(out):
                continue
            if kind == "same":
                parts = [self.comes[v] for _, v in live if v.aval.shape == out.aval.shape]
                if not parts:
                    continue
                positions = parts[0]
                for part in parts[1:]:
                    positions = np.where(positions >= 0, positions, part)
            else:
                joined = np.concatenate(
                    [
                        self.comes[v].reshape(-1)
                        if isinstance(v, Var) and (k, v) in live
                        else np.full(int(np.prod(v.aval.shape, dtype=np.int64)), -1, dtype=np.int64)
                        for k, v in enumerate(eqn.invars)
                    ]
                )
                ids = self.maps[i][n]
                positions = np.where(ids >= 0, joined[np.maximum(ids, 0)], -1)
            if (positions >= 0).any():
                self.comes[out], self.origins[out] = positions, origins

    def result(self) -> Alignment:
        """Collect the alignment and the equations of the core."""
        live: set[Var] = {leaf.invar for leaf in self.leaves}
        core = []
        for i, eqn in enumerate(self.eqns):
            if i in self.contact_eqns:
                live.update(eqn.outvars)
                continue
            if self.aligned_kind(i) == "mixed" or not any(v in self.feeds for v in eqn.outvars):
                continue
            if any(
                v in live and (i, k) not in self.cuts
                for k, v in enumerate(eqn.invars)
                if not isinstance(v, Literal)
            ):
                core.append(i)
                live.update(v for v in eqn.outvars if is_float(v))
        return Alignment(
            self.leaves,
            self.targets,
            self.feeds,
            self.origins,
            self.cuts,
            tuple(core),
            frozenset(self.dynamic),
        )
