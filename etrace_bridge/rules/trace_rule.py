"""Trace rules: rules that are one linear recursion, run by the scheduler.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    g_t   = direct_t + b_t · eps_(t-1)

A rule says what `D_t`, `df_t`, `b_t` and `direct_t` are for K steps at once (`system`), and what is
remembered of `eps` (`memory`). The scheduler decides how the recursion runs: step by step or over K
steps, whole or in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._errors import InputError
from etrace_bridge.rules.base import Rule
from etrace_bridge.rules.memory import Dense, Factored, Presynaptic
from etrace_bridge.step.linearise import Blocks, ContactRows, Grouped, LossGradient
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps


@dataclass(frozen=True)
class TraceSystem:
    """The terms of the recursion for K steps.

    A hidden group has several *rows*: its states, and whatever else a rule follows beside them.
    Arrays have the K steps on their first axis, then the group's positions.

    Attributes:
        D: `D_t`, by group, row and row; None for entries that are always zero.
        df: `df_t`, how each row depends on the contacts' outputs.
        b: `b_t`, by group and row.
        direct: losses, outputs, and `direct_t`: the gradient with old states fixed, of weights
            outside traced contacts and as cotangents at those contacts.
    """

    D: Blocks
    df: ContactRows
    b: Grouped
    direct: LossGradient

    @classmethod
    def without_rows(cls, direct: LossGradient) -> TraceSystem:
        """For a memory that is not a trace of the states: the direct term alone."""
        return cls([], ContactRows([], [], ()), [], direct)


class TraceRule(Rule):
    """Base of trace rules: `system`, and optionally `memory` and `rows`.

    Attributes:
        reverse_inside: inside a chunk the gradient is that of exact reverse mode; `b_t` is not
            used, and the trace carries only what came before the chunk.
        follows_upstream: weights without a trace that reach a state through another weight get
            credit within the chunk, `<a_t, h_t>` differentiated through the whole step; otherwise
            they get the direct term only.
        trace_dtype: dtype in which `eps` is stored, where a rule has that option; None keeps the
            states' dtype.
    """

    trace_dtype: str | None = None

    @property
    def memory(self) -> Dense | Factored | Presynaptic:
        """What is remembered of `eps`."""
        return Dense(self.trace_dtype)

    @property
    def reverse_inside(self) -> bool:
        return False

    @property
    def follows_upstream(self) -> bool:
        return False

    @property
    def schedule(self) -> str:
        return self.memory.schedule

    @property
    def keeps_activations(self) -> bool:
        return self.reverse_inside

    def system(self, steps: Steps) -> TraceSystem:
        """Return the recursion's terms for these steps."""
        raise InputError(
            f"The rule `{type(self).__name__}` does not define `system(steps)`, "
            "the terms of its recursion. Define it."
        )

    def rows(self, program: StepProgram) -> Sequence[int]:
        """Return how many rows each group has."""
        return [group.num_state for group in program.groups]

    def init(self, program: StepProgram) -> Any:
        return self.memory.init(program, self.rows(program))

    def reset(self, program: StepProgram, memory: Any, keep: jax.Array) -> Any:
        return self.memory.reset(program, memory, keep)


def times_blocks(s: Grouped, D: Blocks) -> Grouped:
    """Return `s D` for each group: `sum over i of s[i] D[i][j]`."""

    def column(s_g: list[Any], D_g: list[list[Any]], j: int) -> Any:
        terms = [s_i * row[j] for s_i, row in zip(s_g, D_g, strict=True) if row[j] is not None]
        return sum(terms, jnp.zeros_like(s_g[j])).astype(s_g[j].dtype)

    return [[column(s_g, D_g, j) for j in range(len(s_g))] for s_g, D_g in zip(s, D, strict=True)]
