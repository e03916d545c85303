"""Cases for entries of the op table that torch's `op_db` has no samples for: operators, aten
kernels, casts, assignments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from op_cases import Call

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(0)


def x(*shape: int, grad: bool = True, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Make a float64 tensor of values in a range."""
    values = torch.rand(shape, dtype=torch.float64, generator=_generator) * (high - low) + low
    return values.requires_grad_(grad)


def i(*shape: int, below: int = 5) -> torch.Tensor:
    """Make a tensor of small integers, none of them 0."""
    return torch.randint(1, below, shape, generator=_generator)


def mask(*shape: int) -> torch.Tensor:
    """Make a boolean tensor."""
    return torch.rand(shape, generator=_generator) > 0.5


def call(function: Callable, *args: Any, **kwargs: Any) -> Call:
    """Write a case like the call itself."""
    return Call(function, args, kwargs)


T = torch.Tensor

OPERATORS = [
    call(T.__rfloordiv__, x(3, 4, low=0.5, grad=False), 3.0), call(T.__rmod__, x(3, low=0.5, grad=False), 2.0),
    call(T.__rpow__, x(3), 2.0),
    call(T.__rdiv__, x(3, low=0.5), 2), call(T.__rsub__, x(3), 1), call(T.__rlshift__, i(3), 2),
    call(T.__rrshift__, i(3), 64),
    call(T.__rmatmul__, x(3, 2), x(4, 3)), call(T.__matmul__, x(4, 3), x(3, 2)), call(T.__add__, x(2, 3), x(3)),
    call(T.__radd__, x(3), 2.5), call(T.__mul__, x(3), 2), call(T.__truediv__, i(3), i(3)),
    call(T.__floordiv__, x(3, grad=False), 0.7),
    call(T.__mod__, x(3), 0.7), call(T.__pow__, x(3), 3), call(T.__neg__, x(3)), call(T.__abs__, x(3)),
    call(T.__and__, mask(3), mask(3)), call(T.__or__, i(3), 1), call(T.__xor__, mask(3), True),
    call(T.__invert__, mask(3)),
    call(T.__lshift__, i(3), 2), call(T.__rshift__, i(3, below=99), 2), call(T.__eq__, i(9), i(9)),
    call(T.__ne__, x(3), 0),
    call(T.__lt__, x(3), x(3)), call(T.__le__, x(3), 0.1), call(T.__gt__, x(3), 0), call(T.__ge__, i(3), 2),
    call(T.__iadd__, x(2, 3), x(3)), call(T.__isub__, x(2, 3), 1), call(T.__imul__, x(2), x(2)),
    call(T.__itruediv__, x(2), 3),
    call(T.__iand__, mask(4), mask(4)), call(T.__ior__, mask(4), mask(4)), call(T.__ixor__, mask(4), mask(4)),
    call(T.__ifloordiv__, x(3, grad=False), 0.3), call(T.__imod__, x(3), 0.3), call(T.__ipow__, x(3), 2),
    call(T.fill_diagonal_, x(3, 3), 0.5), call(T.fill_diagonal_, x(7, 3), 2.0, wrap=True), call(T.fill_diagonal_, x(2, 4), -1.0),
]  # fmt: skip

