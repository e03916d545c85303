"""Values of a step that is traced again, and how slices and broadcasts move through them.

Slices move before element-wise equations: `split(x @ W + b)` becomes `split(x @ W) + split(b)`. The
product stays one matmul, and everything after it works gate by gate, which compiled loops need to
be fast. Likewise a value that comes from a contact is spread to many positions before the
element-wise equations, not after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, copy_p, keep_source
from etrace_bridge.compiler.diagnostics import Path

Bind = Callable[[JaxprEqn, list["Value"]], list["Value"]]  # runs an equation on values


@dataclass(eq=False)
class Value:
    """A value, the parameters that it depends on, and how it was made.

    Attributes:
        val: the traced array.
        paths: the parameters that it depends on.
        is_data: whether it also depends on data.
        spread_from: the value and the parameters of the broadcast that made it, if one did.
        maker: the element-wise equation that made it, with its operands, if one did.
        from_product: whether it comes from a product with a weight through element-wise equations.
        contact: the value as data, if it is a weight that meets data element by element.
        slices: its slices, by start and limit.
        widths: its broadcasts, by shape and dimensions.
    """

    val: Any
    paths: frozenset[Path] = frozenset()
    is_data: bool = False
    spread_from: tuple[Value, dict[str, Any]] | None = None
    maker: tuple[JaxprEqn, list[Value]] | None = None
    from_product: bool = False
    contact: Value | None = None
    slices: dict[tuple, Value] = field(default_factory=dict)
    widths: dict[tuple, Value] = field(default_factory=dict)

    @property
    def is_weight(self) -> bool:
        """Whether it is computed from parameters and constants only."""
        return bool(self.paths) and not self.is_data


def as_data(v: Value) -> Value:
    """Return a weight as the output of the equation through which it meets data."""
    if v.contact is None:
        if v.spread_from is not None:
            source, params = v.spread_from
            val = lax.broadcast_in_dim_p.bind(source.val, **params)
        else:
            val = copy_p.bind(v.val)
        v.contact = Value(val, v.paths, is_data=True)
    return v.contact


def sliced(bind: Bind, v: Value, start: Sequence[int], limit: Sequence[int]) -> Value:
    """Slice a value before the element-wise equations that made it."""
    start, limit = tuple(int(i) for i in start), tuple(int(i) for i in limit)
    shape = np.shape(v.val)
    if start == (0,) * len(shape) and limit == shape:
        return v
    if (start, limit) not in v.slices:
        v.slices[start, limit] = _slice(bind, v, start, limit, shape)
    return v.slices[start, limit]


def _slice(bind: Bind, v: Value, start: tuple, limit: tuple, shape: tuple) -> Value:
    if v.maker is not None and v.is_data:
        eqn, operands = v.maker
        if all(np.shape(o.val) in ((), shape) for o in operands):
            parts = [sliced(bind, o, start, limit) if np.ndim(o.val) else o for o in operands]
            with keep_source(eqn):
                return bind(eqn, parts)[0]
    if v.spread_from is not None:
        source, params = v.spread_from
        dims = params["broadcast_dimensions"]
        full = [n == shape[d] for n, d in zip(np.shape(source.val), dims, strict=True)]
        low = [start[d] if f else 0 for d, f in zip(dims, full, strict=True)]
        high = [
            limit[d] if f else n for d, f, n in zip(dims, full, np.shape(source.val), strict=True)
        ]
        new_shape = tuple(b - a for a, b in zip(start, limit, strict=True))
        return broadcast(sliced(bind, source, low, high), dict(params, shape=new_shape))
    return Value(lax.slice(v.val, start, limit), v.paths, v.is_data, from_product=v.from_product)


def split(bind: Bind, v: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Split a value along an axis into slices, see `sliced`."""
    shape, at, parts = np.shape(v.val), 0, []
    for size in sizes:
        start = [at if d == axis else 0 for d in range(len(shape))]
        limit = [at + int(size) if d == axis else n for d, n in enumerate(shape)]
        parts.append(sliced(bind, v, start, limit))
        at += int(size)
    return parts


def widened(bind: Bind, v: Value, params: dict) -> Value:
    """Broadcast a value before the element-wise equations since a product with a weight."""
    key = (params["shape"], params["broadcast_dimensions"])
    if key not in v.widths:
        v.widths[key] = _widen(bind, v, params)
    return v.widths[key]


def _widen(bind: Bind, v: Value, params: dict) -> Value:
    if v.spread_from is not None:
        source, inner = v.spread_from
        return widened(bind, source, _composed(inner, params))
    shape = np.shape(v.val)
    only_adds_axes = np.prod(shape) == np.prod(params["shape"])
    if (
        only_adds_axes
        or v.maker is None
        or any(np.shape(o.val) not in ((), shape) for o in v.maker[1])
    ):
        return broadcast(v, params)
    eqn, operands = v.maker
    parts = [
        widened(bind, o, params) if np.ndim(o.val) or o.paths or o.is_data else o for o in operands
    ]
    with keep_source(eqn):
        return bind(eqn, parts)[0]


def spread(bind: Bind, v: Value, shape: tuple[int, ...]) -> Value:
    """Make implicit broadcasting explicit; constants stay scalars."""
    if np.shape(v.val) == shape or (not v.paths and not v.is_data and np.ndim(v.val) == 0):
        return v
    dims = tuple(range(len(shape) - np.ndim(v.val), len(shape)))
    params = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
    return widened(bind, v, params) if v.from_product else broadcast(v, params)


def broadcast(v: Value, params: dict) -> Value:
    """Broadcast a value; two broadcasts in a row become one."""
    if v.spread_from is not None:
        v, inner = v.spread_from
        params = _composed(inner, params)
    out = Value(
        lax.broadcast_in_dim_p.bind(v.val, **params),
        v.paths,
        v.is_data,
        from_product=v.from_product,
    )
    out.spread_from = (v, params)
    return out


def as_broadcast(v: Value, shape: tuple[int, ...]) -> tuple[Value, dict] | None:
    """Express a reshape as a broadcast; None if it does more than add axes of size 1."""
    sizes, dims = list(np.shape(v.val)), []
    for d, n in enumerate(shape):
        if sizes and sizes[0] == n:
            dims.append(d)
            del sizes[0]
        elif n != 1:
            return None
    return (
        (v, {"shape": shape, "broadcast_dimensions": tuple(dims), "sharding": None})
        if not sizes
        else None
    )


def _composed(inner: dict, outer: dict) -> dict:
    """Return the parameters of a broadcast that does the work of two."""
    dims = outer["broadcast_dimensions"]
    return dict(outer, broadcast_dimensions=tuple(dims[d] for d in inner["broadcast_dimensions"]))
