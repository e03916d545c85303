"""Kinds of torch calls, by name: those that traced tensors answer without computing, and those they
cannot answer. And arguments that torch loses on the way to a traced tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

# torch 2.13's `l1_loss` does not hand its `weight` on to a tensor subclass or a mode.
NOT_HANDED_ON: dict[Callable, tuple[str, ...]] = {F.l1_loss: ("weight",)}

METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "itemsize",
        "nbytes",
        "names",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_xla",
        "is_mps",
        "is_ipu",
        "is_hpu",
        "is_mtia",
        "is_maia",
        "is_vulkan",
        "is_sparse",
        "is_sparse_csr",
        "is_mkldnn",
        "is_quantized",
        "is_meta",
        "is_nested",
        "is_leaf",
        "grad_fn",
        "grad",
        "_version",
        "output_nr",
        "name",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_coalesced",
        "is_inference",
        "is_conj",
        "is_neg",
        "stride",
        "element_size",
        "get_device",
        "has_names",
        "storage_offset",
        "__len__",
        "__hash__",
        "__repr__",
        "__format__",
        "_is_view",
        "is_tensor",
        "is_pinned",
        "is_shared",
        "_is_zerotensor",
        "_has_compatible_shallow_copy_type",
        "retains_grad",
    ]
)
CONCRETE = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__contains__",
        "item",
        "tolist",
        "numpy",
        "__array__",
        "is_nonzero",
        "equal",
        "allclose",
        "_local_scalar_dense",
        "__dlpack__",
        "data_ptr",
        "untyped_storage",
        "storage",
        "nonzero",
        "masked_select",
        "unique",
        "unique_consecutive",
        "argwhere",
        "_unique2",
        "bincount",
        "cpu_numpy",
        "__reduce_ex__",
    ]
)
COMPARISONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne"))
# They change a tensor's shape, not its memory: a traced tensor keeps its shape.
RESHAPING = frozenset(("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"))
GRAD_FLAGS = frozenset(
    ("requires_grad", "requires_grad_", "retain_grad", "detach_", "register_hook")
)
SHAPE_ONLY = frozenset(
    [
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_tensor",
    ]
)
RANDOM = frozenset(
    [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "poisson",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "random_",
        "dropout",
        "F.dropout",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "F.alpha_dropout",
        "F.feature_alpha_dropout",
        "F.dropout1d",
        "F.dropout2d",
        "F.dropout3d",
        "native_dropout",
        "rrelu",
        "F.rrelu",
        "F.gumbel_softmax",
        "aten::native_dropout",
    ]
)


def name_of(func: Callable) -> str:
    """Return the name of a torch function or method; of an attribute's getter, the attribute's."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func.__self__, "__name__", "")
        return owner if name == "__get__" else f"{owner}.{name}"
    return name


def with_all_arguments(func: Callable, kwargs: dict) -> dict:
    """Add the arguments that a torch function got and did not hand on: they are in its frame."""
    if func not in NOT_HANDED_ON:
        return kwargs
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    lost: dict[str, Any] = {}
    if frame is not None:
        lost = {name: frame.f_locals[name] for name in NOT_HANDED_ON[func]}
    return lost | kwargs