INDEXING = [
    call(T.__getitem__, x(4, 5, 6), (slice(1, 3), ..., None, 2)),
    call(T.__getitem__, x(4, 5), -1),
    call(T.__getitem__, x(4, 5), (slice(None, None, 2), slice(-3, None))),
    call(T.__getitem__, x(4, 5, 6), (slice(None), i(2, 3), 1)),
    call(T.__getitem__, x(4, 5, 6), (i(3, below=4), slice(None), i(3))),
    call(T.__getitem__, x(4, 5), ([0, -1], [1, 2])),
    call(T.__getitem__, x(4, 5), mask(4, 5)),
    call(T.__getitem__, x(4, 5), (slice(None), torch.tensor([True, False, True, True, False]))),
    call(T.__getitem__, x(4), True),
    call(T.__setitem__, x(4, 5, 6), (slice(1, 3), slice(None), 2), x(2, 5)),
    call(T.__setitem__, x(4, 5), 1, 7.0),
    call(T.__setitem__, x(4, 5), slice(None), x(5)),
    call(T.__setitem__, x(4, 5), (..., slice(0, 5, 2)), x(4, 3)),
    call(T.__setitem__, x(4, 5), (slice(1, 2), None), x(1, 1, 5)),
    call(T.__setitem__, x(4, 5), mask(4, 5), 0.0),
    call(T.__setitem__, x(4, 5), mask(4), x(5)),
    call(T.__setitem__, x(4, 5), (slice(None), mask(5)), -1),
    call(T.__setitem__, x(4, 5), (torch.tensor([0, 2]), slice(1, 3)), x(2, 2)),
    call(T.__setitem__, x(4, 5), torch.tensor([1, -1]), x(5)),
    call(T.__setitem__, i(4, 5), (0, 0), 2.7),
    call(aten.index.Tensor, x(4, 5, 6), [None, torch.tensor([0, 2])]),
    call(aten._unsafe_index.Tensor, x(4, 5), [torch.tensor([0, -2])]),
    call(aten._unsafe_index_put.default, x(4, 5), [torch.tensor([0, 2])], x(5), False),
    call(aten._index_put_impl_.default, x(4, 5), [mask(4, 5)], x(), False),
    call(aten.select.int, x(3, 4), 1, -1),
    call(aten.slice.Tensor, x(3, 4), 1, 1, 9223372036854775807),
]

SHAPE = [
    call(T.detach, x(3)), call(aten.alias.default, x(3)), call(aten._unsafe_view.default, x(3, 4), [4, 3]),
    call(aten._reshape_alias.default, x(3, 4), [12], [1]), call(T.T.__get__, x(3, 4)), call(T.mT.__get__, x(2, 3, 4)),
    call(T.H.__get__, x(3, 4)), call(T.mH.__get__, x(2, 3, 4)), call(T.real.__get__, x(3)), call(T.adjoint, x(2, 3, 4)),
    call(aten.numpy_T.default, x(2, 3)), call(T.view, x(2, 6), 3, -1), call(T.view, x(2, 6), torch.int64),
    call(T.view, x(4), torch.int32), call(T.view, torch.arange(8, dtype=torch.int32), torch.int64),
    call(T.expand, x(3, 1), -1, 4), call(T.expand, x(3, 1), size=(2, 3, 4)), call(T.permute, x(2, 3, 4), 2, 0, 1),
    call(T.permute, x(2, 3), dims=(1, 0)), call(T.repeat, x(2, 3), 2, 1, 2), call(T.reshape, x(2, 6), shape=(4, -1)),
    call(T.split, x(7, 2), [3, 4]), call(T.split, x(7, 2), 3), call(torch.split, x(7, 2), 2, dim=1),
    call(aten.split_with_sizes.default, x(5), [2, 3]), call(aten.unsafe_split_with_sizes.default, x(5), [2, 3]),
    call(aten.lift_fresh_copy.default, x(3)), call(T.unflatten, x(2, 6), 1, (2, -1)), call(T.flatten, x(2, 3, 4), 1),
    call(torch.row_stack, (x(2), x(2))), call(T.unsqueeze_, x(2, 3), 1), call(T.t_, x(2, 3)),
    call(T.where, x(3), mask(3), x(3)),
]  # fmt: skip

