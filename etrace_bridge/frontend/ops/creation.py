"""Making tensors, and changing their dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge.frontend.ops.arrays import expand_to, full, ints
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, to_jax_dtype
from etrace_bridge.frontend.ops.joining import stack
from etrace_bridge.frontend.ops.registry import implements

# ---- constants


def _enter_constant(name: str, value: int) -> None:
    """Enter `zeros`, `zeros_like`, `new_zeros` and so on. Memory that torch leaves unset is 0 here."""

    def make(*size: Any, dtype: torch.dtype | None = None) -> Any:
        return full(ints(size), value, dtype or torch.get_default_dtype())

    def like(input: Any, *, dtype: torch.dtype | None = None) -> Any:
        return full(np.shape(input), value, dtype or dtype_of(input))

    def new(input: Any, *size: Any, dtype: torch.dtype | None = None) -> Any:
        return full(ints(size), value, dtype or dtype_of(input))

    for key, rule in ((name, make), (f"{name}_like", like), (f"new_{name}", new)):
        implements(key)(rule)


_enter_constant("zeros", 0)
_enter_constant("ones", 1)
_enter_constant("empty", 0)
implements("empty_strided")(
    lambda size, stride, *, dtype=None: full(size, 0, dtype or torch.get_default_dtype())
)
implements("new_empty_strided")(
    lambda input, size, stride, *, dtype=None: full(size, 0, dtype or dtype_of(input))
)


@implements("full")
def full_(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Any:
    """A tensor of one value, whose dtype is the value's own."""
    dtype = dtype or dtype_of(fill_value)
    return (
        expand_to(cast(fill_value, dtype), ints((size,)))
        if hasattr(fill_value, "dtype")
        else full(ints((size,)), fill_value, dtype)
    )


