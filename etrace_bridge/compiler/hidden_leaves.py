"""The hidden states of a step, and how packed ones are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import brainstate
import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Var
from etrace_bridge.compiler.diagnostics import Path
from etrace_bridge.compiler.module_info import ModuleInfo


@dataclass(frozen=True)
class HiddenLeaf:
    """One hidden state of the step and how it is divided into virtual states.

    Attributes:
        index: its index among the hidden states.
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
    def num_positions(self) -> int:
        """Number of positions of one virtual state."""
        return int(np.prod(self.invar.aval.shape, dtype=np.int64)) // self.count

    def positions(self) -> np.ndarray:
        """Return the position of each element."""
        shape = self.invar.aval.shape
        if self.axis is None:
            return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
        block = list(shape)
        block[self.axis] //= self.count
        one = np.arange(int(np.prod(block, dtype=np.int64))).reshape(block)
        return np.concatenate([one] * self.count, axis=self.axis)


def find_hidden_leaves(minfo: ModuleInfo) -> tuple[HiddenLeaf, ...]:
    """Return the step's hidden states, with packed ones divided."""
    leaves = []
    for i, (path, invar) in enumerate(minfo.hidden_path_to_invar.items()):
        outvar = minfo.hidden_path_to_outvar[path]
        axis, count = _packing(minfo, minfo.retrieved_model_states[path], invar, outvar)
        leaves.append(HiddenLeaf(i, path, invar, outvar, axis, count))
    return tuple(leaves)


def _packing(
    minfo: ModuleInfo, state: brainstate.State, invar: Var, outvar: Any
) -> tuple[int | None, int]:
    """Return the axis and the number of states that a state holds.

    A state that is read in equal slices and written by a concatenation of such slices holds
    several.
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
    """Return the bounds at which an equation slices its operand along an axis."""
    if eqn.primitive.name == "split" and eqn.params["axis"] == axis:
        return [int(b) for b in np.cumsum(eqn.params["sizes"])]
    if eqn.primitive.name == "slice":
        low, high = eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]
        return [low, high] if high - low < eqn.invars[0].aval.shape[axis] else []
    return []
