"""Complex numbers as two real arrays, and the functions of complex analysis in those terms.

A derivative of such code is a derivative by real numbers, so nothing has to be holomorphic. Each
function has torch's value, and torch's derivative where that is a matter of choice: `abs` and
`angle` have derivative 0 at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax


class Pair(NamedTuple):
    """`re + i·im`; `im` is None for a complex value that is known to be real, so that products with
    it cost half.
    """

    re: Any
    im: Any


def scalar(value: float, like: Any) -> np.ndarray:
    """Make a literal of the dtype of an array."""
    return np.asarray(value, like.dtype)


def fill(value: float, like: Any) -> Any:
    """Make a constant array with the shape and dtype of an array."""
    return lax.full(np.shape(like), scalar(value, like), like.dtype)


def full(z: Pair) -> Pair:
    """Return a pair whose imaginary part is an array, zeros if there was none."""
    return z if z.im is not None else Pair(z.re, fill(0, z.re))


def split(value: Any) -> Pair:
    """Take a complex array apart; a constant without imaginary part counts as real."""
    if isinstance(value, (np.ndarray, np.generic)):
        imaginary = np.asarray(value).imag
        return Pair(
            np.array(np.asarray(value).real), np.array(imaginary) if imaginary.any() else None
        )
    return Pair(lax.real(value), lax.imag(value))


def join(z: Pair) -> Any:
    """Return the complex array."""
    return lax.complex(*full(z))


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Choose between real arrays; numbers are spread."""
    shape = np.shape(condition)
    yes, no = (x if np.shape(x) == shape else lax.full(shape, x, x.dtype) for x in (yes, no))
    return lax.select_n(condition, no, yes)


def select_pair(condition: Any, yes: Pair, no: Pair) -> Pair:
    """Choose between pairs."""
    yes, no = full(yes), full(no)
    return Pair(select(condition, yes.re, no.re), select(condition, yes.im, no.im))


# ---- arithmetic


def add(a: Pair, b: Pair) -> Pair:
    """`a + b`."""
    im = a.im if b.im is None else b.im if a.im is None else lax.add(a.im, b.im)
    return Pair(lax.add(a.re, b.re), im)


def neg(z: Pair) -> Pair:
    """`-z`."""
    return Pair(lax.neg(z.re), None if z.im is None else lax.neg(z.im))


def sub(a: Pair, b: Pair) -> Pair:
    """`a - b`."""
    if b.im is None:
        return Pair(lax.sub(a.re, b.re), a.im)
    return Pair(lax.sub(a.re, b.re), lax.neg(b.im) if a.im is None else lax.sub(a.im, b.im))


def conj(z: Pair) -> Pair:
    """The conjugate."""
    return Pair(z.re, None if z.im is None else lax.neg(z.im))


def product(op: Callable[[Any, Any], Any], a: Pair, b: Pair) -> Pair:
    """Apply a bilinear operation of real arrays to complex ones; four real products, or two if one
    factor is real.
    """
    re = op(a.re, b.re)
    if a.im is None or b.im is None:
        one_real = (
            op(a.im, b.re) if a.im is not None else op(a.re, b.im) if b.im is not None else None
        )
        return Pair(re, one_real)
    return Pair(lax.sub(re, op(a.im, b.im)), lax.add(op(a.re, b.im), op(a.im, b.re)))


def mul(a: Pair, b: Pair) -> Pair:
    """`a * b`, element by element."""
    return product(lax.mul, a, b)


def scaled(z: Pair, factor: float) -> Pair:
    """A real multiple."""
    return Pair(
        lax.mul(z.re, scalar(factor, z.re)),
        None if z.im is None else lax.mul(z.im, scalar(factor, z.im)),
    )


def times_i(z: Pair) -> Pair:
    """`i * z`."""
    z = full(z)
    return Pair(lax.neg(z.im), z.re)


def _size(z: Pair) -> Any:
    """The larger part's size as a constant, 1 for 0 and infinity: divided by it, squares neither
    overflow nor vanish.
    """
    size = lax.stop_gradient(lax.max(lax.abs(z.re), lax.abs(z.im)))
    usable = lax.bitwise_and(lax.gt(size, scalar(0, size)), lax.is_finite(size))
    return select(usable, size, scalar(1, size))


def div(a: Pair, b: Pair) -> Pair:
    """`a / b`."""
    if b.im is None:
        return Pair(lax.div(a.re, b.re), None if a.im is None else lax.div(a.im, b.re))
    size = _size(b)
    b = Pair(lax.div(b.re, size), lax.div(b.im, size))
    square = lax.mul(lax.add(lax.mul(b.re, b.re), lax.mul(b.im, b.im)), size)
    top = full(mul(a, conj(b)))
    return Pair(lax.div(top.re, square), lax.div(top.im, square))


