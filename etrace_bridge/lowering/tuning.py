"""The interface between the engine and a backend; the base class is plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from etrace_bridge._jax_compat import JaxprEqn, Var, bind_equation
from etrace_bridge.compiler.contacts import ContactForm

Bind = Callable[[JaxprEqn, list[Any]], list[Any]]  # runs an equation on the values of its operands


@dataclass(frozen=True)
class Tuning:
    """How the engine's programs are laid out for a backend.

    Attributes:
        block_bytes: the least size of one block's working buffers, which are fast to write and read
            again.
        block_rows: the least number of rows (batch times steps) of a product in a block.
        whole_bytes: a chunk with buffers up to this size is one block.
    """

    block_bytes: int = 2**26
    block_rows: int = 4096
    whole_bytes: int = 2**28

    def bind(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Run an equation outside of loops."""
        return bind_equation(eqn, operands)

    def is_patch_product(self, eqn: JaxprEqn) -> bool:
        """Return whether a convolution runs as a product of patches and kernel."""
        return False

    def before_loops(self, eqns: Sequence[JaxprEqn], env: dict[Var, Any]) -> dict[Any, Any]:
        """Return values to make before loops over time, from those of the weight tier."""
        return {}

    def bind_in_loop(self, env: dict[Any, Any], length: int) -> Bind:
        """Return how equations run inside a loop over time.

        Args:
            env: values from outside the loop, those of `before_loops` among them or not.
            length: how often the loop runs.
        """
        return self.bind

    def gradient_letters(self, form: ContactForm) -> str:
        """Return a view's letters in the order in which its gradient is added up over time."""
        return form.view

    def finish_gradient(self, gradient: Any, steps: int) -> Any:
        """Return a gradient over `steps` steps before its letters are brought to the view's order."""
        return gradient

    def reads_by_row(self, elements: int) -> bool:
        """Return whether traces of so many elements are read one batch element after the other."""
        return False

    def computed_once(self, arrays: Any) -> Any:
        """Return arrays that several parts of a program read, to be computed only once."""
        return arrays

    def inner_products(self, x: Any, y: Any, lead: int) -> Any:
        """`x * y`, summed over all axes but the first `lead`."""
        return jnp.sum(x * y, tuple(range(lead, x.ndim)))

    def any_not_finite(self, arrays: Sequence[Any]) -> Any:
        """Return whether any element of any array is NaN or infinite."""
        return jnp.any(jnp.stack([jnp.any(~jnp.isfinite(x)) for x in arrays]))

    def order_after(self, flag: Any, arrays: Sequence[Any]) -> Any:
        """Return `flag` so that it is known only after the arrays."""
        return flag