CREATION = [
    call(torch.tensor, [1, 2]), call(torch.tensor, [1.5, 2]), call(torch.tensor, [[True], [False]]),
    call(torch.tensor, 3),
    call(torch.tensor, [1, 2], dtype=torch.float64), call(torch.as_tensor, [1.5]), call(torch.as_tensor, x(3)),
    call(torch.asarray, 2.0), call(T.new_tensor, i(2), [1, 2]), call(T.new_tensor, x(2), 3),
    call(T.new_zeros, x(2), 3, 4),
    call(T.new_ones, x(2), (3,), dtype=torch.int32), call(torch.zeros, 2, 3),
    call(torch.zeros, (2, 3), dtype=torch.bool),
    call(torch.ones, size=(2,)), call(torch.full, (2, 3), 7), call(torch.full, (2,), 0.5), call(torch.full, (), True),
    call(torch.arange, 5), call(torch.arange, 1, 7, 2), call(torch.arange, 0.0, 1.0, 0.25),
    call(torch.arange, start=1, end=4),
    call(torch.linspace, 0, 1, steps=4), call(torch.eye, 3), call(torch.eye, 2, 3, dtype=torch.int64),
    call(T.zero_, x(3)), call(T.fill_, x(3), 2), call(T.fill_, x(3), x()), call(T.copy_, x(2, 3), x(3)),
    call(T.copy_, i(3), x(3)),
    call(aten.copy.default, x(2, 3, grad=False), x(3, grad=False)), call(aten.zero.default, x(3)),
]  # fmt: skip

CASTS = [
    *[call(getattr(T, name), x(4)) for name in "float double half bfloat16 long int short char byte bool".split()],
    call(T.to, x(4), torch.float32), call(T.to, x(4), "cpu"), call(T.to, x(4), "cpu", torch.int64),
    call(T.to, i(4), x(2)),
    call(T.to, x(4), dtype=torch.float32, copy=True), call(T.type, x(4), torch.int32),
    call(T.type, x(4), "torch.FloatTensor"),
    call(T.type_as, i(4), x(4)), call(T.cpu, x(4)), call(aten._to_copy.default, x(4), dtype=torch.float32),
    call(T.contiguous, x(4)),
]  # fmt: skip

