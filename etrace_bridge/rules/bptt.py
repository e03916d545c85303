"""Backpropagation through time, truncated at chunk boundaries: the reference.

    g = d(sum of l_t over the chunk)/dtheta, with the states before the chunk fixed.

Memory: K steps of activations. Time: forward and backward of each step. Exact when one chunk covers
the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from etrace_bridge.rules.base import EXACT, TRUNCATED, Promise, ReverseRule, register_rule


@register_rule
@dataclass(frozen=True)
class BPTT(ReverseRule):
    """Truncated BPTT.

    The learner's `chunk` is the truncation; `"auto"` means the whole sequence.
    """

    name: ClassVar[str] = "bptt"
    follows_states: ClassVar[bool] = True
    truncates: ClassVar[bool] = True

    def init(self, program) -> Any:
        return ()

    def advance(self, program, theta, carry, data, memory) -> Any:
        return ()

    def reset(self, program, memory, keep) -> Any:
        return memory

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if chunk >= length:
            return Promise(EXACT, "one chunk covers the sequence")
        return Promise(TRUNCATED, f"credit stops where a chunk of {chunk} steps begins")
