"""Positions: which place of which hidden state each element of a value feeds, and where that is
lost.

Every hidden state numbers its places 0, 1, 2, …; a packed state (`(B, 2H)` holding `h` and `c`)
numbers each of its blocks from 0. Two passes over the step, on integer arrays:

- backward, `feeds[v][state]`: the place of the new state that each element of `v` feeds (-1: none);
- forward, `comes[v]`: the place of an old state that each element of `v` comes from (-1: none).

Element-wise equations keep places, structural ones carry them along. Where a value's two numbers
differ, or an equation mixes places, the path is not position by position: that operand is a *cut*,
held constant in the core.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import brainstate
import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.diagnostics import Path
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.primitives import (
    index_maps,
    is_elementwise,
    is_float,
    is_structural,
    passes_derivative,
)
from etrace_bridge.compiler.views import Contact, WeightUse, find_weight_use

MANY = "many"  # an element that feeds several places of one state

Edge = tuple[int, int]  # (equation, operand)
# by hidden state, the places that a value's elements feed: one array for each way
Feeds = dict[int, list[Any]]


@dataclass(frozen=True)
class HiddenLeaf:
    """One hidden state of the step and how it is divided into virtual states.

    Attributes:
        index: its place among the hidden states.
        path: its path.
        invar: its variable before the step.
        outvar: its variable after the step.
        axis: the axis along which several states are packed; None for an ordinary state.
        count: how many states it holds.
    """

    index: int
    path: Path
    invar: Var
    outvar: Any
    axis: int | None = None
    count: int = 1

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of one virtual state."""
        shape = list(self.invar.aval.shape)
        if self.axis is None:
            return tuple(shape)
        shape[self.axis] //= self.count
        if shape[self.axis] == 1:
            del shape[self.axis]
        return tuple(shape)

    @property
    def num_places(self) -> int:
        """Number of places of one virtual state."""
        return int(np.prod(self.invar.aval.shape, dtype=np.int64)) // self.count

    def places(self) -> np.ndarray:
        """Return the place of each element."""
        shape = self.invar.aval.shape
        if self.axis is None:
            return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
        block = list(shape)
        block[self.axis] //= self.count
        one = np.arange(int(np.prod(block, dtype=np.int64))).reshape(block)
        return np.concatenate([one] * self.count, axis=self.axis)


@dataclass
class Alignment:
    """The result: places that values feed, the cuts, and the equations of the core."""

    leaves: tuple[HiddenLeaf, ...]
    targets: frozenset[int] = frozenset()
    feeds: dict[Var, Feeds] = field(default_factory=dict)
    origins: dict[Var, frozenset[int]] = field(default_factory=dict)
    cuts: set[Edge] = field(default_factory=set)
    core: tuple[int, ...] = ()
    # structural equations whose indices are not static: they mix
    dynamic: frozenset[int] = frozenset()

    @functools.cached_property
    def joined(self) -> tuple[int, ...]:
        """For each hidden state, the first of those that the core joins it with.

        A state that does not matter stays alone.
        """
        root = list(range(len(self.leaves)))

        def find(i: int) -> int:
            while root[i] != i:
                i = root[i]
            return i

        for leaf in self.leaves:
            origins = (
                self.origins.get(leaf.outvar, ()) if not isinstance(leaf.outvar, Literal) else ()
            )
            for origin in origins:
                if {origin, leaf.index} <= self.targets and self.leaves[
                    origin
                ].num_places == leaf.num_places:
                    a, b = sorted((find(origin), find(leaf.index)))
                    root[b] = a
        return tuple(find(i) for i in root)


def find_hidden_leaves(minfo: ModuleInfo) -> tuple[HiddenLeaf, ...]:
    """Return the step's hidden states, packed ones divided."""
    leaves = []
    for i, (path, invar) in enumerate(minfo.hidden_path_to_invar.items()):
        outvar = minfo.hidden_path_to_outvar[path]
        axis, count = _packing(minfo, minfo.retrieved_model_states[path], invar, outvar)
        leaves.append(HiddenLeaf(i, path, invar, outvar, axis, count))
    return tuple(leaves)


def _packing(
    minfo: ModuleInfo, state: brainstate.State, invar: Var, outvar: Any
) -> tuple[int | None, int]:
    """Return a state read in equal slices and written by a concatenation of such slices holds
    several states.
    """
    if isinstance(state, brainstate.HiddenGroupState):
        return len(invar.aval.shape) - 1, invar.aval.shape[-1]
    eqns = minfo.jaxpr.eqns
    writer = next((e for e in eqns if outvar in e.outvars), None)
    if writer is None or writer.primitive.name not in ("concatenate", "stack"):
        return None, 1
    axis = (
        writer.params["dimension"]
        if writer.primitive.name == "concatenate"
        else writer.params["axis"]
    )
    count = len(writer.invars)
    sizes = (
        {v.aval.shape[axis] for v in writer.invars}
        if writer.primitive.name == "concatenate"
        else {1}
    )
    block = invar.aval.shape[axis] // count
    if count < 2 or sizes != {block}:
        return None, 1
    bounds = [b for e in eqns if invar in e.invars for b in _slice_bounds(e, axis)]
    if not bounds or any(b % block for b in bounds):
        return None, 1
    return axis, count


def _slice_bounds(eqn: JaxprEqn, axis: int) -> list[int]:
    if eqn.primitive.name == "split" and eqn.params["axis"] == axis:
        return [int(b) for b in np.cumsum(eqn.params["sizes"])]
    if eqn.primitive.name == "slice":
        low, high = eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]
        return [low, high] if high - low < eqn.invars[0].aval.shape[axis] else []
    return []


