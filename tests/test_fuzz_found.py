"""What the fuzzer has found, each as a small program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import make_jaxpr_closed
from etrace_bridge.compiler.core_equations import Core
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.step.program import make_program
from fuzz_models import Program
from fuzz_oracle import find_faults, measure

# The second gate of `u` feeds position n of the state directly and position n + 1 through the gate
# `z`; its first gate feeds one position.
ONE_GATE_FEEDS_MANY = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = nn.Parameter(torch.zeros((6, 3)))
        self.w = nn.Parameter(torch.zeros((6, 3)))
        self.h = None

    def forward(self, x):
        h = torch.zeros(2, 3, dtype=self.u.dtype) if self.h is None else self.h
        a, b = F.linear(x, self.u).chunk(2, -1)
        c, d = F.linear(b, self.w).chunk(2, -1)
        z = b.roll(1, -1) * 1.0
        z[..., ::2] = c[..., :2]
        z = torch.sigmoid(z)
        self.h = z * h + (1 - z) * torch.tanh(BEFORE_TANH)
        return self.h
"""


def measured(sum_of_gates: str, seed: int):
    return measure(
        Program(
            ONE_GATE_FEEDS_MANY.replace("BEFORE_TANH", sum_of_gates), "attribute", "dense", seed
        )
    )


def test_every_gate_of_a_product_is_traced_where_one_feeds_many_positions():
    """Such a product had no trace, and before that one which its certificate denied: it is made
    once for each position now.
    """
    for seed in range(2):  # different rules and chunks
        found = measured("a + d + b", seed)
        assert find_faults(found) == []
    program, certificate = make_program(found.graph), found.graph.certificate()
    assert {path: c.kind for path, c in certificate.items()} == {("u",): "traced", ("w",): "traced"}
    assert {path for leg in program.legs for path in leg.contact.view.paths} == {("u",), ("w",)}
    assert not certificate["u",].exact, "it reaches the state through `w` too"


def test_a_gate_beside_one_that_the_core_computes():
    """A value that is no sum of gates stood in the sum, so `a` and `d` entered the core one by one;
    their trace was empty.
    """
    found = measured("a + d + torch.sin(h) + b", 0)
    assert find_faults(found) == []
    assert np.abs(found.brute["step"]["w"] - found.torch_grads["w"]).max() < 1e-9, (
        "a diagonal recurrence"
    )


def test_the_core_keeps_given_gates():
    """Of a split whose other part it needs, the core used to make the given part anew, and its
    derivative was lost.
    """
    closed = make_jaxpr_closed(
        lambda y, h: (lambda a, b: a * h + b)(*jnp.split(y, 2)), jnp.ones(4), jnp.ones(2)
    )
    split = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "split")
    core = Core(
        tuple(closed.jaxpr.eqns), {}, tuple(closed.jaxpr.invars), tuple(closed.jaxpr.outvars)
    )

    def new_state(a):
        env = {
            **dict(zip(closed.jaxpr.invars, (jnp.arange(4.0), jnp.array([3.0, 5.0])), strict=True)),
            split.outvars[0]: a,
        }
        return read(core.run(env), core.outvars[0])

    np.testing.assert_array_equal(new_state(jnp.array([7.0, 7.0])), [23, 38])
    np.testing.assert_array_equal(jax.jacobian(new_state)(jnp.array([7.0, 7.0])), np.diag([3, 5]))


NO_WEIGHT_REACHES_THE_STATE = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros((2, 3)))
        self.h = None

    def forward(self, x):
        h = torch.zeros(2, 3, dtype=self.w.dtype) if self.h is None else self.h
        self.h = 0.9 * h + torch.tanh(h - h.amin(-1, keepdim=True)) + x
        return F.linear(self.h, self.w)
"""


def test_rtrl_without_a_weight_that_reaches_a_state():
    """The influence matrix is empty there, and mapping over none of its rows failed."""
    assert find_faults(measure(Program(NO_WEIGHT_REACHES_THE_STATE, "attribute", "dense", 1))) == []
