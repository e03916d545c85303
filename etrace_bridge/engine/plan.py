"""How many steps a chunk has: as many as fit into a budget of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.engine.program import StepProgram

FLOOR_BYTES = 16 * 2**20  # buffers of this size cost nothing worth saving
MAX_CHUNK = 512
# Buffers in units of the trace. A sequence in one chunk needs no trace, so its buffers may be larger; with traces, the
# whole stays within three times their size.
ONE_CHUNK, SEVERAL_CHUNKS = 2.0, 1.6


@dataclass(frozen=True)
class ChunkPlan:
    """The division of a sequence of T steps.

    Attributes:
        steps: steps in a full chunk.
        full: number of full chunks.
        rest: steps in the last, shorter chunk; 0 if there is none.
    """

    steps: int
    full: int
    rest: int


def bytes_per_step(program: StepProgram) -> int:
    """An estimate of what one more step in a chunk costs in buffers.

    A contact's piece is kept as value and as cotangent for every state of its group; a state with `b`, `a`, and its
    rows of `D` and `M`. For a GRU the estimate is within 10% of XLA's own count.
    """
    hidden = sum(_bytes(leaf.invar) for leaf in program.leaves)
    pieces = sum(_bytes(t.part.var) for t in program.taps if t.contact.x is not None)
    inputs = sum({id(c.x): _bytes(c.x) for c in program.traced_contacts if c.x is not None}.values())
    widest = max((g.num_state for g in program.groups), default=1)
    return inputs + 2 * pieces * widest + hidden * (4 + 2 * widest)


def trace_bytes(trace: Any) -> int:
    """The size of a rule's memory."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trace))


def choose_chunk(program: StepProgram, trace: Any, length: int, chunk: int | str, budget: int | None) -> int:
    """Steps in a chunk, for `chunk="auto"` or a number.

    Args:
        program: the step.
        trace: the rule's memory (arrays or shapes), whose size is the default budget.
        length: steps in the sequence.
        chunk: `"auto"` or a number of steps.
        budget: bytes that the chunk's buffers may take.
    """
    if chunk != "auto":
        if not isinstance(chunk, (int, np.integer)) or chunk < 1:
            raise InputError(f"`chunk` is {chunk!r}; it must be 'auto' or a positive number of steps.")
        return min(int(chunk), length)
    each = max(bytes_per_step(program), 1)
    if budget is not None and budget < each:
        raise InputError(
            f"The budget of {budget} bytes is less than one step's buffers, about {each} bytes. Raise `budget`, or use a smaller batch."
        )
    size = trace_bytes(trace)
    alone = budget if budget is not None else max(ONE_CHUNK * size, FLOOR_BYTES)
    if length * each <= alone and length <= MAX_CHUNK:
        return length
    allowed = budget if budget is not None else max(SEVERAL_CHUNKS * size, FLOOR_BYTES)
    most = max(1, min(int(allowed // each), MAX_CHUNK, length))
    even = [k for k in range(int(most), max(1, int(0.7 * most)) - 1, -1) if length % k == 0]
    return even[0] if even else math.ceil(length / math.ceil(length / most))


def divide(length: int, steps: int) -> ChunkPlan:
    """Full chunks and the rest."""
    return ChunkPlan(steps, length // steps, length % steps)


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
