"""What a rule promises for a parameter, before anything is run: from the rule and the compiler's certificate."""

from __future__ import annotations

from dataclasses import dataclass

from etrace_bridge.compiler.certificate import ParameterCertificate
from etrace_bridge.rules import BPTT, DRTRL, RTRL, EProp, Rule, SnAp1

EXACT, APPROXIMATE, TRUNCATED, NONE = "exact", "approximate", "truncated", "none"

# Verdicts, once it was run: what was promised, or one of the three that are not ok.
AS_EXPECTED = {
    EXACT: "exact",
    APPROXIMATE: "approximate (as certified)",
    TRUNCATED: "truncated (as certified)",
    NONE: "no gradient (as certified)",
}
MISMATCH, ZERO, START = "MISMATCH", "nothing to compare", "NO GRADIENT"


@dataclass(frozen=True)
class Expectation:
    """What to expect of one parameter's gradient.

    Attributes:
        kind: `"exact"`, `"approximate"`, `"truncated"` or `"none"` (no gradient).
        reason: why, for people.
    """

    kind: str
    reason: str


START_ONLY = Expectation(
    NONE, "used only to make the initial state, which the bridge holds constant: torch BPTT trains it, no rule here does"
)


def expect(rule: Rule, certificate: ParameterCertificate | None, length: int, chunk: int) -> Expectation:
    """What a rule promises for one parameter.

    Args:
        rule: the rule.
        certificate: the compiler's certificate; None for a parameter that the step does not use.
        length: steps in the sequence.
        chunk: steps in a chunk.
    """
    if certificate is None:
        return Expectation(NONE, "the step does not use it")
    if certificate.kind == "unused":
        return Expectation(NONE, certificate.reason)
    if certificate.kind == "direct" and not _has_other_signal(rule):
        return Expectation(EXACT, certificate.reason)
    if isinstance(rule, BPTT):
        if chunk >= length:
            return Expectation(EXACT, "one chunk covers the sequence")
        return Expectation(TRUNCATED, f"credit stops where a chunk of {chunk} steps begins")
    if isinstance(rule, RTRL):
        return _expect_rtrl(certificate, length, chunk)
    if type(rule) in (DRTRL, SnAp1) or (isinstance(rule, EProp) and not rule.kappa and not _has_other_signal(rule)):
        return _expect_d_rtrl(rule, certificate, length, chunk)
    if isinstance(rule, EProp):
        return Expectation(APPROXIMATE, f"e-prop with kappa={rule.kappa:g} and {rule.feedback} feedback; {certificate.reason}")
    name = rule.name or type(rule).__name__
    return Expectation(APPROXIMATE, f"`{name}` makes no promise; {certificate.reason}")


def _expect_rtrl(certificate: ParameterCertificate, length: int, chunk: int) -> Expectation:
    carried = [drop for drop in certificate.drops if drop.cut.primitive == "state"]
    if carried and chunk < length:
        return Expectation(APPROXIMATE, f"drops {carried[0]} between chunks")
    return Expectation(EXACT, "the whole influence on every hidden state is carried")


def _expect_d_rtrl(rule: DRTRL, certificate: ParameterCertificate, length: int, chunk: int) -> Expectation:
    if length == 1:
        return Expectation(EXACT, "one step has no past")
    if rule.credit == "chunk" and chunk >= length:
        return Expectation(EXACT, "exact credit inside the one chunk")
    if rule.trace_dtype is not None and certificate.kind == "traced":
        return Expectation(APPROXIMATE, f"the trace is stored as {rule.trace_dtype}")
    return Expectation(EXACT if certificate.exact else APPROXIMATE, certificate.reason)


def _has_other_signal(rule: Rule) -> bool:
    """Whether a rule replaces the loss's own derivative, so that nothing is promised."""
    return isinstance(rule, EProp) and rule.feedback != "symmetric"
