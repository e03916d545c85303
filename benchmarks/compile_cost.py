"""How long the compiler takes: 1, 10, 50 and 200 stacked GRU layers.

    python benchmarks/compile_cost.py [layers ...]

The target is growth about linear in the number of equations, and at most 5 s for 50 layers. Tracing
the model (which brainstate does) and compiling the trace into an `ETraceGraph` are timed apart.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import brainstate
import jax
import jax.numpy as jnp
from brainstate import HiddenState, ParamState

from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.graph import compile_graph_from_minfo

BATCH, WIDTH, LIMIT = 4, 8, 5.0


class Layer(brainstate.nn.Module):
    """A GRU in torch's layout: two fused products, split into gates."""

    def __init__(self) -> None:
        super().__init__()
        self.w_ih, self.w_hh = (ParamState(jnp.full((3 * WIDTH, WIDTH), 0.1)) for _ in range(2))
        self.b_ih, self.b_hh = (ParamState(jnp.zeros(3 * WIDTH)) for _ in range(2))
        self.h = HiddenState(jnp.zeros((BATCH, WIDTH)))

    def update(self, x):
        h = self.h.value
        i_r, i_z, i_n = jnp.split(x @ self.w_ih.value.T + self.b_ih.value, 3, axis=1)
        h_r, h_z, h_n = jnp.split(h @ self.w_hh.value.T + self.b_hh.value, 3, axis=1)
        r, z = jax.nn.sigmoid(i_r + h_r), jax.nn.sigmoid(i_z + h_z)
        n = jnp.tanh(i_n + r * h_n)
        self.h.value = n + z * (h - n)
        return self.h.value


def measure(layers: int) -> tuple[int, float, float]:
    """Return the equations, the seconds to trace and normalise, and the seconds to compile."""
    model = brainstate.nn.Sequential(*(Layer() for _ in range(layers)))
    x = jnp.ones((BATCH, WIDTH))
    start = time.perf_counter()
    minfo = extract_module_info(model, x)
    traced = time.perf_counter()
    graph = compile_graph_from_minfo(minfo)
    done = time.perf_counter()
    if len(graph.hidden_groups) != layers:
        raise RuntimeError(f"{layers} layers compiled to {len(graph.hidden_groups)} hidden groups")
    return len(minfo.jaxpr.eqns), traced - start, done - traced


def main(counts: list[int]) -> int:
    measure(1)  # imports and first-call costs of JAX itself
    print(
        f"{'layers':>6}  {'equations':>9}  {'trace (s)':>9}  {'compile (s)':>11}  "
        f"{'ms an equation':>14}"
    )
    slow = False
    for layers in counts:
        equations, trace, compile_ = measure(layers)
        each = 1000 * (trace + compile_) / equations
        print(f"{layers:>6}  {equations:>9}  {trace:>9.2f}  {compile_:>11.2f}  {each:>14.2f}")
        slow |= layers == 50 and trace + compile_ > LIMIT
    if slow:
        print(f"50 layers took more than {LIMIT} s")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]] or [1, 10, 50, 200]))
