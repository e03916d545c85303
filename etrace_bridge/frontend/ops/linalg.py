"""Products of matrices and tensors, as bare `dot_general` equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.arrays import axis, expand_to, is_float, scalar
from etrace_bridge.frontend.ops.dtypes import cast, dtype_of, result_type
from etrace_bridge.frontend.ops.elementwise import add, mul, sub
from etrace_bridge.frontend.ops.joining import roll
from etrace_bridge.frontend.ops.reductions import vector_norm
from etrace_bridge.frontend.ops.registry import implements
from etrace_bridge.frontend.ops.shape import diagonal, reshape, transpose_to


def contract(
    a: Any,
    b: Any,
    over: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Any:
    """One `dot_general`; booleans have no product in torch, integers do."""
    return lax.dot_general(
        a, b, ((tuple(over[0]), tuple(over[1])), (tuple(batch[0]), tuple(batch[1])))
    )


# ---- matrix products


@implements("matmul", "linalg_matmul")
def matmul(input: Any, other: Any) -> Any:
    """Matrix product; vectors count as a row or a column, leading dimensions are broadcast."""
    m, n = np.ndim(input), np.ndim(other)
    if n <= 2:
        return contract(input, other, ((m - 1,), (0,)))
    if m == 1:
        return contract(input, other, ((0,), (n - 2,)))
    if m == 2:  # the rows come out in front
        product = contract(input, other, ((1,), (n - 2,)))
        return transpose_to(product, [*range(1, n - 1), 0, n - 1])
    outer = np.broadcast_shapes(np.shape(input)[:-2], np.shape(other)[:-2])
    a = expand_to(input, (*outer, *np.shape(input)[-2:]))
    b = expand_to(other, (*outer, *np.shape(other)[-2:]))
    k = len(outer)
    return contract(a, b, ((k + 1,), (k,)), (range(k), range(k)))


implements("rmatmul")(lambda input, other: matmul(other, input))
implements("mm")(lambda input, mat2: matmul(input, mat2))
implements("bmm")(lambda input, mat2: matmul(input, mat2))
implements("mv")(lambda input, vec: matmul(input, vec))
implements("dot")(lambda input, tensor: matmul(input, tensor))
implements("vdot")(
    lambda input, other: matmul(lax.conj(input) if np.iscomplexobj(input) else input, other)
)
implements("inner")(lambda input, other: inner(input, other))


def inner(a: Any, b: Any) -> Any:
    """Contract the last dimensions; with a 0-dim tensor, the plain product."""
    if not np.ndim(a) or not np.ndim(b):
        return mul(a, b)
    return contract(a, b, ((np.ndim(a) - 1,), (np.ndim(b) - 1,)))


@implements("outer", "ger")
def outer(input: Any, vec2: Any) -> Any:
    """All products of the entries of two vectors."""
    return mul(lax.expand_dims(input, (1,)), lax.expand_dims(vec2, (0,)))


@implements("linear")
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """`input @ weight.T + bias`, the transpose left to `dot_general`."""
    product = contract(input, weight, ((np.ndim(input) - 1,), (np.ndim(weight) - 1,)))
    return product if bias is None else lax.add(product, expand_to(bias, np.shape(product)))


@implements("bilinear")
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """`input1 @ weight[o] @ input2` for every output o."""
    product = einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else lax.add(product, expand_to(bias, np.shape(product)))


def _plus(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """`beta * input + alpha * product`; with beta 0 the input does not count, not even its nan."""
    product = product if alpha == 1 else lax.mul(product, scalar(alpha, product))
    if beta == 0:
        return product
    return add(product, input if beta == 1 else lax.mul(input, scalar(beta, input)))


@implements("addmm")
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * input + alpha * mat1 @ mat2`."""
    return _plus(input, matmul(mat1, mat2), beta, alpha)


