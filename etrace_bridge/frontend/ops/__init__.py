"""The op table of the front-end: importing this package fills it."""

from __future__ import annotations

from etrace_bridge.frontend.ops import (  # noqa: F401
    activations,
    attention,
    complex_numbers,
    convolution,
    creation,
    elementwise,
    factorisations,
    indexing,
    joining,
    linalg,
    losses,
    margins,
    masking,
    mathematics,
    normalisation,
    pooling,
    random,
    reductions,
    resampling,
    shape,
    sorting,
)
from etrace_bridge.frontend.ops.registry import (
    OpRule,
    implements,
    key_source,
    lookup,
    next_key,
    op_names,
    register_op,
)

__all__ = ["OpRule", "implements", "key_source", "lookup", "next_key", "op_names", "register_op"]
