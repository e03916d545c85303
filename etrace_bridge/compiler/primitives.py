"""What each JAX primitive does to the alignment of positions, in one table.

Three kinds matter to the compiler:

- *element-wise*: output element `p` depends on the operands' elements `p` only;
- *structural*: every output element is a copy of one input element (or a constant fill);
- everything else *mixes* positions.

`register_elementwise` adds a primitive of the first kind.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal

_ELEMENTWISE: set[str] = set(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or
    optimization_barrier polygamma pow real reduce_precision regularized_incomplete_beta igamma igammac rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor population_count pvary complex conj zeta name sharding_constraint
    """.split()
)
# of braintools and saiunit, in brainstate's own neurons
_ELEMENTWISE |= {"heaviside_surrogate_gradient", "exprel"}

STRUCTURAL = frozenset(
    """
    broadcast_in_dim concatenate expand_dims pad reshape rev slice split squeeze stack transpose
    dynamic_slice dynamic_update_slice gather scatter copy
    """.split()
)

# Their derivative is zero everywhere it exists, so no credit passes.
_NO_DERIVATIVE = frozenset("ceil floor round sign stop_gradient is_finite nextafter".split())

CUSTOM_DERIVATIVE = frozenset({"custom_jvp_call", "custom_vjp_call"})


def register_elementwise(*names: str) -> None:
    """Tell the compiler that primitives of these names act position by position.

    Example:
        >>> from etrace_bridge.compiler.primitives import register_elementwise
        >>> register_elementwise("my_soft_clip")
    """
    _ELEMENTWISE.update(names)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether each output element depends only on operands at the same position."""
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        return True
    if name not in CUSTOM_DERIVATIVE:
        return False
    shape = eqn.outvars[0].aval.shape
    operands = [v for v in eqn.invars if not isinstance(v, Literal)]
    if any(v.aval.shape not in (shape, ()) for v in operands) or any(
        v.aval.shape != shape for v in eqn.outvars
    ):
        return False
    return _elementwise_body(eqn.params["call_jaxpr"].jaxpr, shape)


def _elementwise_body(jaxpr, shape) -> bool:
    # A scalar spread over the array is the only change of shape that keeps positions apart.
    for inner in jaxpr.eqns:
        closed = inner.params.get("jaxpr")
        if inner.primitive.name in ("jit", "pjit", "closed_call") and closed is not None:
            if not _elementwise_body(closed.jaxpr, shape):
                return False
            continue
        spreads_scalar = (
            inner.primitive.name == "broadcast_in_dim" and inner.invars[0].aval.shape == ()
        )
        if not spreads_scalar and not is_elementwise(inner):
            return False
    return True


def is_structural(eqn: JaxprEqn) -> bool:
    """Return whether each output element is one input element or a fill value.

    Static indices decide which.
    """
    return eqn.primitive.name in STRUCTURAL


def is_float(var) -> bool:
    """Return whether a variable can carry a derivative."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def passes_derivative(eqn: JaxprEqn) -> bool:
    """Return whether a derivative can pass through an equation at all."""
    return eqn.primitive.name not in _NO_DERIVATIVE and any(is_float(v) for v in eqn.outvars)


def index_maps(eqn: JaxprEqn, constants: dict) -> list[np.ndarray] | None:
    """Return which input element each output element of a structural equation is.

    Elements are numbered through all array operands in order: the first operand's are `0 … n0-1`,
    the second's start at `n0`, and so on; -1 is a fill value. None when the indices are not static.

    Args:
        eqn: a structural equation.
        constants: values of variables known at compile time.
    """
    name, params = eqn.primitive.name, eqn.params
    ids, start = [], 0
    for v in eqn.invars:
        size = int(np.prod(v.aval.shape, dtype=np.int64))
        ids.append(np.arange(start, start + size, dtype=np.int64).reshape(v.aval.shape))
        start += size
    x = ids[0]
    out_shape = eqn.outvars[0].aval.shape
    if name in ("reshape", "squeeze", "expand_dims"):
        return (
            None
            if params.get("dimensions") is not None and name == "reshape"
            else [x.reshape(out_shape)]
        )
    if name == "copy":
        return [x]
    if name == "transpose":
        return [x.transpose(params["permutation"])]
    if name == "rev":
        return [np.flip(x, params["dimensions"])]
    if name == "slice":
        strides = params["strides"] or (1,) * x.ndim
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return [x[tuple(slice(a, b, c) for a, b, c in bounds)]]
    if name == "split":
        return np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"])
    if name == "concatenate":
        return [np.concatenate(ids, axis=params["dimension"])]
    if name == "stack":
        return [np.stack(ids, axis=params["axis"])]
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        lifted = np.ones(len(out_shape), dtype=np.int64)
        lifted[list(dims)] = x.shape
        return [np.broadcast_to(x.reshape(lifted), out_shape)]
    if name == "pad":
        return [_pad(x, params["padding_config"], out_shape)]
    return _indexed(eqn, ids, constants)


def _pad(x: np.ndarray, config, out_shape) -> np.ndarray:
    out = np.full(out_shape, -1, dtype=np.int64)
    source, target = [], []
    for size, out_size, (low, _, inner) in zip(x.shape, out_shape, config, strict=True):
        targets = low + np.arange(size) * (inner + 1)
        keep = (targets >= 0) & (targets < out_size)
        source.append(np.nonzero(keep)[0])
        target.append(targets[keep])
    out[np.ix_(*target)] = x[np.ix_(*source)]
    return out


def _indexed(eqn: JaxprEqn, ids: list[np.ndarray], constants: dict) -> list[np.ndarray] | None:
    """Index maps of gather, scatter and the dynamic slices, if the indices are constants."""
    name = eqn.primitive.name
    first = {"dynamic_slice": 1, "gather": 1, "scatter": 1, "dynamic_update_slice": 2}[name]
    last = first + 1 if name in ("gather", "scatter") else len(eqn.invars)
    indices = []
    for v in eqn.invars[first:last]:
        value = v.val if isinstance(v, Literal) else constants.get(v)
        if value is None:
            return None
        indices.append(np.asarray(value))
    if name.startswith("dynamic"):
        sizes = eqn.params["slice_sizes"] if name == "dynamic_slice" else ids[1].shape
        starts = [
            int(np.clip(i, 0, n - s)) for i, n, s in zip(indices, ids[0].shape, sizes, strict=True)
        ]
        window = tuple(slice(i, i + s) for i, s in zip(starts, sizes, strict=True))
        if name == "dynamic_slice":
            return [ids[0][window]]
        out = ids[0].copy()
        out[window] = ids[1]
        return [out]
    return _run_on_ids(eqn, ids, indices[0])


def _run_on_ids(eqn: JaxprEqn, ids: list[np.ndarray], indices: np.ndarray) -> list[np.ndarray]:
    # The primitive itself, run on element numbers; -1 marks what gather fills in.
    import jax

    params = dict(eqn.params)
    with jax.ensure_compile_time_eval():
        if eqn.primitive.name == "gather":
            params["fill_value"] = -1
            out = eqn.primitive.bind(ids[0].astype(np.int32), indices, **params)
        else:
            out = eqn.primitive.bind(
                ids[0].astype(np.int32), indices, ids[2].astype(np.int32), **params
            )
    return [np.asarray(out).astype(np.int64)]
