"""Backpropagation through time, truncated at chunk boundaries: the reference on XLA.

    g = d(sum of l_t over the chunk)/dtheta, with the states before the chunk fixed.

Memory: K steps of activations. Time: forward and backward of each step. Exact when one chunk covers the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from etrace_bridge.engine.chunk_bptt import chunk_gradient, scan_steps
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, register_rule


@register_rule
@dataclass(frozen=True)
class BPTT(Rule):
    """Truncated BPTT; the truncation is the learner's `chunk`, and `"auto"` means the whole sequence."""

    name: ClassVar[str] = "bptt"

    def init(self, program: StepProgram) -> Any:
        return ()

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        if data.loss is None:
            outputs, hidden, other = scan_steps(program, theta, carry.hidden, carry.other, data.args)
            return ChunkResult(None, None, outputs, Carry(hidden, other, ()))
        found = chunk_gradient(program, theta, carry, data)
        return ChunkResult(found.grads, found.losses, found.outputs, Carry(found.hidden, found.other, ()))

    def reset(self, program: StepProgram, trace: Any, keep: Any) -> Any:
        return trace