def absolute(z: Pair) -> Any:
    """`|z|`, with derivative 0 at 0."""
    z = full(z)
    size = _size(z)
    re, im = lax.div(z.re, size), lax.div(z.im, size)
    square = lax.add(lax.mul(re, re), lax.mul(im, im))
    zero = lax.eq(square, scalar(0, square))
    return select(
        zero, fill(0, square), lax.mul(lax.sqrt(select(zero, scalar(1, square), square)), size)
    )


def angle(z: Pair) -> Any:
    """The angle in (-pi, pi], with derivative 0 at 0."""
    z = full(z)
    zero = is_zero(z)
    return lax.atan2(select(zero, scalar(0, z.im), z.im), select(zero, scalar(1, z.re), z.re))


def is_zero(z: Pair) -> Any:
    """Return whether each entry is 0."""
    real = lax.eq(z.re, scalar(0, z.re))
    return real if z.im is None else lax.bitwise_and(real, lax.eq(z.im, scalar(0, z.im)))


def sign(z: Pair) -> Pair:
    """`z / |z|`, and 0 at 0."""
    size = absolute(z)
    zero = lax.eq(size, scalar(0, size))
    size = select(zero, scalar(1, size), size)
    return Pair(*(None if x is None else select(zero, scalar(0, x), lax.div(x, size)) for x in z))


# ---- functions


def polar(size: Any, turn: Any) -> Pair:
    """`size * exp(i * turn)`."""
    return Pair(lax.mul(size, lax.cos(turn)), lax.mul(size, lax.sin(turn)))


def exp(z: Pair) -> Pair:
    """`e ** z`."""
    return Pair(lax.exp(z.re), None) if z.im is None else polar(lax.exp(z.re), z.im)


def exp2(z: Pair) -> Pair:
    """`2 ** z`."""
    return exp(scaled(z, math.log(2)))


def expm1(z: Pair) -> Pair:
    """`e ** z - 1`, accurate near 0."""
    if z.im is None:
        return Pair(lax.expm1(z.re), None)
    half = lax.sin(lax.mul(z.im, scalar(0.5, z.im)))
    shrunk = lax.mul(lax.mul(half, half), scalar(2, half))
    return Pair(
        lax.sub(lax.mul(lax.expm1(z.re), lax.cos(z.im)), shrunk),
        lax.mul(lax.exp(z.re), lax.sin(z.im)),
    )


def log(z: Pair) -> Pair:
    """The principal logarithm."""
    return Pair(lax.log(absolute(z)), angle(z))


def log1p(z: Pair) -> Pair:
    """`log(1 + z)`, accurate near 0."""
    z = full(z)
    square = lax.add(lax.mul(z.re, lax.add(z.re, scalar(2, z.re))), lax.mul(z.im, z.im))
    near = lax.mul(lax.log1p(square), scalar(0.5, square))
    shifted = Pair(lax.add(z.re, scalar(1, z.re)), z.im)
    # For large z the square overflows, and for 1 + z near 0 the sum under the logarithm cancels.
    close = lax.lt(lax.stop_gradient(absolute(z)), scalar(0.5, square))
    far = lax.log(absolute(shifted))
    return Pair(select(close, near, far), angle(shifted))


def sqrt(z: Pair) -> Pair:
    """The root in the right half plane."""
    size = absolute(z)
    zero = lax.eq(size, scalar(0, size))
    root = select(zero, size, lax.sqrt(select(zero, scalar(1, size), size)))
    return polar(root, lax.mul(angle(z), scalar(0.5, size)))


def reciprocal(z: Pair) -> Pair:
    """`1 / z`."""
    return div(Pair(fill(1, z.re), None), z)


def power(z: Pair, exponent: Pair) -> Pair:
    """`z ** exponent`, principal value; 0 to the power 0 is 1."""
    z, exponent = full(z), full(exponent)
    zero = is_zero(z)
    safe = Pair(select(zero, scalar(1, z.re), z.re), z.im)
    at_zero = Pair(select(is_zero(exponent), scalar(1, z.re), fill(0, z.re)), None)
    first = is_zero(Pair(lax.sub(exponent.re, scalar(1, z.re)), exponent.im))
    return select_pair(zero, select_pair(first, z, at_zero), exp(mul(exponent, log(safe))))


def integer_power(z: Pair, exponent: int) -> Pair:
    """`z ** n` by repeated squaring."""
    if exponent < 0:
        return reciprocal(integer_power(z, -exponent))
    result, square = Pair(fill(1, z.re), None), z
    first = True
    while exponent:
        if exponent & 1:
            result, first = square if first else mul(result, square), False
        exponent >>= 1
        square = mul(square, square) if exponent else square
    return result


