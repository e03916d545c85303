"""A traced function run in NumPy, operation by operation: for fuzzed programs, which run once on tiny
arrays, so that compiling them would be most of what they cost.

Operations without a line here (convolutions, gathers, sorting) are run by JAX, one at a time: JAX keeps
what it has compiled for one of them, and later programs use it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import jax
import numpy as np

from etrace_bridge._jax_compat import ClosedJaxpr, Literal, bind_equation


def run_in_numpy(function: Callable) -> Callable:
    """The function with its operations run by NumPy; results are NumPy arrays."""

    traced = jax.jit(function)  # keeps what it traced for the next call

    def run(*args: Any) -> Any:
        trace = traced.trace(*args)
        with np.errstate(all="ignore"):
            found = evaluate(trace.jaxpr, [np.asarray(leaf) for leaf in jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(trace.out_info), [np.array(f) for f in found])

    return run


def evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, map(np.asarray, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        rule = RULES.get(eqn.primitive.name)
        if rule is None:
            made = [_as_numpy(value) for value in bind_equation(eqn, values)]
        else:
            made = rule(*values, **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _as_numpy(value: Any) -> Any:
    """The value as a NumPy array; random keys have no such form and stay as they are."""
    return value if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) else np.asarray(value)


# ---- rules, by the name of a primitive

RULES: dict[str, Callable] = {}


def _rule(function: Callable) -> Callable:
    RULES[function.__name__.strip("_").replace("scatter_", "scatter-")] = function
    return function


def _elementwise(function: Callable) -> Callable:
    return lambda *values, **_: function(*values)


_ELEMENTWISE = {
    "mul": np.multiply, "add": np.add, "add_any": np.add, "sub": np.subtract, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "exp": np.exp, "expm1": np.expm1,
    "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "square": np.square, "sign": np.sign, "abs": np.abs, "atan": np.arctan,
    "pow": np.power, "is_finite": np.isfinite, "gt": np.greater, "lt": np.less, "ge": np.greater_equal, "le": np.less_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert,
    "xor": np.bitwise_xor,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": lambda x: x, "stop_gradient": lambda x: x,
}  # fmt: skip
RULES.update({name: _elementwise(function) for name, function in _ELEMENTWISE.items()})
RULES["optimization_barrier"] = lambda *values, **_: values


@_rule
def _div(a: Any, b: Any, **_: Any) -> Any:
    whole = np.issubdtype(a.dtype, np.integer)
    return np.trunc(np.true_divide(a, b)).astype(a.dtype) if whole else np.true_divide(a, b)


@_rule
def _integer_pow(x: Any, *, y: int, **_: Any) -> Any:
    return x**y if y >= 0 else 1 / x**-y


@_rule
def _convert_element_type(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    return np.asarray(x).astype(new_dtype)


@_rule
def _select_n(which: Any, *cases: Any) -> Any:
    return (
        np.where(which, cases[1], cases[0])
        if which.dtype == bool
        else np.choose(np.broadcast_to(which, cases[0].shape), cases)
    )


@_rule
def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Any:
    along = [-1 if n == dimension else 1 for n in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(along), shape)


# ---- arrays moved


@_rule
def _broadcast_in_dim(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    along = [1] * len(shape)
    for n, dimension in enumerate(broadcast_dimensions):
        along[dimension] = x.shape[n]
    return np.broadcast_to(np.reshape(x, along), shape)


@_rule
def _reshape(x: Any, *, new_sizes: Any, dimensions: Any, **_: Any) -> Any:
    return np.reshape(x if dimensions is None else np.transpose(x, dimensions), new_sizes)


@_rule
def _squeeze(x: Any, *, dimensions: Any, **_: Any) -> Any:
    return np.squeeze(x, tuple(dimensions))


@_rule
def _transpose(x: Any, *, permutation: Any, **_: Any) -> Any:
    return np.transpose(x, permutation)


@_rule
def _rev(x: Any, *, dimensions: Any, **_: Any) -> Any:
    return np.flip(x, tuple(dimensions))


@_rule
def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> Any:
    steps = strides or [1] * len(start_indices)
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


@_rule
def _concatenate(*values: Any, dimension: int, **_: Any) -> Any:
    return np.concatenate(values, dimension)


@_rule
def _split(x: Any, *, sizes: Any, axis: int, **_: Any) -> Any:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@_rule
def _stack(*values: Any, axis: int, **_: Any) -> Any:
    return np.stack(values, axis)


@_rule
def _unstack(x: Any, *, axis: int, **_: Any) -> Any:
    return list(np.moveaxis(x, axis, 0))


@_rule
def _pad(x: Any, fill: Any, *, padding_config: Any, **_: Any) -> Any:
    for axis, (low, high, between) in enumerate(padding_config):
        x = np.moveaxis(x, axis, 0)
        spread = np.full((len(x) + max(len(x) - 1, 0) * between, *x.shape[1:]), fill, x.dtype)
        spread[:: between + 1] = x
        spread = spread[max(-low, 0) : len(spread) - max(-high, 0)]
        edges = [np.full((max(n, 0), *x.shape[1:]), fill, x.dtype) for n in (low, high)]
        x = np.moveaxis(np.concatenate([edges[0], spread, edges[1]]), 0, axis)
    return x


# ---- sums and products


def _reduction(function: Callable) -> Callable:
    # NumPy adds up small integers in 64 bits
    return lambda x, *, axes, **_: function(x, axis=tuple(axes)).astype(x.dtype)


def _running(function: np.ufunc) -> Callable:
    def run(x: Any, *, axis: int, reverse: bool, **_: Any) -> Any:
        ordered = np.flip(x, axis) if reverse else x
        made = function.accumulate(ordered, axis, dtype=x.dtype)
        return np.flip(made, axis) if reverse else made

    return run


_REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "and": np.all, "or": np.any}  # fmt: skip
RULES.update({f"reduce_{name}": _reduction(function) for name, function in _REDUCTIONS.items()})
RULES.update(cumsum=_running(np.add), cumprod=_running(np.multiply), cummax=_running(np.maximum))


@_rule
def _dot_general(a: Any, b: Any, *, dimension_numbers: Any, **_: Any) -> Any:
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    letters = iter(ascii_letters)
    of_a = [next(letters) for _ in range(a.ndim)]
    of_b = [next(letters) for _ in range(b.ndim)]
    for n, m in (*zip(a_sum, b_sum, strict=True), *zip(a_batch, b_batch, strict=True)):
        of_b[m] = of_a[n]
    out = [of_a[n] for n in a_batch]
    out += [c for n, c in enumerate(of_a) if n not in a_sum and n not in a_batch]
    out += [c for n, c in enumerate(of_b) if n not in b_sum and n not in b_batch]
    return np.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(out)}", a, b)


# ---- jaxprs within


def _inner(name: str) -> Callable:
    return lambda *values, **params: evaluate(params[name], values)


RULES.update(jit=_inner("jaxpr"), pjit=_inner("jaxpr"))
RULES.update({name: _inner("call_jaxpr") for name in ("custom_jvp_call", "custom_vjp_call")})


@_rule
def _cond(which: Any, *values: Any, branches: Any, **_: Any) -> Any:
    return evaluate(branches[min(max(int(which), 0), len(branches) - 1)], values)


@_rule
def _scan(
    *values: Any, jaxpr: Any, length: int, reverse: bool, num_consts: int, num_carry: int, **_: Any
) -> Any:
    given = num_consts + num_carry
    consts, carry, columns = values[:num_consts], values[num_consts:given], values[given:]
    rows = []
    for t in reversed(range(length)) if reverse else range(length):
        made = evaluate(jaxpr, [*consts, *carry, *(column[t] for column in columns)])
        carry = made[:num_carry]
        rows.append(made[num_carry:])
    rows = rows[::-1] if reverse else rows
    return [*carry, *map(np.stack, zip(*rows, strict=True))]
