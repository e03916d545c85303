"""`TensorReader`: a torch module's weights for JAX, shared or copied."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from torch import nn

from etrace_bridge.learning.torch_reader import TensorReader

CHANGES = {
    "in place": lambda p: p.add_(1),
    ".data in place": lambda p: p.data.add_(1),
    "one element": lambda p: p.data.view(-1)[5].add_(1),
    "new .data": lambda p: setattr(p, "data", p.data + 1),
    "a transposed .data": lambda p: setattr(p, "data", p.data.T.contiguous().T + 1),
}


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4))


@pytest.mark.parametrize("change", CHANGES)
def test_views_and_copies_follow_every_change(change):
    p = weight()
    reader = TensorReader([p])
    before, first = p.detach().numpy().copy(), reader.copies()
    reader.views()
    assert reader.copies() is first, "nothing has changed"
    with torch.no_grad():
        CHANGES[change](p)
    assert reader.kept() is None
    total = jax.jit(lambda w: 1 * w)
    np.testing.assert_array_equal(total(reader.views()[0]), p.detach().numpy())
    np.testing.assert_array_equal(reader.copies()[0], p.detach().numpy())
    np.testing.assert_array_equal(first[0], before)


def test_the_same_memory_may_come_to_hold_another_dtype():
    """As after `half()`, if the allocator gives the old memory out again."""
    memory, p = torch.randn(16), weight()
    reader = TensorReader([p])
    p.data = memory.view(4, 4)
    reader.views()
    p.data = memory.view(torch.float16)[:16].view(4, 4)
    p.data.fill_(0.5)
    view = reader.views()[0]
    assert view.dtype == np.float16
    np.testing.assert_array_equal(view, np.full((4, 4), 0.5))


def test_results_of_programs_do_not_share_the_tensors_memory():
    """Views do; what a program gives back unchanged must not."""
    p = weight()
    reader = TensorReader([p])
    before = p.detach().numpy().copy()
    same, flat = jax.block_until_ready(jax.jit(lambda w: (w, w.reshape(-1)))(reader.views()[0]))
    with torch.no_grad():
        p.fill_(7)
    np.testing.assert_array_equal(same, before)
    np.testing.assert_array_equal(flat, before.ravel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_tensors_that_numpy_cannot_show_are_copied_every_time(dtype):
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    reader = TensorReader([p])
    first = reader.copies()
    assert first[0].shape == ((3, 2) if p.is_complex() else (3,))
    assert reader.kept() is None
    with torch.no_grad():
        p.mul_(2)
    assert np.asarray(reader.views()[0], np.float32).max() == 2
    assert np.asarray(first[0], np.float32).max() == 1
