"""Imports brainstate with care: it turns JAX's 64-bit mode off, also where the user has turned it
on.
"""

import jax

_x64 = jax.config.jax_enable_x64
import brainstate

if _x64 and not jax.config.jax_enable_x64:
    brainstate.environ.set(precision=64)