@implements("full_like")
def full_like(input: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Any:
    """A tensor of one value with the shape of another."""
    return full_(np.shape(input), fill_value, dtype=dtype or dtype_of(input))


@implements("new_full")
def new_full(input: Any, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Any:
    """A tensor of one value with the dtype of another."""
    return full_(size, fill_value, dtype=dtype or dtype_of(input))


@implements("scalar_tensor")
def scalar_tensor(s: Any, *, dtype: torch.dtype | None = None) -> Any:
    """A 0-dim tensor; unlike `torch.tensor`, of the default float dtype."""
    return full((), s, dtype or torch.get_default_dtype())


@implements("tensor")
@implements("as_tensor", may_return_input=True)
def tensor(data: Any, dtype: torch.dtype | None = None, copy: bool | None = None) -> Any:
    """A tensor of numbers, nested lists, or 0-dim tensors in such lists."""
    if isinstance(data, (list, tuple)) and _has_arrays(data):
        parts = [tensor(item) for item in data]
        joined = stack(parts, 0)
        return joined if dtype is None else cast(joined, dtype)
    if hasattr(data, "dtype") and not isinstance(data, (np.ndarray, np.generic)):
        return data if dtype is None else cast(data, dtype)
    values = np.asarray(data)
    if dtype is None:
        keep = isinstance(data, (np.ndarray, np.generic))
        kinds = {"b": torch.bool, "i": torch.int64, "f": torch.get_default_dtype()}
        dtype = dtype_of(values) if keep else kinds[values.dtype.kind]
    return (
        lax.full((), cast(values.item(), dtype))
        if values.ndim == 0
        else jnp.asarray(cast(values, dtype))
    )


@implements("asarray", may_return_input=True)
def asarray(obj: Any, dtype: torch.dtype | None = None, copy: bool | None = None) -> Any:
    """A tensor of anything; the tensor itself where nothing changes and no copy is asked for."""
    value = tensor(obj, dtype)
    return lax.copy_p.bind(value) if copy and value is obj else value


def _has_arrays(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(map(_has_arrays, data))
    return hasattr(data, "dtype")


implements("new_tensor")(
    lambda input, data, *, dtype=None: tensor(
        data, dtype or (None if hasattr(data, "dtype") else dtype_of(input))
    )
)


# ---- ranges and matrices


@implements("arange")
def arange(*bounds: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
    """Numbers from start up to, but without, end."""
    bounds = (*bounds, *[named[name] for name in ("start", "end", "step") if name in named])
    start, end, step = (
        (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1) if len(bounds) == 2 else bounds
    )
    if dtype is None:
        dtype = (
            torch.int64 if all(isinstance(b, int) for b in bounds) else torch.get_default_dtype()
        )
    count = (
        len(range(start, end, step))
        if all(isinstance(b, int) for b in bounds)
        else int(np.ceil((end - start) / step))
    )
    return _ramp(start, step, count, dtype)


def _ramp(start: Any, step: Any, count: int, dtype: torch.dtype) -> Any:
    if (start, step) == (0, 1) and dtype != torch.bool:
        return lax.iota(to_jax_dtype(dtype), count)
    return jnp.asarray((start + step * np.arange(count)).astype(to_jax_dtype(dtype)))


@implements("linspace")
def linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None) -> Any:
    """Evenly spaced numbers, both ends included."""
    if any(hasattr(v, "dtype") for v in (start, end)):
        floats = dtype or torch.get_default_dtype()
        position = jnp.asarray(np.linspace(0, 1, steps).astype(to_jax_dtype(floats)))
        start, end = (cast(v, floats) for v in (start, end))
        return lax.add(lax.mul(position, lax.sub(end, start)), start)
    values = np.linspace(start, end, steps)
    dtype = dtype or torch.get_default_dtype()
    return jnp.asarray(
        (values if dtype.is_floating_point else np.trunc(values)).astype(to_jax_dtype(dtype))
    )


@implements("logspace")
def logspace(
    start: float, end: float, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None
) -> Any:
    """Powers of the base with evenly spaced exponents."""
    dtype = dtype or torch.get_default_dtype()
    return jnp.asarray((float(base) ** np.linspace(start, end, steps)).astype(to_jax_dtype(dtype)))


@implements("eye")
def eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None) -> Any:
    """Ones on the diagonal."""
    row, column = (lax.broadcasted_iota(np.int32, (n, n if m is None else m), k) for k in (0, 1))
    return cast(lax.eq(row, column), dtype or torch.get_default_dtype())


def _enter_triangle(name: str, find: Callable) -> None:
    def rule(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64) -> Any:
        return jnp.asarray(np.stack(find(row, offset, col)).astype(to_jax_dtype(dtype)))

    implements(name)(rule)


_enter_triangle("tril_indices", np.tril_indices)
_enter_triangle("triu_indices", np.triu_indices)


@implements("meshgrid", view=True)
def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple:
    """Coordinates of a grid."""
    tensors = (
        tuple(tensors[0])
        if len(tensors) == 1 and isinstance(tensors[0], (list, tuple))
        else tensors
    )
    tensors = tuple(lax.reshape(x, (np.size(x),)) if np.ndim(x) == 0 else x for x in tensors)
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) > 1:
        order[0], order[1] = 1, 0
    shape = [0] * len(tensors)
    for k, x in enumerate(tensors):
        shape[order[k]] = np.size(x)
    return tuple(lax.broadcast_in_dim(x, shape, (order[k],)) for k, x in enumerate(tensors))


# ---- values written into a tensor


@implements("fill")
def fill(input: Any, value: Any) -> Any:
    """A tensor of one value in the place of another."""
    return full_like(input, value)


implements("zero")(lambda input: full_like(input, 0))


@implements("copy")
def copy(input: Any, src: Any, non_blocking: bool = False) -> Any:
    """The values of another tensor with one's own shape and dtype."""
    return expand_to(cast(src, dtype_of(input)), np.shape(input))


# ---- dtype


_OLD_NAMES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip


@implements("to", "_to_copy", may_return_input=True)
def to(
    input: Any,
    *args: Any,
    dtype: torch.dtype | None = None,
    other: Any = None,
    copy: bool = False,
    **_: Any,
) -> Any:
    """Change the dtype; devices are left to JAX."""
    for arg in (*args, other):
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif hasattr(arg, "dtype"):
            dtype = dtype_of(arg)
    return input if dtype is None else cast(input, dtype)


@implements("type", may_return_input=True)
def type_(input: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Change the dtype, which may be given by an old name such as "torch.FloatTensor"."""
    if dtype is None:
        name = next(name for name, known in _OLD_NAMES.items() if known == dtype_of(input))
        return f"torch.{name}Tensor"
    if not isinstance(dtype, torch.dtype):
        text = dtype if isinstance(dtype, str) else f"torch.{dtype.__name__}"
        dtype = _OLD_NAMES[text.removeprefix("torch.").removeprefix("cuda.").removesuffix("Tensor")]
    return cast(input, dtype)


implements("type_as", may_return_input=True)(lambda input, other: cast(input, dtype_of(other)))


def _enter_cast(name: str, dtype: torch.dtype) -> None:
    implements(name, may_return_input=True)(lambda input: cast(input, dtype))


for _name, _dtype in {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}.items():  # fmt: skip
    _enter_cast(_name, _dtype)
implements("cpu", may_return_input=True)(lambda input: input)
