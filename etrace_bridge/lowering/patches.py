"""Convolutions as products of patches and kernel, for XLA's CPU compiler.

The compiler has a fast routine for convolutions in a program's outermost computation only. In a
loop over time, they and their derivatives run as plain nested loops, several times slower than the
same sum as a matrix product.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from etrace_bridge._jax_compat import JaxprEqn
from etrace_bridge.compiler.contacts import ContactForm, contact_form

PATCH_BYTES = (
    4 * 2**20
)  # of one step; from here on the patches, each a copy of a part of the data, cost more than they gain


def patch_form(eqn: JaxprEqn) -> ContactForm | None:
    """Return the form of a convolution that runs as a product; None for any other equation."""
    if eqn.primitive.name != "conv_general_dilated":
        return None
    form = contact_form(eqn, 1)
    if (
        form is None
        or math.prod(form.shape(form.feature)) * eqn.invars[0].aval.dtype.itemsize > PATCH_BYTES
    ):
        return None
    return form


def as_patch_product(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """Return the results of a convolution, as a product; None for any other equation."""
    form = patch_form(eqn)
    if form is None:
        return None
    x, kernel = operands
    terms = f"{form.view},{form.feature}->{form.out}"
    y = jnp.einsum(terms, kernel.reshape(form.shape(form.view)), form.features(x))
    out = eqn.outvars[0].aval
    return [y.reshape(out.shape).astype(out.dtype)]
