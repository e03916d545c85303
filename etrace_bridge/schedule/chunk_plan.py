"""How many steps a chunk has within a budget of memory, and how many blocks it is divided into.

A chunk's buffers are of two kinds: *working* buffers of the parallel passes, which only one block
of steps needs at a time, and what is *saved* for all K steps: states, products, and what the trace
is made of (see `schedule.blocks`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.weight_views import Contact
from etrace_bridge.rules.base import Rule
from etrace_bridge.step.program import StepProgram

MAX_CHUNK = 512
# Buffers in units of the trace. A sequence in one chunk has no trace, so its buffers may take that
# room too; either way the whole stays within three times the trace.
ONE_CHUNK, SEVERAL_CHUNKS = 2.6, 1.4
# A block is not smaller than the weights, since each block reads all of them, nor than a few steps.
BLOCK_WEIGHTS, BLOCK_STEPS = 2, 4


@dataclass(frozen=True)
class ChunkPlan:
    """The division of a sequence of T steps.

    Attributes:
        steps: steps in a full chunk.
        full: number of full chunks.
        rest: steps in the last, shorter chunk; 0 without one.
    """

    steps: int
    full: int
    rest: int


def working_bytes(program: StepProgram) -> int:
    """Estimate the buffers of one step in the parallel passes."""
    hidden = sum(_bytes(leaf.invar) for leaf in program.leaves)
    pieces = sum(_bytes(t.part.var) for t in program.taps if t.contact.x is not None)
    patches = program.tuning.is_patch_product
    inputs = sum(
        {
            id(c.x): _feature_bytes(c) if patches(c.eqn) else _bytes(c.x)
            for c in _with_data(program)
        }.values()
    )
    return inputs + 2 * pieces * _widest(program) + hidden * (4 + 2 * _widest(program))


def kept_bytes(program: StepProgram, with_trace: bool) -> int:
    """Return the bytes that a chunk keeps of each step.

    They are states and products, and for the trace its two factors.
    """
    kept = sum(_bytes(leaf.invar) for leaf in program.leaves) + sum(map(_bytes, program.saved_vars))
    if with_trace:
        distinct = {n for n in program.first_taps if n is not None}
        kept += _widest(program) * sum(_bytes(program.taps[n].part.var) for n in distinct)
        kept += sum({id(c.x): _feature_bytes(c) for c in _with_data(program)}.values())
    return kept


def _with_data(program: StepProgram) -> list[Contact]:
    return [c for c in program.traced_contacts if c.x is not None]


def _feature_bytes(contact: Contact) -> int:
    form: Any = contact.form
    return math.prod(form.shape(form.feature)) * contact.y.aval.dtype.itemsize


def _widest(program: StepProgram) -> int:
    return max((g.num_state for g in program.groups), default=1)


def _block_bytes(program: StepProgram) -> int:
    return max(program.tuning.block_bytes, BLOCK_WEIGHTS * sum(map(_bytes, program.weight_vars)))


def _least_steps(program: StepProgram) -> int:
    """Steps that a block has at least."""
    forms: list[Any] = [c.form for c in _with_data(program)]
    wanted = program.tuning.block_rows
    rows = min(
        (math.prod(f.sizes[letter] for letter in f.out if letter not in f.view) for f in forms),
        default=wanted,
    )
    return max(BLOCK_STEPS, math.ceil(wanted / rows))


def block_steps(program: StepProgram, length: int) -> int:
    """Steps in a block of a chunk of `length` steps.

    A divisor of it if one is near, so that no shorter block is left.
    """
    each = working_bytes(program)
    near = max(_block_bytes(program) // each, _least_steps(program))
    if length * each <= program.tuning.whole_bytes or length <= 2 * near:
        return length
    even = [n for n in range(max(near // 2, BLOCK_STEPS), 2 * near + 1) if length % n == 0]
    return min(even, key=lambda n: abs(math.log(n / near)), default=near)


def chunk_bytes(program: StepProgram, length: int, with_trace: bool, rule: Rule) -> int:
    """Estimate the buffers of a chunk without its trace."""
    if rule.schedule == "forward":
        return block_steps(program, length) * working_bytes(program)
    at_once = length * working_bytes(program)
    if rule.keeps_activations or at_once <= program.tuning.whole_bytes:
        return at_once
    block = max(_block_bytes(program), _least_steps(program) * working_bytes(program))
    return min(at_once, block + length * kept_bytes(program, with_trace))


def trace_bytes(trace: Any) -> int:
    """Return the size of a rule's memory."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trace))


def choose_chunk(
    program: StepProgram, rule: Rule, length: int, chunk: int | str, budget: int | None
) -> int:
    """Steps in a chunk, for `chunk="auto"` or a number.

    Args:
        program: the step.
        rule: the rule; the size of its memory is the default budget.
        length: steps in the sequence.
        chunk: `"auto"` or a number of steps.
        budget: bytes that the chunk's buffers may take.
    """
    if chunk != "auto":
        if not isinstance(chunk, (int, np.integer)) or chunk < 1:
            raise InputError(
                f"`chunk` is {chunk!r}; it must be 'auto' or a positive number of steps."
            )
        return min(int(chunk), length)
    if rule.truncates:
        return length
    if budget is not None and budget < (one := chunk_bytes(program, 1, True, rule)):
        raise InputError(
            f"The budget of {budget} bytes is less than one step's buffers, about {one} bytes. "
            "Raise `budget`, or use a smaller batch."
        )
    size = trace_bytes(jax.eval_shape(lambda: rule.init(program)))

    def fits(k: int, with_trace: bool, times: float) -> bool:
        needed = chunk_bytes(program, k, with_trace, rule)
        if budget is not None:
            return needed <= budget
        if rule.schedule == "forward":
            return True
        return needed <= times * size or k * working_bytes(program) <= program.tuning.whole_bytes

    if length <= MAX_CHUNK and fits(length, False, ONE_CHUNK):
        return length
    most = next(
        (k for k in range(min(MAX_CHUNK, length), 1, -1) if fits(k, True, SEVERAL_CHUNKS)), 1
    )
    near = range(most, max(1, most // 2) - 1, -1)
    # Prefer sizes that leave few steps over at the end of the sequence, then of the chunk, and the
    # largest of these: steps that are left over need one more program.
    return min(near, key=lambda k: (length % k, k % block_steps(program, k)))


def divide(length: int, steps: int) -> ChunkPlan:
    """Divide a sequence into full chunks and the rest."""
    return ChunkPlan(steps, length // steps, length % steps)


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
