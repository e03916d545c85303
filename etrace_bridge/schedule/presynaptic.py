"""Filtered features over K steps: what a presynaptic memory is, and half of a factored one.

For K steps with cotangents `c_t` at a contact's output the filter of `x` can act on them instead:

    c̃_(s-1) = c_s + leak c̃_s                                         (c̃_K = 0)
    sum of c_t ⊗ x̄_(t-1)  =  sum of c̃_s ⊗ x_s  +  c̃_0 ⊗ x̄_0

With `c_t = leak δ_t`, `δ_t` the direct cotangent, the sum of `δ_t ⊗ x̄_t` is that of
`(δ_t + c̃_t) ⊗ x_t` and of `c̃_0 ⊗ x̄_0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.compiler.weight_views import Contact
from etrace_bridge.rules.memory import Presynaptic, contacts_with_data, filtered_taps
from etrace_bridge.rules.trace_rule import TraceSystem
from etrace_bridge.schedule.contraction import features
from etrace_bridge.step.program import StepProgram


def spread_back(credit: Sequence[Any], leak: float, length: int) -> tuple[list[Any], list[Any]]:
    """Return `c̃_s` of every step, and `c̃_0`, for each array of cotangents (K, …).

    The sum of `leak^(t-s-1) c_t` over t > s, as a product over time.
    """
    ages = np.arange(length) - np.arange(length + 1)[:, None]
    left = np.where(ages >= 0, leak ** np.maximum(ages, 0.0), 0)
    found = [jnp.tensordot(jnp.asarray(left, c.dtype), c, 1) for c in credit]
    return [c[1:] for c in found], [c[0] for c in found]


def filter_features(
    contacts: Sequence[Contact],
    before: dict[int, jax.Array],
    xs: dict[int, jax.Array],
    leak: float,
    length: int,
) -> dict[int, jax.Array]:
    """Return `x̄` after K steps, by contact."""
    left, new = leak ** np.arange(length - 1, -1, -1.0), {}
    for contact in contacts:
        old = before[contact.index]
        phi = features(contact.traced_form, xs[contact.index]).astype(old.dtype)
        new[contact.index] = leak**length * old + jnp.tensordot(
            jnp.asarray(left, old.dtype), phi, 1
        )
    return new


class PresynapticFilters:
    """The filters of one block of steps."""

    def __init__(
        self, program: StepProgram, memory: Presynaptic, trace: dict[str, Any], length: int
    ) -> None:
        self.program, self.leak, self.trace, self.length = program, memory.leak, trace, length

    def cotangents(self, system: TraceSystem) -> tuple[list[Any], list[Any]]:
        """Return cotangents (K, …) at the taps, and (1, …) those of what came before the block."""
        at_taps = list(system.direct.at_taps)
        past: list[Any] = list(self.program.zero_taps((1,)).values())
        if self.leak:
            taps = filtered_taps(self.program)
            credit = [self.leak * at_taps[n] for n in taps]
            for n, later, first in zip(
                taps, *spread_back(credit, self.leak, self.length), strict=True
            ):
                at_taps[n] = at_taps[n] + later
                past[n] = (first * self.trace["ones"].get(n, 1))[None]
        return at_taps, past

    def after(self, xs: dict[int, jax.Array]) -> dict[str, Any]:
        """Return the memory after the block."""
        contacts = [c for c in contacts_with_data(self.program) if c.index in self.trace["x"]]
        x = filter_features(contacts, self.trace["x"], xs, self.leak, self.length)
        left = self.leak**self.length
        grown = sum(self.leak**age for age in range(self.length))
        return {"x": x, "ones": {n: left * old + grown for n, old in self.trace["ones"].items()}}
