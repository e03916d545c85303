"""Convolutions as products of patches and kernel, on a CPU.

There XLA has a fast routine for convolutions in a program's outermost computation only. In a loop, and time is a loop, they run as
plain nested loops, several times slower than the same sum as a matrix product. So do their derivatives.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge._jax_compat import JaxprEqn
from etrace_bridge.compiler.contacts import ContactForm, contact_form

PATCH_BYTES = 4 * 2**20  # of one step; from here on the patches, each a copy of a part of the data, cost more than they gain


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a convolution that runs as a product."""
    return _form(eqn) is not None


def as_product(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """The results of a convolution, as a product; None for any other equation."""
    form = _form(eqn)
    if form is None or form.phi is None:
        return None
    x, kernel = operands
    patches = form.phi(x).reshape(form.shape(form.feature))
    y = jnp.einsum(f"{form.view},{form.feature}->{form.out}", kernel.reshape(form.shape(form.view)), patches)
    out = eqn.outvars[0].aval
    return [y.reshape(out.shape).astype(out.dtype)]


def _form(eqn: JaxprEqn) -> ContactForm | None:
    if eqn.primitive.name != "conv_general_dilated" or jax.default_backend() != "cpu":
        return None
    form = contact_form(eqn, 1)
    if form is None or math.prod(form.shape(form.feature)) * eqn.invars[0].aval.dtype.itemsize > PATCH_BYTES:
        return None
    return form
