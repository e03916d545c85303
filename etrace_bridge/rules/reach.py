"""How far an error of each hidden value reaches: the weights of low-rank RTRL's norm.

The best rank r in the plain norm keeps what is large now, but an error in a hidden value that
forgets at once does less harm than one in a value that remembers. To first order, and if errors of
different hidden values point into unrelated directions, the square of an error of value j enters
the square of the next step's error with the weights `(D² + X²)[:, j]`, squares element by element
(`rules.discarded` moves them the other way, from the past to now). So what the errors of a step do
to its own loss and to later ones is about `sum_j w_j error_j²` with `w = 1 + (D² + X²)^T w`. Later
steps are not known yet; earlier ones stand for them, in a running mean:

    w_t = (w_(t-1) + 1 + (D_t² + X_t²)^T w_(t-1)) / 2,      w_0 = 1

The memory holds `w - 1`, (rows, n), scaled down where it would exceed `LARGEST`: where errors grow
from step to step, only the ratios of the weights are of use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from etrace_bridge.step.linearise import CoreLinear
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.unit_arrays import core_times
from etrace_bridge.step.units import Layout

LARGEST = 1e4


def no_reach(layout: Layout) -> Any:
    """Before the first step: the plain norm."""
    return jnp.zeros((layout.rows, layout.size), layout.dtype)


def advance_reach(
    program: StepProgram, layout: Layout, core: CoreLinear, X: Any, reach: Any
) -> Any:
    """`w - 1` after a step with the core `core` and `X = F - D`."""
    w = 1 + reach
    through_core = core_times(program, layout, _squared_transposed(core), w, -1)
    through_products = jnp.einsum("ejk,ej->ek", X * X, w)
    new = (reach + through_core + through_products) / 2
    largest = jnp.max(new, 1, keepdims=True, initial=0)
    return new * jnp.where(largest > LARGEST, LARGEST / largest, 1)


def _squared_transposed(core: CoreLinear) -> CoreLinear:
    """The core with `(D²)^T` in place of `D`."""
    D = [
        [
            [None if row[i] is None else jnp.square(row[i]) for row in block]
            for i in range(len(block))
        ]
        for block in core.D
    ]
    return replace(core, D=D)
