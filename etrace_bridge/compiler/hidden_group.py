"""Hidden groups: hidden states joined, position by position, by the recurrence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge._jax_compat import Jaxpr, Var, make_jaxpr_closed, sub_jaxpr
from etrace_bridge.compiler.aligner import Alignment
from etrace_bridge.compiler.core_equations import Core, build_core, join_leaf, split_leaf
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.hidden_leaves import HiddenLeaf
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.positions import align, find_alignment
from etrace_bridge.compiler.weight_views import WeightUse


@dataclass(frozen=True)
class HiddenGroup:
    """Hidden states joined, position by position, by the recurrence.

    `h_1^t, h_2^t, … = f(h_1^{t-1}, h_2^{t-1}, …, x^t)`

    Attributes:
        index: its index among the groups.
        hidden_paths: the paths of its states, in the order the jaxpr takes them.
        hidden_states: the States.
        hidden_invars: their variables before the step.
        hidden_outvars: their variables after the step.
        transition_jaxpr: old states -> new states; its constants are the rest of the step.
        transition_jaxpr_constvars: the step's variables that those constants are.
        leaves: how each state divides into virtual states.
        core: the same transition as equations of the step.
    """

    index: int
    hidden_paths: tuple[Path, ...]
    hidden_states: tuple[brainstate.State, ...]
    hidden_invars: tuple[Var, ...]
    hidden_outvars: tuple[Any, ...]
    transition_jaxpr: Jaxpr
    transition_jaxpr_constvars: tuple[Var, ...]
    leaves: tuple[HiddenLeaf, ...]
    core: Core

    def __repr__(self) -> str:
        paths = ", ".join(map(show_path, self.hidden_paths))
        return f"HiddenGroup({self.index}: {paths} {self.varshape})"

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of one state."""
        return self.leaves[0].varshape

    @property
    def num_state(self) -> int:
        """Number of states in the group; a packed state counts as several."""
        return sum(leaf.count for leaf in self.leaves)

    @property
    def name(self) -> str:
        """The names of the group's states."""
        return ", ".join(show_path(p) for p in self.hidden_paths)

    def check_consistent_varshape(self) -> None:
        """Raise if states of different shape are in one group."""
        shapes = {tuple(n for n in leaf.varshape if n != 1) for leaf in self.leaves}
        if len(shapes) > 1:
            found = ", ".join(f"`{show_path(leaf.path)}` {leaf.varshape}" for leaf in self.leaves)
            raise NotSupportedError(
                f"Hidden group {self.index} joins states of different shapes: {found}. "
                "Position-by-position traces need one shape; give these states the same shape, or "
                "use `rule='rtrl'`, which needs no groups."
            )

    def transition(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> list[Any]:
        """Return new hidden values from old ones.

        Args:
            hidden_vals: one value per hidden state.
            input_vals: one value per variable in `transition_jaxpr_constvars`.
        """
        self._check(hidden_vals, input_vals)
        env = dict(zip(self.transition_jaxpr_constvars, input_vals, strict=True))
        env.update(zip(self.hidden_invars, hidden_vals, strict=True))
        env = self.core.run(env)
        return [read(env, v) for v in self.hidden_outvars]

    def diagonal_jacobian(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> Any:
        """Return the group's Jacobian, `(*varshape, num_state, num_state)`.

        Entry `[…, i, j]` is `∂h_i^t/∂h_j^{t-1}` at the same position.
        """
        self._check(hidden_vals, input_vals)
        new, pull = jax.vjp(
            lambda *h: self.concat_hidden(self.transition(h, input_vals)), *hidden_vals
        )
        rows = []
        for i in range(self.num_state):
            one = jnp.zeros_like(new).at[..., i].set(1)
            rows.append(self.concat_hidden(pull(one)))
        return jnp.stack(rows, axis=-2)

    def concat_hidden(self, values: Sequence[Any]) -> Any:
        """Join the group's states into one array, along its last axis."""
        if len(values) != len(self.leaves):
            raise InputError(
                f"Hidden group {self.index} has {len(self.leaves)} states, but {len(values)} "
                "values were given."
            )
        parts = [
            p
            for leaf, v in zip(self.leaves, values, strict=True)
            for p in split_leaf(leaf, v, self.varshape)
        ]
        return jnp.stack(parts, axis=-1)

    def split_hidden(self, array: Any) -> list[Any]:
        """Return one value per hidden state, from an array with the states along the last axis."""
        if array.shape[-1] != self.num_state:
            raise InputError(
                f"Hidden group {self.index} has {self.num_state} states; the last axis of the "
                f"array is {array.shape[-1]}."
            )
        values, at = [], 0
        for leaf in self.leaves:
            parts = [array[..., at + n] for n in range(leaf.count)]
            values.append(join_leaf(leaf, parts, self.varshape))
            at += leaf.count
        return values

    def dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def _check(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> None:
        if len(hidden_vals) != len(self.hidden_invars) or len(input_vals) != len(
            self.transition_jaxpr_constvars
        ):
            raise InputError(
                f"Hidden group {self.index} takes {len(self.hidden_invars)} hidden values and "
                f"{len(self.transition_jaxpr_constvars)} input values; "
                f"{len(hidden_vals)} and {len(input_vals)} were given."
            )


def build_groups(
    minfo: ModuleInfo, use: WeightUse, alignment: Alignment
) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """Join states if the old value of one reaches the new value of another through the core."""
    leaves, targets = alignment.leaves, alignment.targets
    others = frozenset(leaf.index for leaf in leaves) - targets
    aside = align(minfo, use, leaves, others) if others else alignment
    members: dict[int, list[HiddenLeaf]] = {}
    for leaf, root in zip(leaves, alignment.joined, strict=True):
        members.setdefault(root, []).append(leaf)
    groups = [
        _make_group(minfo, alignment if part[0].index in targets else aside, n, tuple(part))
        for n, part in enumerate(members.values())
    ]
    return groups, {path: g for g in groups for path in g.hidden_paths}


def _make_group(
    minfo: ModuleInfo, alignment: Alignment, index: int, leaves: tuple[HiddenLeaf, ...]
) -> HiddenGroup:
    invars = tuple(leaf.invar for leaf in leaves)
    outvars = tuple(leaf.outvar for leaf in leaves)
    core = build_core(minfo.jaxpr.eqns, alignment, outvars)
    constvars = tuple(v for v in core.reads if v not in invars)

    def flat(*values: Any) -> list[Any]:
        env = core.run(dict(zip((*constvars, *invars), values, strict=True)))
        return [read(env, v) for v in outvars]

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (*constvars, *invars)]
    traced = make_jaxpr_closed(flat, *avals).jaxpr
    inputs, own = traced.invars[: len(constvars)], traced.invars[len(constvars) :]
    jaxpr = sub_jaxpr(traced, traced.eqns, own, traced.outvars, [*traced.constvars, *inputs])
    return HiddenGroup(
        index=index,
        hidden_paths=tuple(leaf.path for leaf in leaves),
        hidden_states=tuple(minfo.retrieved_model_states[leaf.path] for leaf in leaves),
        hidden_invars=invars,
        hidden_outvars=outvars,
        transition_jaxpr=jaxpr,
        transition_jaxpr_constvars=constvars,
        leaves=leaves,
        core=core,
    )


def find_hidden_groups_from_minfo(
    minfo: ModuleInfo,
) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """Return the hidden groups of a traced step, and the group of each hidden state."""
    use, alignment, _ = find_alignment(minfo)
    return build_groups(minfo, use, alignment)


def find_hidden_groups_from_module(
    model: brainstate.nn.Module, *args: Any, **kwargs: Any
) -> tuple[list[HiddenGroup], dict[Path, HiddenGroup]]:
    """Return the hidden groups of a model, and the group of each hidden state."""
    return find_hidden_groups_from_minfo(extract_module_info(model, *args, **kwargs))