def find_alignment(minfo: ModuleInfo) -> tuple[WeightUse, Alignment, set[Var]]:
    """Return weight use, alignment and the variables of states that matter: what groups and
    relations are made from.
    """
    use = find_weight_use(minfo)
    leaves = find_hidden_leaves(minfo)
    matter = states_that_matter(minfo)
    targets = frozenset(leaf.index for leaf in leaves if leaf.invar in matter)
    return use, align(minfo, use, leaves, targets), matter


def align(
    minfo: ModuleInfo, use: WeightUse, leaves: tuple[HiddenLeaf, ...], targets: frozenset[int]
) -> Alignment:
    """Run the two passes until no new cut is found.

    Args:
        minfo: the step.
        use: its contacts.
        leaves: its hidden states.
        targets: the hidden states whose future matters; nothing needs to be traced for the others.
    """
    return Aligner(minfo, use, leaves, targets).run().result()


class Aligner:
    """The two passes and what they know."""

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
        self.places = [leaf.places() for leaf in leaves]
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
        """Return `same` (element-wise), `moved` (structural) or `mixed`."""
        eqn = self.eqns[i]
        if i in self.contact_eqns or not passes_derivative(eqn):
            return "mixed"
        if is_elementwise(eqn):
            return "same"
        return "moved" if i in self.maps else "mixed"

    def edge_feeds(self, i: int, k: int, outvars: Sequence[Var] | None = None) -> Feeds:
        """Return what operand `k` of equation `i` feeds through this equation, or through a copy of
        it with other outputs.
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
                        merge_places(result.setdefault(target, []), array)
        return {t: a for t, a in result.items() if a}

    def _pull(self, i: int, k: int, n: int, array: Any) -> Any:
        """Return places fed by operand `k`, from the places fed by output `n`, of a structural
        equation.
        """
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
        """Follow the places of new states."""
        self.feeds: dict[Var, Feeds] = {
            v: self.own_places(v) for v in variables([leaf.outvar for leaf in self.leaves])
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

    def own_places(self, out: Var) -> Feeds:
        """Return what a value feeds by being a new hidden state."""
        return {
            leaf.index: [self.places[leaf.index]]
            for leaf in self.leaves
            if leaf.outvar is out and leaf.index in self.targets
        }

    def forward(self) -> bool:
        """Follow old states; returns whether a new cut was found."""
        before = len(self.cuts)
        self.comes: dict[Var, np.ndarray] = {
            leaf.invar: self.places[leaf.index] for leaf in self.leaves
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
        sizes = {self.leaves[o].num_places for o in self.origins[operand]}
        for target, arrays in feeds.items():
            if sizes != {self.leaves[target].num_places}:
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
                places = parts[0]
                for part in parts[1:]:
                    places = np.where(places >= 0, places, part)
            else:
                joined = np.concatenate(
                    [
                        self.comes[v].reshape(-1)
                        if (k, v) in live
                        else np.full(int(np.prod(v.aval.shape, dtype=np.int64)), -1, dtype=np.int64)
                        for k, v in enumerate(eqn.invars)
                    ]
                )
                ids = self.maps[i][n]
                places = np.where(ids >= 0, joined[np.maximum(ids, 0)], -1)
            if (places >= 0).any():
                self.comes[out], self.origins[out] = places, origins

    def result(self) -> Alignment:
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


def feeds_many(contact: Contact, alignment: Alignment) -> bool:
    """Return whether a value of a contact's output feeds several positions of a state: then none of
    its pieces has a trace.
    """
    feeds = [
        places_by_group(alignment.feeds.get(p.var, {}), alignment.joined) for p in contact.parts
    ]
    return any(
        len(arrays) > 1 or arrays[0] is MANY for by_group in feeds for arrays in by_group.values()
    )


def merge_feeds(known: Feeds, new: Feeds) -> Feeds:
    """Return what two readers of a value feed together."""
    merged = {target: list(arrays) for target, arrays in known.items()}
    for target, arrays in new.items():
        for array in arrays:
            merge_places(merged.setdefault(target, []), array)
    return merged


def places_by_group(feeds: Feeds, group_of: Sequence[int]) -> Feeds:
    """Return the same by hidden group: the states of a group share their places."""
    merged: Feeds = {}
    for target, arrays in sorted(feeds.items()):
        merged = merge_feeds(merged, {group_of[target]: arrays})
    return merged


def merge_places(arrays: list[Any], new: Any) -> None:
    """Add places to a list, joined with an entry they do not contradict."""
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


def states_that_matter(minfo: ModuleInfo) -> set[Var]:
    """Return variables, before the step, of the states whose value can change a later loss through
    derivatives.
    """
    jaxpr = minfo.jaxpr
    pairs = [
        (i, o)
        for ins, outs in zip(minfo.state_tree_invars, minfo.state_tree_outvars, strict=True)
        for i, o in zip(ins, outs, strict=True)
        if i not in minfo.invar_to_weight_path
    ]
    wanted = set(variables(jaxpr.outvars[: minfo.num_var_out]))
    matter: set[Var] = set()
    while True:
        reach = {v for v in wanted if is_float(v)}
        for eqn in reversed(jaxpr.eqns):
            if passes_derivative(eqn) and any(v in reach for v in eqn.outvars):
                reach.update(v for v in variables(eqn.invars) if is_float(v))
        found = {i for i, _ in pairs if i in reach}
        if found == matter:
            return matter
        matter = found
        wanted |= {o for i, o in pairs if i in matter and not isinstance(o, Literal)}
