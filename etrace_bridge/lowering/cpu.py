"""How programs are written for XLA's CPU compiler, and what it does badly otherwise.

- Products with torch's (out, in) weights in loops over time: `lowering.products`.
- Convolutions in loops: `lowering.patches`.
- A product writes its left factor transposed before it starts. A few gates' cotangents are wider
  than the features, so in a gradient the features are the left factor, and the sum over time is
  transposed once, at the end.
- A trace that is multiplied and summed at once is multiplied with a broadcast as large as itself,
  which is written to memory; so large traces are read one batch element after the other.
- A donated array that is read and replaced is copied first, unless its replacement depends on what
  was read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Var, bind_equation
from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.lowering.patches import as_patch_product, patch_form
from etrace_bridge.lowering.products import multiply_in_loop, transposed_weights
from etrace_bridge.lowering.tuning import Bind, Tuning

LOOP_ELEMENTS = 2**18  # of all traces, from which they are read one batch element after the other
PARTS = 4  # of products to be added up, at most
VECTOR = 2048  # elements of an array that is added up as it is


@dataclass(frozen=True)
class CPUTuning(Tuning):
    """The tuning for XLA's CPU compiler.

    The sizes are those of a CPU's caches, and of memory that is mapped anew in each run.
    """

    block_bytes: int = 3 * 2**20
    block_rows: int = 512
    whole_bytes: int = 24 * 2**20

    def bind(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return as_patch_product(eqn, operands) or bind_equation(eqn, operands)

    def is_patch_product(self, eqn: JaxprEqn) -> bool:
        return patch_form(eqn) is not None

    def before_loops(self, eqns: Sequence[JaxprEqn], env: dict[Var, Any]) -> dict[Any, Any]:
        return transposed_weights(eqns, env)

    def bind_in_loop(self, env: dict[Any, Any], length: int) -> Bind:
        def bind(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            return multiply_in_loop(eqn, operands, env, length) or self.bind(eqn, operands)

        return bind

    def gradient_letters(self, form: ContactForm) -> str:
        width = math.prod(form.sizes[letter] for letter in form.contracted)
        if not form.contracted or width**2 >= math.prod(form.shape(form.view)):
            return form.view
        return "".join(sorted(form.view, key=lambda letter: letter not in form.contracted))

    def finish_gradient(self, gradient: Any, steps: int) -> Any:
        # Without the barrier XLA takes the transpose that follows into the product. For one step
        # (and one row for its past) it should: there the gradient is best not written at all but
        # goes straight into the weight's update.
        return gradient if steps <= 2 else lax.optimization_barrier(gradient)

    def reads_by_row(self, elements: int) -> bool:
        return elements >= LOOP_ELEMENTS

    def computed_once(self, arrays: Any) -> Any:
        # XLA repeats cheap element-wise work in every kernel that reads it, across barriers too,
        # which are gone by then. A division counts as expensive, so it is not repeated; the barrier
        # hides that it is one by 1 until kernels are formed.
        def once(x: Any) -> Any:
            return x / lax.optimization_barrier(jnp.ones(x.shape, x.dtype))

        return lax.optimization_barrier(jax.tree.map(once, arrays))

    def inner_products(self, x: Any, y: Any, lead: int) -> Any:
        # XLA writes the products to memory and adds them up slowly. A few parts of them are added
        # as they are made; a product with a vector of ones adds up what is left.
        if x.ndim == lead:
            return x * y
        x, y = (a.reshape(*a.shape[:lead], -1) for a in (x, y))
        count = max(k for k in range(1, PARTS + 1) if x.shape[-1] % k == 0)
        parts = zip(jnp.split(x, count, -1), jnp.split(y, count, -1), strict=True)
        summed = sum(a * b for a, b in parts)
        return summed @ jnp.ones(summed.shape[-1], summed.dtype)

    def any_not_finite(self, arrays: Sequence[Any]) -> Any:
        """As the base class, in few operations.

        Everything is multiplied by zero, where 0 · inf and 0 · NaN are NaN, and added up: large
        arrays by a product with a vector of zeros, which is several times faster than a sum over
        the same numbers, and vectors of one length together.
        """
        vectors: dict[int, Any] = {}
        for x in map(_zeros_if_finite, arrays):
            vectors[x.size] = vectors.get(x.size, 0) + x
        return jnp.sum(jnp.concatenate(list(vectors.values()))) != 0

    def order_after(self, flag: Any, arrays: Sequence[Any]) -> Any:
        # A product is computed once. A sum would be repeated in every kernel that waits for the
        # flag, and the program's size would be quadratic in the number of layers.
        first = jnp.stack([x.reshape(-1)[0].astype(jnp.float32) for x in arrays])
        return flag & ~jnp.isnan(first @ jnp.zeros(first.shape, first.dtype))


def _zeros_if_finite(x: Any) -> Any:
    """Return a vector of zeros, or with NaN in it."""
    if x.size > VECTOR and x.ndim > 1:
        x = x.reshape(-1, x.shape[-1]) @ jnp.zeros(x.shape[-1], x.dtype)
    return (0 * x.reshape(-1)).astype(jnp.float32)
