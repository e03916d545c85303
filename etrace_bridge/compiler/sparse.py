"""Products with a sparse matrix as a dense view of the weight and a plain product.

The matrices are those of JAX, brainunit and brainevent. The values of a sparse matrix are a
parameter, its positions are fixed. So the matrix is a weight view like any other, and the product a
contact that every rule knows. Its trace has the size of the dense matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, is_concrete

# operands: values, columns, row starts, dense
_BY_ROW_STARTS = frozenset({"csr_matmat", "csr_matvec", "csrmm", "csrmv"})
_BY_POSITION = frozenset({"coo_matmat", "coo_matvec"})  # operands: values, rows, columns, dense


def is_sparse_product(eqn: JaxprEqn, operands: Sequence[Any]) -> bool:
    """Return whether an equation is a product with a sparse matrix whose positions are known."""
    name = eqn.primitive.name
    return name in _BY_ROW_STARTS | _BY_POSITION and all(is_concrete(x) for x in operands[1:3])


def dense_product(eqn: JaxprEqn, values: Any, second: Any, third: Any, dense: Any) -> list[Any]:
    """Compute the product by plain operations; operands in the order of the equation."""
    params, second, third = eqn.params, np.asarray(second), np.asarray(third)
    if eqn.primitive.name in _BY_POSITION:
        rows, columns, shape = second, third, params["spinfo"].shape
    else:
        rows = np.repeat(np.arange(len(third) - 1), np.diff(third))
        columns = second
        shape = params["shape"]
    # brainevent's matrices may have one value for all
    values = jnp.broadcast_to(values, rows.shape)
    matrix = jnp.zeros(tuple(shape), values.dtype).at[rows, columns].add(values)
    return [(matrix.T if params["transpose"] else matrix) @ dense]