def sinh(z: Pair) -> Pair:
    """Hyperbolic sine."""
    z = full(z)
    return Pair(lax.mul(lax.sinh(z.re), lax.cos(z.im)), lax.mul(lax.cosh(z.re), lax.sin(z.im)))


def cosh(z: Pair) -> Pair:
    """Hyperbolic cosine."""
    z = full(z)
    return Pair(lax.mul(lax.cosh(z.re), lax.cos(z.im)), lax.mul(lax.sinh(z.re), lax.sin(z.im)))


def tanh(z: Pair) -> Pair:
    """Hyperbolic tangent, without the exponentials that overflow."""
    z = full(z)
    t, c, s = lax.tanh(z.re), lax.cos(z.im), lax.sin(z.im)
    t2 = lax.mul(t, t)
    bottom = lax.add(lax.mul(c, c), lax.mul(t2, lax.mul(s, s)))
    return Pair(
        lax.div(t, bottom), lax.div(lax.mul(lax.mul(s, c), lax.sub(scalar(1, t2), t2)), bottom)
    )


def logistic(z: Pair) -> Pair:
    """`1 / (1 + exp(-z))`."""
    half = scaled(tanh(scaled(z, 0.5)), 0.5)
    return Pair(lax.add(half.re, scalar(0.5, half.re)), half.im)


def asinh(z: Pair) -> Pair:
    """Inverse hyperbolic sine; odd, and computed where the sum under the logarithm does not cancel."""
    z = full(z)
    flip = select(lax.lt(z.re, scalar(0, z.re)), fill(-1, z.re), fill(1, z.re))
    w = Pair(lax.mul(z.re, flip), lax.mul(z.im, flip))
    one = Pair(fill(1, z.re), None)
    root = mul(sqrt(add(one, times_i(w))), sqrt(sub(one, times_i(w))))
    result = log(add(w, root))
    return Pair(lax.mul(result.re, flip), lax.mul(result.im, flip))


def atanh(z: Pair) -> Pair:
    """Inverse hyperbolic tangent."""
    return scaled(sub(log1p(z), log1p(neg(z))), 0.5)


def acosh(z: Pair) -> Pair:
    """Inverse hyperbolic cosine."""
    one = Pair(fill(1, z.re), None)
    return log(add(z, mul(sqrt(add(z, one)), sqrt(sub(z, one)))))


def turned(function: Callable[[Pair], Pair]) -> Callable[[Pair], Pair]:
    """`-i f(i z)`: the trigonometric twin of a hyperbolic function."""
    return lambda z: neg(times_i(function(times_i(z))))


def cos(z: Pair) -> Pair:
    """Cosine."""
    return cosh(times_i(z))


def acos(z: Pair) -> Pair:
    """Inverse cosine."""
    arc = turned(asinh)(z)
    return Pair(lax.sub(scalar(math.pi / 2, arc.re), arc.re), lax.neg(arc.im))


sin, tan, asin, atan = turned(sinh), turned(tanh), turned(asinh), turned(atanh)


# ---- products and sums of products over an axis


def cumulative_product(z: Pair, axis: int, reverse: bool) -> Pair:
    """Running product along an axis."""
    return Pair(
        *lax.associative_scan(
            lambda a, b: tuple(mul(Pair(*a), Pair(*b))), tuple(full(z)), reverse=reverse, axis=axis
        )
    )


def product_over(z: Pair, axes: tuple[int, ...]) -> Pair:
    """The product over some axes."""
    z = full(z)
    for axis in sorted(axes, reverse=True):
        n = z.re.shape[axis]
        if n == 0:
            shape = tuple(np.delete(z.re.shape, axis))
            z = Pair(*(lax.full(shape, value, z.re.dtype) for value in (1, 0)))
            continue
        parts = [Pair(*(lax.index_in_dim(x, k, axis, keepdims=False) for x in z)) for k in range(n)]
        while len(parts) > 1:
            rest = parts[-1:] if len(parts) % 2 else []
            parts = [mul(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + rest
        z = full(parts[0])
    return z


def stack(z: Pair) -> jax.Array:
    """One real array with real and imaginary part along a new last axis, as `torch.view_as_real`
    gives it.
    """
    shape = (*z.re.shape, 1)
    return lax.concatenate([lax.reshape(x, shape) for x in full(z)], len(shape) - 1)


def unstack(array: jax.Array) -> Pair:
    """The way back."""
    return Pair(*(lax.index_in_dim(array, k, array.ndim - 1, keepdims=False) for k in (0, 1)))
