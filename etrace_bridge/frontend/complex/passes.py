"""The pass that makes every complex value of a traced step two real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    bind_equation,
    called_jaxpr,
    keep_source,
)
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.complex import pairs
from etrace_bridge.frontend.complex.pairs import Pair
from etrace_bridge.frontend.locate import equation_line

Rule = Callable[..., Any]
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_lin")


def is_complex(value: Any) -> bool:
    """Return whether an array, a variable's abstract value or a shape is complex."""
    return jnp.issubdtype(value.dtype, jnp.complexfloating)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of the two parts of a complex dtype, any other dtype as it is."""
    return np.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def real_shape(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of the real array that stands for a complex one: a last axis of real and
    imaginary part.
    """
    if not is_complex(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct((*aval.shape, 2), real_dtype(aval.dtype))


def split_complex(
    closed: ClosedJaxpr, real_inputs: Sequence[bool], real_outputs: Sequence[bool]
) -> ClosedJaxpr:
    """Rewrite a jaxpr so that it computes with real numbers only.

    Args:
        closed: The jaxpr; one without complex values is returned as it is.
        real_inputs: For each input, whether a complex one is given as a real array with a last axis
            of 2. The others stay complex and are taken apart where they come in.
        real_outputs: The same for outputs.
    """
    if not _has_complex(closed.jaxpr):
        return closed

    def run(*values: Any) -> list[Any]:
        operands = [
            v if not is_complex(var.aval) else pairs.unstack(v) if real else pairs.split(v)
            for var, v, real in zip(closed.jaxpr.invars, values, real_inputs, strict=True)
        ]
        given = {id(o): v for o, v, real in zip(operands, values, real_inputs, strict=True) if real}
        results = _evaluate(closed, operands)
        return [
            v
            if not isinstance(v, Pair)
            else given[id(v)]
            if real and id(v) in given
            else pairs.stack(v)
            if real
            else pairs.join(v)
            for v, real in zip(results, real_outputs, strict=True)
        ]

    shapes = [
        real_shape(v.aval) if real else jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v, real in zip(closed.jaxpr.invars, real_inputs, strict=True)
    ]
    return jax.make_jaxpr(run)(*shapes)


def split_into_parts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite a jaxpr so that each complex input and output is two real ones, one after the other."""

    def run(*parts: Any) -> list[Any]:
        return _flat(_evaluate(closed, _paired(parts, closed.jaxpr.invars)))

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(run)(*part_shapes(shapes))


def part_shapes(shapes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the parts of some values."""
    return [
        jax.ShapeDtypeStruct(s.shape, real_dtype(s.dtype))
        for s in shapes
        for _ in range(1 + is_complex(s))
    ]


def to_parts(values: Sequence[Any]) -> list[Any]:
    """Take complex values apart; real ones stay."""
    return _flat([pairs.split(v) if is_complex(v) else v for v in values])


def from_parts(parts: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Join the parts of values of these shapes and dtypes."""
    waiting = iter(parts)
    return [
        pairs.join(Pair(next(waiting), next(waiting))) if is_complex(s) else next(waiting)
        for s in shapes
    ]


def _flat(values: Sequence[Any]) -> list[Any]:
    return [part for v in values for part in (pairs.full(v) if isinstance(v, Pair) else (v,))]


def _paired(parts: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    waiting = iter(parts)
    return [
        Pair(next(waiting), next(waiting)) if is_complex(v.aval) else next(waiting)
        for v in variables
    ]


def _has_complex(jaxpr: Jaxpr) -> bool:
    variables = [
        *jaxpr.invars,
        *jaxpr.constvars,
        *jaxpr.outvars,
        *(v for e in jaxpr.eqns for v in (*e.invars, *e.outvars)),
    ]
    return any(_is_array(v) and is_complex(v.aval) for v in variables) or any(
        _has_complex(j) for e in jaxpr.eqns for j in _inside(e)
    )


def _is_array(variable: Any) -> bool:
    return hasattr(variable.aval, "dtype")


def _inside(eqn: JaxprEqn) -> list[Jaxpr]:
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _evaluate(
    closed: ClosedJaxpr, operands: Sequence[Any], call: JaxprEqn | None = None
) -> list[Any]:
    """Run a jaxpr in which complex values are pairs; `call` is the outermost equation whose body it
    is.

    The body of a jitted library function knows the line that called it first, in whatever model;
    `call` has the line of this one.
    """
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    env.update((v, _constant(c)) for v, c in zip(jaxpr.constvars, closed.consts, strict=True))

    def read(v: Any) -> Any:
        return _constant(v.val) if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        with keep_source(eqn):
            env.update(
                zip(
                    eqn.outvars,
                    _apply(eqn, [read(v) for v in eqn.invars], call or eqn),
                    strict=True,
                )
            )
    return [read(v) for v in jaxpr.outvars]


def _constant(value: Any) -> Any:
    return (
        pairs.split(np.asarray(value)) if hasattr(value, "dtype") and is_complex(value) else value
    )


def _apply(eqn: JaxprEqn, operands: list[Any], call: JaxprEqn) -> list[Any]:
    inside = any(_has_complex(j) for j in _inside(eqn))
    if not inside and not any(
        _is_array(v) and is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars)
    ):
        return bind_equation(eqn, operands)
    name = eqn.primitive.name
    if name in _CALLS:
        return _evaluate(called_jaxpr(eqn), operands, call)
    rule = _RULES.get(name)
    if rule is None:
        raise messages.complex_op(name, equation_line(call))
    result = rule(eqn, *operands)
    return list(result) if eqn.primitive.multiple_results else [result]


# ---- rules by kind


def _real_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The equation's parameters with complex dtypes made real."""
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    for key in ("new_dtype", "dtype", "preferred_element_type"):
        if params.get(key) is not None:
            params[key] = real_dtype(params[key])
    return params


def _linear(eqn: JaxprEqn, *operands: Any) -> Any:
    """An equation that treats real and imaginary parts alike: once for each."""
    params, primitive = _real_params(eqn), eqn.primitive
    real = primitive.bind(*(v.re if isinstance(v, Pair) else v for v in operands), **params)
    several = primitive.multiple_results
    if all(v.im is None for v in operands if isinstance(v, Pair)):
        return [Pair(re, None) for re in real] if several else Pair(real, None)
    imaginary = primitive.bind(
        *(pairs.full(v).im if isinstance(v, Pair) else v for v in operands), **params
    )
    if several:
        return [Pair(re, im) for re, im in zip(real, imaginary, strict=True)]
    return Pair(real, imaginary)


def _bilinear(eqn: JaxprEqn, a: Pair, b: Pair) -> Pair:
    params = _real_params(eqn)
    return pairs.product(lambda x, y: eqn.primitive.bind(x, y, **params), a, b)


def _convert(eqn: JaxprEqn, value: Any) -> Any:
    if not isinstance(value, Pair):
        return Pair(lax.convert_element_type(value, real_dtype(eqn.params["new_dtype"])), None)
    if not jnp.issubdtype(eqn.params["new_dtype"], jnp.complexfloating):
        return lax.convert_element_type(value.re, eqn.params["new_dtype"])
    return _linear(eqn, value)


def _scatter(function: Callable) -> Rule:
    """Scatters keep a jaxpr of their update for one dtype, so they are made anew."""

    def rule(eqn: JaxprEqn, *operands: Any) -> Pair:
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        options = {name: eqn.params[name] for name in names}
        target, indices, updates = operands
        target, updates = pairs.full(target), pairs.full(updates)
        return Pair(
            *(function(t, indices, u, **options) for t, u in zip(target, updates, strict=True))
        )

    return rule


def _equal(eqn: JaxprEqn, a: Pair, b: Pair) -> Any:
    a, b = pairs.full(a), pairs.full(b)
    return lax.bitwise_and(lax.eq(a.re, b.re), lax.eq(a.im, b.im))


def _unequal(eqn: JaxprEqn, a: Pair, b: Pair) -> Any:
    a, b = pairs.full(a), pairs.full(b)
    return lax.bitwise_or(lax.ne(a.re, b.re), lax.ne(a.im, b.im))


def _conjugate(eqn: JaxprEqn, value: Any) -> Pair:
    return pairs.conj(value) if isinstance(value, Pair) else Pair(value, None)


def _function(function: Callable) -> Rule:
    def rule(eqn: JaxprEqn, *operands: Any) -> Any:
        return function(*(_spread(v, eqn.outvars[0].aval.shape) for v in operands))

    return rule


def _spread(value: Any, shape: tuple[int, ...]) -> Any:
    """Give a literal, which equations may hold beside an array, the array's shape."""
    if isinstance(value, Pair):
        return Pair(*(None if part is None else _spread(part, shape) for part in value))
    return value if np.shape(value) == shape else lax.broadcast_in_dim(value, shape, ())


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        """
        add_any broadcast_in_dim reshape transpose slice concatenate stack pad dynamic_slice dynamic_update_slice
        gather rev squeeze expand_dims split copy copy_p stop_gradient reduce_sum cumsum select_n reduce_window_sum
        optimization_barrier name
        """.split(),
        _linear,
    ),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), _bilinear),
    **{
        name: _function(getattr(pairs, name))
        for name in """
        add sub neg div exp exp2 expm1 log log1p sqrt logistic sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh sign
        """.split()
    },
    "real": _function(lambda z: z.re),
    "imag": _function(lambda z: pairs.full(z).im),
    "complex": _function(Pair),
    "conj": _conjugate,
    "abs": _function(pairs.absolute),
    "pow": lambda eqn, z, e: pairs.power(
        z, e if isinstance(e, Pair) else Pair(lax.convert_element_type(e, z.re.dtype), None)
    ),
    "integer_pow": lambda eqn, z: pairs.integer_power(z, eqn.params["y"]),
    "square": _function(lambda z: pairs.mul(z, z)),
    "rsqrt": _function(lambda z: pairs.reciprocal(pairs.sqrt(z))),
    "eq": _equal,
    "ne": _unequal,
    "convert_element_type": _convert,
    "scatter": _scatter(lax.scatter),
    "scatter-add": _scatter(lax.scatter_add),
    "scatter_add": _scatter(lax.scatter_add),
    "cumprod": lambda eqn, z: pairs.cumulative_product(
        z, eqn.params["axis"], eqn.params["reverse"]
    ),
    "reduce_prod": lambda eqn, z: pairs.product_over(z, tuple(eqn.params["axes"])),
}
