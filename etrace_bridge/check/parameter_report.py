"""One parameter's online gradient next to the reference's: the numbers and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etrace_bridge.check.expectation import (
    AS_EXPECTED,
    EXACT,
    MISMATCH,
    NONE,
    START,
    START_ONLY,
    ZERO,
    Promise,
)
from etrace_bridge.check.text import short


@dataclass(frozen=True)
class ParameterReport:
    """One parameter's online gradient next to torch's.

    Attributes:
        name: the torch name.
        cosine: cosine of the angle between the two gradients; NaN if one of them is zero.
        relative_error: norm of the difference over the norm of torch's gradient.
        norm_ratio: norm of the online gradient over that of torch's.
        sign_agreement: share of elements with the same sign, among those where torch's is not zero.
        max_difference: largest absolute difference.
        max_index: the index of that element.
        found: the online gradient at that index.
        expected: torch's gradient at that index.
        norm: norm of torch's gradient.
        past: share of torch's gradient that comes from before the chunk of the loss; None if it was
            not measured.
        expectation: what the rule promised, and why.
        verdict: whether the gradient is as promised, as text.
        tolerance: relative error that counts as equal.
        online_gradient: the rule's gradient.
        torch_gradient: torch's.
    """

    name: str
    cosine: float
    relative_error: float
    norm_ratio: float
    sign_agreement: float
    max_difference: float
    max_index: tuple[int, ...]
    found: float
    expected: float
    norm: float
    past: float | None
    expectation: Promise
    verdict: str
    tolerance: float
    online_gradient: np.ndarray = field(repr=False, compare=False)
    torch_gradient: np.ndarray = field(repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the gradient is as promised, and there was one to compare."""
        return self.verdict in AS_EXPECTED.values()

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.torch_gradient.shape

    def mismatch(self, rule: str, reference: str) -> str:
        """Describe the difference in the words of `torch.testing.assert_close`."""
        difference = np.abs(self.online_gradient - self.torch_gradient)
        size = max(difference.size, 1)
        allowed = self.tolerance * self.norm / math.sqrt(size)
        wrong = int(np.count_nonzero(~(difference <= allowed)))
        at = f"index {self.max_index}" if self.max_index else "the only element"
        lines = [
            f"The gradient of `{self.name}` is not close to {short(reference)}'s, though it is "
            f"expected to be {self.expectation.kind}: {self.expectation.reason}.",
            "",
            f"Mismatched elements: {wrong} / {size} ({100 * wrong / size:.1f}%)",
            f"Relative error of the whole gradient: {self.relative_error:.6g} (up to "
            f"{self.tolerance:g} allowed)",
            f"Greatest absolute difference: {self.max_difference:.6g} at {at} (up to {allowed:.3g} "
            "allowed)",
            f"  {rule}: {self.found!r}",
            f"  {reference}: {self.expected!r}",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        numbers = (
            "cosine",
            "relative_error",
            "norm_ratio",
            "sign_agreement",
            "max_difference",
            "found",
            "expected",
            "norm",
            "past",
        )
        return {
            "name": self.name,
            "shape": list(self.shape),
            **{key: plain_number(getattr(self, key)) for key in numbers},
            "max_index": list(self.max_index),
            "expectation": self.expectation.kind,
            "reason": self.expectation.reason,
            "verdict": self.verdict,
            "ok": self.ok,
        }


def compare(
    name: str,
    online: np.ndarray,
    reference: np.ndarray,
    expectation: Promise,
    tolerance: float,
    floor: float,
    past: float | None,
    zero_is_fine: bool,
) -> ParameterReport:
    """Compare one parameter's gradients.

    Args:
        name: the torch name.
        online: the rule's gradient.
        reference: torch's.
        expectation: what was promised.
        tolerance: relative error that counts as equal.
        floor: norm below which a gradient is rounding error on the scale of the model's gradients.
        past: share of the gradient from before the chunk.
        zero_is_fine: the user expects torch's gradient to be zero, or none to be computed.
    """
    difference = np.abs(online - reference)
    norm, online_norm, error = (
        float(np.linalg.norm(x.reshape(-1))) for x in (reference, online, difference)
    )
    relative = error / norm if norm > 0 else (0.0 if error == 0 else math.inf)
    cosine = math.nan
    if online_norm and norm:
        product = np.vdot(online.reshape(-1), reference.reshape(-1)).real
        cosine = float(product / (online_norm * norm))
    index = _largest(difference)
    has_elements = bool(difference.size)
    return ParameterReport(
        name=name,
        cosine=cosine,
        relative_error=relative,
        norm_ratio=online_norm / norm if norm else math.nan,
        sign_agreement=_sign_agreement(online, reference),
        max_difference=float(difference.max(initial=0.0)),
        max_index=index,
        found=online[index].item() if has_elements else math.nan,
        expected=reference[index].item() if has_elements else math.nan,
        norm=norm,
        past=past,
        expectation=expectation,
        verdict=_verdict(
            expectation, norm, online_norm, error, relative <= tolerance, floor, zero_is_fine
        ),
        tolerance=tolerance,
        online_gradient=online,
        torch_gradient=reference,
    )


def _verdict(
    expectation: Promise,
    norm: float,
    online_norm: float,
    error: float,
    is_close: bool,
    floor: float,
    zero_is_fine: bool,
) -> str:
    """Judge a gradient by what was promised.

    `is_close` says whether the relative error is within the tolerance; the other arguments are
    those of `compare` and the norms of both gradients and of their difference.
    """
    kind, is_zero = expectation.kind, norm <= floor
    matches = error <= floor if kind == NONE or is_zero else is_close
    if expectation is START_ONLY:
        return AS_EXPECTED[NONE] if zero_is_fine else START
    if not (math.isfinite(online_norm) and math.isfinite(norm)):
        return MISMATCH
    if kind in (EXACT, NONE) and not matches:
        return MISMATCH
    if is_zero and kind != NONE and not zero_is_fine:
        return ZERO if matches else MISMATCH
    return AS_EXPECTED[EXACT if matches and kind != NONE else kind]


def _largest(difference: np.ndarray) -> tuple[int, ...]:
    """Return the index of the largest element, or of the first NaN; empty for an empty array."""
    if not difference.size:
        return ()
    flat = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
    return tuple(int(i) for i in np.unravel_index(flat, difference.shape))


def _sign_agreement(online: np.ndarray, reference: np.ndarray) -> float:
    """Return the share of equal signs where the reference is not zero; NaN if it is zero
    everywhere.
    """
    ours, theirs = (
        np.stack((x.real, x.imag)) if np.iscomplexobj(x) else x for x in (online, reference)
    )
    signed = theirs != 0
    if not signed.any():
        return math.nan
    return float(np.mean(np.sign(ours[signed]) == np.sign(theirs[signed])))


def plain_number(value: Any) -> Any:
    """Return a value that JSON can hold: text for a complex number, None for NaN and infinity."""
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
