"""Verdicts on a parameter's gradient, by what the rule promised."""

from __future__ import annotations

from etrace_bridge.rules.base import APPROXIMATE, EXACT, NONE, TRUNCATED, Promise

# The verdict on a gradient that is as promised; the three below are not ok.
AS_EXPECTED = {
    EXACT: "exact",
    APPROXIMATE: "approximate (as certified)",
    TRUNCATED: "truncated (as certified)",
    NONE: "no gradient (as certified)",
}
MISMATCH, ZERO, START = "MISMATCH", "nothing to compare", "NO GRADIENT"

START_ONLY = Promise(
    NONE,
    "used only to make the initial state, which the bridge holds constant: torch BPTT trains it, "
    "no rule here does",
)
NOT_USED = Promise(NONE, "the step does not use it")
