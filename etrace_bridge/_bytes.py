"""Amounts of memory as users write them."""

from __future__ import annotations

import math
import re

from etrace_bridge._errors import InputError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(amount: int | float | str, option: str = "budget") -> int:
    """Return a number of bytes, from a number or from text such as `"500MB"` or `"2 GiB"`.

    Args:
        amount: what the user gave.
        option: the option's name, for error messages.
    """
    number = amount
    if isinstance(amount, str):
        read = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", amount)
        if read is None or read[2].lower() not in _UNITS:
            raise InputError(
                f"`{option}` is {amount!r}; write a number of bytes, or one with a unit such as "
                "'500MB' or '2GiB'."
            )
        number = float(read[1]) * _UNITS[read[2].lower()]
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not number > 0
        or not math.isfinite(number)
    ):
        raise InputError(f"`{option}` is {amount!r}; it must be a positive number of bytes.")
    return int(number)
