"""The ranges that torch demands of indices: noted while a program is traced, checked on the host
before it runs.

A compiled program cannot raise, and JAX clamps or drops an index out of range. So the rules of
index operations call `require_range`. A value that is known now is checked at once. For a traced
value, `trace_with_ranges` finds out whether it is one of the program's inputs, whole or in part,
only cast or rearranged; the range is then a fact about that input (`InputRange`).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Var,
    bind_equation,
    is_concrete,
    same_trace,
    sub_jaxpr,
)

_FEW = 64  # elements that Python compares sooner than NumPy is called
_REARRANGING = {
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "broadcast_in_dim",
    "slice",
    "split",
    "rev",
    "copy",
}


@dataclass(frozen=True)
class IndexRange:
    """What one operation demands of its indices.

    Attributes:
        op: torch's name of the operation.
        low: least index.
        high: first index that is too large.
        ignore: a value outside the range that is allowed too.
    """

    op: str
    low: int
    high: int
    ignore: int | None = None

    def check(self, values: np.ndarray, name: str) -> None:
        """Raise if an index is out of range; `name` begins a sentence."""
        if not values.size:
            return
        if values.dtype.kind not in "iub":
            values = np.trunc(values)  # as a cast to integers does
        few = values.reshape(-1).tolist() if values.size <= _FEW else [values.min(), values.max()]
        # false for NaN, which `min` and `max` may pass over
        if all(self.low <= value < self.high for value in few):
            return
        wrong = ~((values >= self.low) & (values < self.high))
        if self.ignore is not None:
            wrong &= values != self.ignore
        if wrong.any():
            also = "" if self.ignore is None else f", or {self.ignore} to leave it out"
            raise InputError(
                f"{name} has the value {values[wrong].flat[0]}, which is out of range: `{self.op}` "
                f"takes indices from {self.low} to {self.high - 1}{also}."
            )


@dataclass(frozen=True)
class InputRange:
    """What a program demands of one of its inputs.

    Attributes:
        position: which input.
        elements: the flat positions of the elements that are indices; None for all.
        size: number of elements of the input.
        range: the range.
    """

    position: int
    elements: np.ndarray | None
    size: int
    range: IndexRange

    def check(self, array: Any, name: str, parts: int = 1) -> None:
        """Raise if the input, or a sequence of such inputs with time on the first axis, has an
        index out of range; `parts` is as in `check_ranges`.
        """
        values = np.asarray(array)
        if self.elements is not None:
            size = self.size // parts
            elements = self.elements if parts == 1 else np.unique(self.elements % size)
            values = values.reshape(-1, size)[:, elements]
        self.range.check(values, name)


def check_ranges(
    ranges: Sequence[InputRange], arrays: Sequence[Any], what: str, parts: int = 1
) -> None:
    """Check arrays against the ranges of a program's inputs.

    Args:
        ranges: what the program demands.
        arrays: its inputs, or sequences of them.
        what: `"input"` or `"target"`.
        parts: the arrays have one of so many equal parts of the program's batch.
    """
    for each in ranges:
        name = input_name(what, each.position, len(arrays))
        each.check(arrays[each.position], name, parts)


def input_name(what: str, position: int, count: int) -> str:
    """Return the name of one of several inputs or targets, to begin a sentence with."""
    return f"{what.capitalize()} {position}" if count > 1 else f"The {what}"


_NOTES: contextvars.ContextVar[list[tuple[Any, IndexRange]] | None] = contextvars.ContextVar(
    "index_ranges", default=None
)


def require_range(index: Any, op: str, low: int, high: int, ignore: int | None = None) -> None:
    """Demand that an operation's indices are in `[low, high)` or equal to `ignore`.

    Known values are checked at once; for others the demand is noted.
    """
    found, notes = IndexRange(op, low, high, ignore), _NOTES.get()
    if is_concrete(index):
        found.check(np.asarray(index), "An index")
    elif notes is not None:
        notes.append((index, found))


def trace_with_ranges(
    function: Callable[..., Sequence[Any]], *shapes: Any
) -> tuple[ClosedJaxpr, list[InputRange]]:
    """Trace a function of flat arrays, and return what it demands of those that it uses as indices.

    Args:
        function: Gives a flat sequence of arrays.
        *shapes: Shapes and dtypes of its inputs.
    """
    kept: list[IndexRange] = []

    def noted(*args: Any) -> tuple:
        notes: list[tuple[Any, IndexRange]] = []
        token = _NOTES.set(notes)
        try:
            results = function(*args)
        finally:
            _NOTES.reset(token)
        # not those of a loop's body
        own = [(index, found) for index, found in notes if same_trace(index, args[0])]
        kept[:] = [found for _, found in own]
        return (*results, *(index for index, _ in own))

    closed = jax.make_jaxpr(noted)(*shapes)
    jaxpr = closed.jaxpr
    count = len(jaxpr.outvars) - len(kept)
    ranges = [
        _find_input(jaxpr, index, found)
        for index, found in zip(jaxpr.outvars[count:], kept, strict=True)
    ]
    jaxpr = sub_jaxpr(jaxpr, jaxpr.eqns, jaxpr.invars, jaxpr.outvars[:count], jaxpr.constvars)
    return ClosedJaxpr(jaxpr, closed.consts), [found for found in ranges if found is not None]


def _find_input(jaxpr: Jaxpr, index: Any, found: IndexRange) -> InputRange | None:
    """Follow an index back to an input; None if it is computed from values."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    steps: list[tuple[Any, Var]] = []
    while isinstance(index, Var) and index in makers:
        eqn = makers[index]
        if eqn.primitive.name != "convert_element_type":
            if eqn.primitive.name not in _REARRANGING or len(eqn.invars) != 1:
                return None
            steps.append((eqn, index))
        elif eqn.outvars[0].aval.dtype not in (np.int32, np.int64):  # a narrow integer wraps
            return None
        index = eqn.invars[0]
    if isinstance(index, Literal) or index not in jaxpr.invars:
        return None
    size = int(np.prod(index.aval.shape))
    elements: Any = np.arange(size).reshape(index.aval.shape)
    with jax.ensure_compile_time_eval():
        for eqn, out in reversed(steps):
            elements = bind_equation(eqn, [elements])[eqn.outvars.index(out)]
    elements = np.unique(np.asarray(elements))
    return InputRange(
        jaxpr.invars.index(index), None if len(elements) == size else elements, size, found
    )