@implements("addmv")
def addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * input + alpha * mat @ vec`."""
    return _plus(input, matmul(mat, vec), beta, alpha)


@implements("baddbmm")
def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * input + alpha * batch1 @ batch2`."""
    return _plus(input, matmul(batch1, batch2), beta, alpha)


@implements("addbmm")
def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * input + alpha * (batch1 @ batch2).sum(0)`."""
    return _plus(input, einsum("bij,bjk->ik", batch1, batch2), beta, alpha)


@implements("addr")
def addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * input + alpha * outer(vec1, vec2)`."""
    product = outer(vec1, vec2)
    dtype = result_type(input, product)
    if (
        not is_float(cast(product, dtype))
        and dtype_of(product).is_floating_point is False
        and product.dtype == np.bool_
    ):
        return add(input, product) if beta else product
    return cast(_plus(input, cast(product, dtype), beta, alpha), dtype)


@implements("chain_matmul", "linalg_multi_dot")
def chain_matmul(*matrices: Any) -> Any:
    """Product of several matrices, from left to right."""
    matrices = (
        tuple(matrices[0])
        if len(matrices) == 1 and isinstance(matrices[0], (tuple, list))
        else matrices
    )
    result = matrices[0]
    for matrix in matrices[1:]:
        result = matmul(result, matrix)
    return result


@implements("tensordot")
def tensordot(a: Any, b: Any, dims: Any = 2, out: None = None) -> Any:
    """Contract several dimensions of two tensors."""
    if isinstance(dims, int):
        dims = (range(np.ndim(a) - dims, np.ndim(a)), range(dims))
    over = [[axis(d, np.ndim(x)) for d in which] for x, which in zip((a, b), dims, strict=True)]
    # A contracted dimension of size 1 meets any size: the other tensor is summed over it.
    for k, m in zip(*over, strict=True):
        if np.shape(a)[k] == 1 and np.shape(b)[m] != 1:
            b = lax.expand_dims(lax.reduce_sum(b, (m,)), (m,))
        elif np.shape(b)[m] == 1 and np.shape(a)[k] != 1:
            a = lax.expand_dims(lax.reduce_sum(a, (k,)), (k,))
    return contract(a, b, (over[0], over[1]))


@implements("kron")
def kron(input: Any, other: Any) -> Any:
    """Kronecker product."""
    ndim = max(np.ndim(input), np.ndim(other))
    a, b = ((1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (input, other))
    wide = mul(
        reshape(input, [s for n in a for s in (n, 1)]),
        reshape(other, [s for n in b for s in (1, n)]),
    )
    return reshape(wide, [m * n for m, n in zip(a, b, strict=True)])


@implements("linalg_vecdot")
def vecdot(input: Any, other: Any, *, dim: int = -1) -> Any:
    """Sum of products along one dimension."""
    product = mul(input, other)
    return lax.reduce_sum(product, (axis(dim, np.ndim(product)),))


@implements("cross", "linalg_cross")
def cross(input: Any, other: Any, dim: int | None = None) -> Any:
    """Vector product along a dimension of size 3."""
    shape = np.broadcast_shapes(np.shape(input), np.shape(other))
    a, b = expand_to(input, shape), expand_to(other, shape)
    d = axis(-1 if dim is None else dim, len(shape))
    return sub(mul(roll(a, -1, d), roll(b, -2, d)), mul(roll(a, -2, d), roll(b, -1, d)))


implements("linalg_cross")(lambda input, other, *, dim=-1: cross(input, other, dim))


# ---- einsum


@implements("einsum")
def einsum(*args: Any) -> Any:
    """Einstein's sum, two operands at a time from left to right, each pair one `dot_general`."""
    equation, operands = _read_einsum(args)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    rank = max(
        (
            np.ndim(x) - len(t.replace("...", ""))
            for t, x in zip(terms, operands, strict=True)
            if "..." in t
        ),
        default=0,
    )
    spare = list(map(chr, range(0x3B1, 0x3B1 + rank)))  # letters that no equation uses, for `...`
    terms = [_fill(t, spare, np.ndim(x)) for t, x in zip(terms, operands, strict=True)]
    if "->" in equation:
        target = right.replace("...", "".join(spare))
    else:
        letters = "".join(terms)
        target = "".join(spare) + "".join(
            sorted(c for c in set(letters) - set(spare) if letters.count(c) == 1)
        )
    values = [_take_diagonals(t, x) for t, x in zip(terms, operands, strict=True)]
    term, value = values[0]
    for k, (next_term, next_value) in enumerate(values[1:], 2):
        needed = set(target).union(*[t for t, _ in values[k:]])
        term, value = _contract_pair(term, value, next_term, next_value, needed)
    summed = [d for d, c in enumerate(term) if c not in target]
    value = lax.reduce_sum(value, tuple(summed)) if summed else value
    term = "".join(c for c in term if c in target)
    return transpose_to(value, [term.index(c) for c in target])


def _letters(sublist: Sequence[Any]) -> str:
    return "".join(
        "..." if i is Ellipsis else chr(ord("A") + i if i < 26 else ord("a") + i - 26)
        for i in sublist
    )


def _read_einsum(args: tuple) -> tuple[str, list[Any]]:
    """Read `(equation, *operands)` or the format with index lists, `(x, [0, 1], y, [1, 2], [0,
    2])`.
    """
    if isinstance(args[0], str):
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        return args[0], list(operands)
    pairs = len(args) // 2
    equation = ",".join(_letters(args[2 * k + 1]) for k in range(pairs))
    return equation + (f"->{_letters(args[-1])}" if len(args) % 2 else ""), [
        args[2 * k] for k in range(pairs)
    ]


def _fill(term: str, spare: list[str], ndim: int) -> str:
    return (
        term.replace("...", "".join(spare[len(spare) - (ndim - len(term.replace("...", ""))) :]))
        if "..." in term
        else term
    )


def _take_diagonals(term: str, x: Any) -> tuple[str, Any]:
    for letter in sorted(set(term), key=term.index):
        while term.count(letter) > 1:
            first, second = term.index(letter), term.rindex(letter)
            x = diagonal(x, 0, first, second)
            term = "".join(c for d, c in enumerate(term) if d not in (first, second)) + letter
    return term, x


def _contract_pair(term_a: str, a: Any, term_b: str, b: Any, needed: set[str]) -> tuple[str, Any]:
    """Contract two operands over the letters that nothing later needs; size-1 dimensions are
    broadcast.
    """
    a, b = (
        _match_sizes(term, x, other, y)
        for term, x, other, y in ((term_a, a, term_b, b), (term_b, b, term_a, a))
    )
    lone_a = [d for d, c in enumerate(term_a) if c not in term_b and c not in needed]
    lone_b = [d for d, c in enumerate(term_b) if c not in term_a and c not in needed]
    a = lax.reduce_sum(a, tuple(lone_a)) if lone_a else a
    term_a = "".join(c for d, c in enumerate(term_a) if d not in lone_a)
    b = lax.reduce_sum(b, tuple(lone_b)) if lone_b else b
    term_b = "".join(c for d, c in enumerate(term_b) if d not in lone_b)
    shared = [c for c in term_a if c in term_b]
    batch, over = [c for c in shared if c in needed], [c for c in shared if c not in needed]
    places = lambda letters: (
        [term_a.index(c) for c in letters],
        [term_b.index(c) for c in letters],
    )
    rest = [c for c in term_a if c not in shared] + [c for c in term_b if c not in shared]
    return "".join(batch + rest), contract(a, b, places(over), places(batch))


def _match_sizes(term: str, x: Any, other: str, y: Any) -> Any:
    shape = [
        np.shape(y)[other.index(c)] if c in other and n == 1 else n
        for c, n in zip(term, np.shape(x), strict=True)
    ]
    return expand_to(x, shape)


@implements("cdist")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """p-norm distances between the rows of two batches of matrices, with derivative 0 between equal
    rows.
    """
    a, b = lax.expand_dims(x1, (np.ndim(x1) - 1,)), lax.expand_dims(x2, (np.ndim(x2) - 2,))
    difference = sub(a, b)
    return vector_norm(difference, p, (difference.ndim - 1,))
