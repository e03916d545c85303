"""What torch copies and what it shows: a write in place to a result is seen in the argument, or not."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import etrace_bridge as eb

PLACES = torch.arange(3)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, False),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "feature dropout": lambda x: F.feature_alpha_dropout(x, 0.5, False),
    "dropout1d": lambda x: F.dropout1d(x, 0.5, False),
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "asarray with copy": lambda x: torch.asarray(x, copy=True),
    "a list": lambda x: x[[0, 1, 2]],
    "a list in the second axis": lambda x: x[:, [0, 1, 2, 3]],
    "an array": lambda x: x[PLACES],
    "a mask": lambda x: x[PLACES < 5],
    "a list of booleans": lambda x: x[[True, True, True]],
    "a number as a tensor": lambda x: x[torch.tensor(1)],
    "a slice": lambda x: x[1:],
    "reshape": lambda x: x.reshape(12),
    "reshape of a transpose": lambda x: x.t().reshape(12),
    "reshape to the same shape": lambda x: x.t().reshape(4, 3),
    "reshape of rows": lambda x: x[:2].reshape(8),
    "reshape of columns": lambda x: x[:, :2].reshape(6),
    "flatten of a transpose": lambda x: x.t().flatten(),
    "ravel of a transpose": lambda x: x.t().ravel(),
    "contiguous": lambda x: x.contiguous(),
    "contiguous transpose": lambda x: x.t().contiguous(),
    "contiguous rows": lambda x: x[:2].contiguous(),
    "contiguous steps": lambda x: x[:, ::2].contiguous(),
    "contiguous real part": lambda x: torch.complex(x, x).real.contiguous(),
    "a view of a copy": lambda x: x.t().contiguous().view(12)[2:],
    "a transpose of a copy": lambda x: x[:, :2].reshape(2, 3).t()[1:],
}


@pytest.mark.parametrize("name", CASES)
def test_a_write_is_seen_where_torch_shows_it(name: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = torch.tanh(x)
        y = CASES[name](u)
        u.mul_(2)  # seen in a view
        y.add_(1)  # seen in what it is a view of
        return u * 1, y * 1, u + 0

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = eb.trace_function(function)(jnp.asarray(x.numpy()))
    for a, b in zip(found, function(x), strict=True):
        np.testing.assert_allclose(np.asarray(a), b.numpy(), rtol=1e-12)