NEURAL = [
    call(F.softmax, x(3, 4), dim=1), call(F.softmax, i(3, 4), 0, dtype=torch.float64), call(F.log_softmax, x(3, 4), -1),
    call(aten._softmax.default, x(3, 4), 1, False), call(aten._log_softmax.default, x(3, 4), 1, False),
    call(aten.log_sigmoid_forward.default, x(3, grad=False)), call(F.logsigmoid, x(3)),
    call(aten.elu.default, x(9), 1.5, 1.1, 0.7),
    call(F.elu, x(9), 1.5), call(F.threshold, x(9), 0.1, 20.0), call(F.relu, x(9), inplace=True),
    call(F.relu, x(9), True),
    call(torch.relu_, x(9)), call(F.hardtanh_, x(9)), call(F.elu_, x(9)), call(F.leaky_relu_, x(9), 0.2),
    call(aten._prelu_kernel.default, x(3, 2), x(1, 2)), call(F.prelu, x(3, 2), x(2)),
    call(F.gelu, x(9), approximate="tanh"),
    call(F.dropout, x(3), 0.5, False), call(F.rrelu, x(9)),
    call(torch.embedding, x(5, 2), i(3)), call(F.embedding, i(4), x(5, 2), padding_idx=2),
    call(aten.native_layer_norm.default, x(3, 4), [4], x(4), x(4), 1e-5), call(F.layer_norm, x(3, 4), (4,), x(4), x(4)),
    call(torch.batch_norm, x(4, 3), x(3), x(3), x(3, grad=False), x(3, grad=False, low=0.5), True, 0.1, 1e-5, False),
    call(torch.batch_norm, x(4, 3), x(3), x(3), x(3, grad=False), x(3, grad=False, low=0.5), False, 0.1, 1e-5, False),
    call(torch.instance_norm, x(2, 3, 5), x(3), x(3), None, None, True, 0.1, 1e-5, False),
    call(aten._native_batch_norm_legit.default, x(4, 3), x(3), x(3), x(3, grad=False), x(3, grad=False, low=0.5), True, 0.1, 1e-5),
    call(aten._native_batch_norm_legit.no_stats, x(4, 3), x(3), x(3), True, 0.1, 1e-5),
    call(aten.convolution.default, x(2, 4, 5), x(6, 2, 3), x(6), [1], [1], [1], False, [0], 2),
    call(aten.convolution.default, x(2, 4, 5), x(4, 3, 3), x(6), [2], [1], [1], True, [1], 2),
    call(aten._convolution.default, x(2, 4, 5), x(6, 4, 3), None, [1], [0], [2], False, [0], 1, False, False, False, False),
    call(aten.mkldnn_convolution.default, *(t.float().detach() for t in (x(2, 4, 5, 5), x(6, 4, 3, 3), x(6))), [1, 1], [2, 2], [1, 1], 1),
    call(torch._weight_norm, x(4, 3), x(4, 1), 0),
    call(aten._scaled_dot_product_flash_attention_for_cpu.default, x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4)),
    call(F.scaled_dot_product_attention, x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), mask(3, 5)),
    call(F.interpolate, x(1, 2, 3, 3), scale_factor=2), call(F.upsample, x(1, 2, 3), size=5, mode="linear"),
    call(F.fold, x(1, 12, 12), (4, 5), (2, 2)), call(F.fold, x(1, 12, 4), (4, 5), (2, 2), stride=2, padding=0),
    call(F.unfold, x(1, 2, 5, 6), 3, dilation=1, padding=1, stride=2),
    call(aten.im2col.default, x(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    call(aten.col2im.default, x(1, 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    call(aten.reflection_pad1d.default, x(2, 5), [2, 1]), call(aten.reflection_pad2d.default, x(2, 5, 5), [2, 1, 0, 3]),
    call(aten.reflection_pad3d.default, x(2, 3, 3, 3), [1] * 6), call(aten.replication_pad1d.default, x(2, 5), [2, 1]),
    call(aten.replication_pad2d.default, x(2, 5, 5), [2, 1, 0, 3]),
    call(aten.replication_pad3d.default, x(2, 3, 3, 3), [1] * 6),
    call(F.pad, x(2, 5), (1, -2)), call(F.pad, x(2, 3, 5), (2, 3), mode="circular"),
]  # fmt: skip

POOLING = [
    call(aten._adaptive_avg_pool2d.default, x(2, 5, 7), [2, 3]),
    call(aten._adaptive_avg_pool3d.default, x(2, 3, 5, 7), [2, 3, 2]),
    call(F.adaptive_avg_pool1d, x(2, 3, 6), 2), call(torch.adaptive_max_pool1d, x(2, 3, 7), 3),
    call(aten.adaptive_max_pool2d.default, x(2, 5, 7), [2, 3]),
    call(aten.adaptive_max_pool3d.default, x(2, 3, 5, 7), [2, 3, 2]),
    *[call(F.adaptive_max_pool1d, x(2, 3, 7), 3, flag) for flag in (True, False)],
    *[call(F.adaptive_max_pool2d_with_indices, x(2, 5, 7), (2, 3))],
    call(F.adaptive_max_pool1d_with_indices, x(2, 5, 7), 2),
    call(F.adaptive_max_pool3d_with_indices, x(2, 3, 3, 4), 2),
    call(torch.max_pool1d, x(2, 3, 7), 3), call(torch.max_pool1d_with_indices, x(2, 3, 7), 3),
    call(F.max_pool2d, x(2, 5, 7), 2, return_indices=True), call(F.max_pool2d_with_indices, x(2, 5, 7), 2),
    call(aten.max_pool2d_with_indices.default, x(2, 5, 7), [2, 2], [], 1),
    # overlapping windows have a maximum in common: op_db has other values at one place
    call(aten.max_unpool2d.default, torch.full((1, 2, 2), 0.5).double().requires_grad_(), torch.tensor([[[6, 6], [0, 24]]]), [5, 5]),
    call(aten.max_unpool3d.default, torch.full((2, 1, 1, 2, 2), 0.5).double().requires_grad_(), i(2, 1, 1, 2, 2), [1, 2, 4], [1, 1, 1], [0, 0, 0]),
    call(aten.max_pool3d_with_indices.default, x(2, 3, 5, 7), 2),
    call(F.max_pool3d, x(2, 3, 5, 7), 2),
]  # fmt: skip

LOSSES = [
    *[call(f, x(3, 4), x(3, 4), r) for f in (torch._C._nn.mse_loss, torch._C._nn.l1_loss, aten.smooth_l1_loss, aten.huber_loss)
      for r in (0, 1, 2)],
    call(F.mse_loss, x(3, 4), x(3, 4), weight=x(3, 4, grad=False, low=0.5)),
    call(F.mse_loss, x(3, 4), x(3, 4), size_average=False),
    call(F.l1_loss, x(3), x(3), reduce=False),
    call(F.huber_loss, x(9), x(9), delta=0.7, weight=x(9, grad=False, low=0.5)),
    call(aten.nll_loss, x(3, 5), i(3), None, 1, -100), call(aten.nll_loss_nd, x(3, 5), i(3), None, 2, 3),
    call(aten.nll_loss2d, x(3, 5, 2, 2), i(3, 2, 2), x(5, grad=False, low=0.5), 1, -100),
    call(aten.nll_loss_forward.default, x(3, 5), i(3), None, 1, -100),
    call(aten.nll_loss2d_forward.default, x(3, 5, 2, 2), i(3, 2, 2), None, 0, -100),
    call(torch._C._nn.cross_entropy_loss, x(3, 5), i(3), None, 1, -100, 0.1),
    call(F.cross_entropy, x(3, 5), i(3), ignore_index=2), call(F.cross_entropy, x(5), torch.tensor(2)),
    call(F.cross_entropy, x(3, 5, 2), x(3, 5, 2, low=0.0).detach(), label_smoothing=0.2, weight=x(5, grad=False, low=0.1)),
    call(F.cross_entropy, x(3, 5, 2), i(3, 2), label_smoothing=0.2, weight=x(5, grad=False, low=0.1), ignore_index=1),
    call(torch._C._nn.binary_cross_entropy, x(3, low=0.1, high=0.9), x(3, low=0, high=1), None, 2),
    call(torch.binary_cross_entropy_with_logits, x(3), x(3, low=0, high=1), None, x(3, grad=False, low=0.5), 0),
    call(torch.kl_div, x(3, high=0), x(3, low=0.1), 1, log_target=False),
    call(F.kl_div, x(3, 2), x(3, 2), reduction="batchmean", log_target=True),
    call(torch._C._nn.soft_margin_loss, x(3), torch.tensor([1.0, -1.0, 1.0]).double(), 1),
]  # fmt: skip

PRODUCTS = [
    call(torch.einsum, "bij,bjk->bik", x(2, 3, 4), x(2, 4, 5)), call(torch.einsum, "ii->i", x(3, 3)),
    call(torch.einsum, "...i,...i", x(2, 3), x(2, 3)), call(torch.einsum, "i,j,k->kij", x(2), x(3), x(4)),
    call(torch.einsum, "ij->", x(2, 3)), call(torch.einsum, "bi,oi,bo->b", x(4, 2), x(3, 2), x(4, 3)),
    call(torch.einsum, x(2, 3), [0, 1], x(3, 4), [1, 2], [0, 2]), call(torch.einsum, "ab,bc", [x(2, 3), x(3, 4)]),
    call(torch.linalg.matmul, x(2, 3), x(3)), call(torch.ger, x(2), x(3)),
    call(torch.chain_matmul, x(2, 3), x(3, 4), x(4, 2)),
    call(F.linear, x(2, 3, 4), x(5, 4), x(5)), call(F.linear, x(4), x(5, 4)), call(F.linear, x(4), x(4)),
    call(torch.matmul, x(3, 4), x(2, 4, 5)), call(torch.matmul, x(4), x(2, 4, 5)),
    call(torch.matmul, x(2, 1, 3, 4), x(5, 4, 3)),
    call(aten.addmm.default, x(5), x(3, 4), x(4, 5), beta=0.5, alpha=2.0),
    call(aten.sort.stable, x(3, 4), stable=True, dim=0),
]  # fmt: skip

HAND_CASES = [
    *OPERATORS,
    *INDEXING,
    *SHAPE,
    *CREATION,
    *CASTS,
    *NEURAL,
    *POOLING,
    *LOSSES,
    *PRODUCTS,
]


def _at(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


inf, nan = float("inf"), float("nan")
_edge = lambda *v: _at(*v, *(-e for e in v), 0.3)

# Points where a derivative is a convention: kinks, ties, zeros, infinities. One line a function.
KINKS = [
    call(torch.relu, _at(0.0, 1.0, -1.0)), call(F.relu6, _at(0, 6, 3.0)), call(F.hardtanh, _edge(1.0)),
    call(torch.abs, _at(0, 1, -1.0)),
    call(F.leaky_relu, _at(0.0, 1.0)), call(F.elu, _at(0.0, 800.0, -800.0)), call(F.selu, _at(0.0, 1.0)),
    call(F.celu, _at(0.0), 0.5),
    call(F.prelu, _at(0.0, 1.0), _at(0.25)), call(F.softplus, _at(20.0, 19.0, 21.0, 800.0, -800.0)),
    call(F.silu, _at(0.0, -800.0)),
    call(F.hardsigmoid, _edge(3.0)), call(F.hardswish, _edge(3.0)), call(F.hardshrink, _edge(0.5, 0.0)),
    call(F.softshrink, _edge(0.5, 0.0)),
    call(F.threshold, _at(0.1, 0.2), 0.1, 5.0), call(F.logsigmoid, _at(0.0, 800.0, -800.0)),
    call(F.softsign, _at(0.0, 1.0)),
    call(F.mish, _at(0.0, 50.0)), call(F.gelu, _at(0.0, 9.0, -9.0)), call(torch.sign, _at(0.0, 1.0)),
    call(torch.sigmoid, _at(800.0, -800.0)),
    call(torch.clamp, _at(0.0, 1.0, 2.0, -1.0), 0.0, 1.0), call(torch.clamp, _at(1.0), 2.0, 1.0),
    call(torch.clamp_min, _at(0.0, 1.0), 0.0),
    call(torch.clamp, _at(0.0, 1.0, 2.0), _at(0.0, 1.5, 0.0), _at(1.0, 1.0, 2.0)),
    call(torch.clamp, _at(nan, 1.0).detach(), 0.0, 2.0),
    call(torch.maximum, _at(1.0, 2.0), _at(1.0, 1.0)), call(torch.minimum, _at(1.0, 2.0), _at(1.0, 1.0)),
    call(torch.fmax, _at(1.0, nan), _at(1.0, 1.0)),
    call(torch.max, _at(1.0, 1.0, 0.0)), call(torch.max, _at(1.0, 1.0, 0.0), 0),
    call(torch.min, _at(1.0, 1.0, 2.0), 0), call(torch.min, _at(1.0, 1.0)),
    call(torch.max, _at(1.0, 2.0), _at(1.0, 1.0)), call(torch.amax, _at(1.0, 1.0, 0.0), 0),
    call(torch.amin, _at(1.0, 1.0, 2.0), 0),
    call(torch.aminmax, _at(1.0, 1.0, 2.0, 2.0)), call(torch.median, _at(1.0, 1.0, 2.0)),
    call(torch.sort, _at(1.0, 1.0, 0.0)),
    call(torch.cummax, _at(1.0, 1.0, 0.0, 2.0), 0), call(torch.topk, _at(2.0, 1.0, 3.0), 2),
    call(torch.cumprod, _at(2.0, 0.0, 3.0, 0.0), 0),
    call(torch.prod, _at(2.0, 0.0, 3.0)), call(torch.prod, _at(0.0, 0.0, 3.0)), call(torch.sqrt, _at(0.0, 1.0)),
    call(torch.std, _at(1.0, 1.0, 1.0)),
    call(torch.var, _at(1.0, 1.0)), *[call(torch.norm, _at(0.0, 0.0), p) for p in (1, 2, 3, 0.5, inf)],
    call(torch.norm, _at(3.0, 0.0, -3.0), inf),
    *[call(torch.linalg.vector_norm, _at(0.0, -2.0), p) for p in (0, 1, 1.5, 3, -1, -inf)],
    call(F.normalize, _at(0.0, 0.0), dim=0),
    call(F.cosine_similarity, _at(0.0, 0.0), _at(1.0, 2.0), dim=0), call(torch.pow, _at(0.0, 2.0), 0),
    call(torch.pow, _at(0.0, -2.0), 1),
    call(torch.pow, _at(0.0, -2.0), 2), call(torch.pow, _at(0.0, 2.0), 0.5),
    call(torch.pow, _at(0.0, 0.0, 2.0), _at(0.0, 2.0, 0.0)),
    call(torch.pow, 0.0, _at(1.0, 2.0)), call(torch.pow, _at(0.0, 3.0), -1), call(torch.sinc, _at(0.0, 1.0)),
    call(torch.atan2, _at(0.0, 1.0), _at(1.0, 0.0)),
    call(torch.logaddexp, _at(1.0, -inf, inf), _at(1.0, 1.0, 1.0)),
    call(torch.xlogy, _at(0.0, 1.0), _at(0.0, 2.0).detach()),
    call(torch.hypot, _at(3.0), _at(0.0)), call(torch.copysign, _at(0.0, 2.0), _at(1.0, -1.0)),
    call(torch.nan_to_num, _at(nan, inf, -inf, 1.0)),
    call(torch.softmax, _at(-inf, 0.0, 1.0), 0), call(torch.log_softmax, _at(-1e30, 0.0, 1.0), 0),
    call(torch.logsumexp, _at(-inf, 0.0, 1.0), 0),
    call(torch.softmax, _at(-inf, -inf), 0), call(torch.logsumexp, _at(-inf, -inf).detach(), 0),
    call(torch.where, torch.tensor([True, False]), _at(1.0, 2.0), _at(inf, 3.0)),
    call(torch.masked_fill, _at(1.0, 2.0), torch.tensor([True, False]), -inf),
    call(torch.lerp, _at(1.0, inf), _at(2.0, 3.0), 0.0),
    call(torch.round, _at(0.5, 1.5, 2.5, -0.5)), call(torch.floor, _at(1.0, -0.5)),
    call(torch.fmod, _at(4.0, -5.0), _at(2.0, 3.0)),
    call(torch.remainder, _at(4.0, -5.0), _at(2.0, 3.0)),
    call(torch.floor_divide, _at(4.0, -5.0).detach(), _at(2.0, 0.0).detach()),
    call(F.l1_loss, _at(1.0, 2.0), _at(1.0, 1.0)), call(F.smooth_l1_loss, _at(1.0, 0.0, 3.0), _at(0.0, 0.0, 0.0)),
    call(F.huber_loss, _at(1.0, 0.0, 3.0), _at(0.0, 0.0, 0.0)),
    call(F.smooth_l1_loss, _at(0.0, 1.0), _at(0.0, 0.0), beta=0.0),
    call(F.binary_cross_entropy, _at(0.0, 1.0, 0.0, 1.0), _at(0.0, 1.0, 1.0, 0.0)),
    call(F.binary_cross_entropy_with_logits, _at(0.0, 800.0), _at(1.0, 0.0)),
    call(F.hinge_embedding_loss, _at(1.0, 0.5), torch.tensor([-1.0, 1.0]).double()),
    call(F.kl_div, _at(-1.0, -2.0), _at(0.0, 0.5).detach()),
    call(F.max_pool1d, _at(1, 1, 0, 0, 2, 2.0).reshape(1, 1, 6).detach().requires_grad_(), 2),
    call(F.max_pool1d, torch.ones(1, 1, 6).double().requires_grad_(), 3, 1, 1),
    call(F.max_pool2d, torch.zeros(1, 1, 4, 4).double().requires_grad_(), 2),
    call(F.max_pool2d, torch.zeros(1, 1, 5, 5).double().requires_grad_(), 3, 1, 1, return_indices=True),
    call(F.adaptive_max_pool2d, torch.zeros(1, 1, 4, 4).double().requires_grad_(), 2),
    call(torch.rsqrt, _at(0.0, 1.0)), call(torch.log, _at(0.0, 1.0)),
    call(torch.acos, _at(1.0, 0.5)), call(torch.erfinv, _at(0.0, 0.5)), call(torch.tanh, _at(0.0, 400.0)),
    call(torch.expm1, _at(0.0, 1e-12)), call(torch.log1p, _at(0.0, 1e-12)),
]  # fmt: skip
