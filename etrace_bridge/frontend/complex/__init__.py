"""Complex numbers: every complex value of a step becomes two real ones, so that compiler, engine
and rules see real numbers only.
"""

from etrace_bridge.frontend.complex.passes import (
    from_parts,
    is_complex,
    part_shapes,
    real_dtype,
    split_complex,
    split_into_parts,
    to_parts,
)

__all__ = [
    "from_parts",
    "is_complex",
    "part_shapes",
    "real_dtype",
    "split_complex",
    "split_into_parts",
    "to_parts",
]
