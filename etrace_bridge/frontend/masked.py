"""`x[mask]` with a traced mask: its size is unknown, but `x[mask] = f(x[mask])` can be computed,
and models write it.
"""

from __future__ import annotations

from typing import Any

import torch
from jax import lax

from etrace_bridge.frontend.ops.dtypes import cast
from etrace_bridge.frontend.tensor import TracedTensor, torch_dtype

_ELEMENTWISE = frozenset(
    "add sub rsub mul div rdiv neg abs exp log log1p sin cos tanh sigmoid relu pow rpow sqrt "
    "rsqrt square sign clamp to "
    "float double reciprocal clone detach F.relu F.sigmoid F.tanh add_ sub_ mul_ div_ pow_ neg_ clamp_".split()
)


class MaskedTensor(TracedTensor):
    """The elements of a tensor where a mask holds: the whole tensor and the mask, until they are
    written back.

    Attributes:
        full: Values of the shape of the mask, meaningless where it does not hold.
        mask: The mask's value.
        place: Where `x[mask]` was written.
    """

    full: Any
    mask: Any
    place: str

    @classmethod
    def select(cls, full: Any, mask: Any, place: str, origin: int) -> MaskedTensor:
        """Take the masked elements of a value."""
        selected = cls(full, origin=origin)
        selected.full, selected.mask, selected.place = full, mask, place
        return selected


def is_mask_of(index: Any, source: Any) -> bool:
    """Return whether an index is one traced boolean mask of the whole tensor."""
    return (
        isinstance(index, TracedTensor)
        and index.dtype == torch.bool
        and index.shape == source.shape
    )


def can_compute(rule_name: str, others: list[Any], mask: Any) -> bool:
    """Return whether an op on masked elements acts element by element, with numbers or elements
    under the same mask.
    """
    return rule_name in _ELEMENTWISE and all(
        other.mask is mask if isinstance(other, MaskedTensor) else other.dim() == 0
        for other in others
    )


def write_back(target: Any, mask: Any, value: Any) -> Any:
    """Compute `target[mask] = value` for values of the whole shape."""
    return lax.select_n(mask, target, cast(value, torch_dtype(target.dtype)))
