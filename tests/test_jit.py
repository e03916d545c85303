"""Programs that XLA's CPU compiler gets wrong when it is left alone: right as this package compiles
them.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import etrace_bridge as eb
from etrace_bridge.lowering.compile import FLOAT64_OPTIONS, OPTIONS, SEQUENCE_OPTIONS, jit

pytestmark = pytest.mark.usefixtures("users_compiler")


def gate_cotangents(stored, cotangent, kept, t):
    """The reverse step of a GRU, its three gates' cotangents side by side."""
    keep, z_slope, r_slope, recurrent, n_slope, n, update = (
        jax.lax.dynamic_index_in_dim(s, 2 - t, keepdims=False) for s in stored
    )
    d = (cotangent - kept) * update
    d = d + d * n_slope
    return jnp.concatenate([d * recurrent * r_slope, keep * cotangent * z_slope, d], 1)


def expected_cotangents(stored, cotangent, kept) -> np.ndarray:
    """The same by numpy, at the step that the tests ask for."""
    keep, z_slope, r_slope, recurrent, n_slope, _, update = (
        s[1].astype(np.float64) for s in stored
    )
    d = (cotangent - kept) * update * (1 + n_slope)
    return np.concatenate([d * recurrent * r_slope, keep * cotangent * z_slope, d], 1)


@pytest.mark.parametrize(("batch", "units"), [(4, 5), (4, 4), (3, 5)])
def test_concatenated_gates_in_float64(batch, units):
    """jaxlib 0.10.2 on x86: four elements of the last gate are wrong for batch 4 and 5 units under
    plain `jax.jit`.
    """
    rng = np.random.default_rng(0)
    stored = [rng.normal(size=(3, batch, units)) for _ in range(7)]
    cotangent, kept = (rng.normal(size=(batch, units)) for _ in range(2))
    found = jit(gate_cotangents)(stored, cotangent, kept, jnp.array(1))
    np.testing.assert_allclose(found, expected_cotangents(stored, cotangent, kept), rtol=1e-12)


class DecayAndGates(nn.Module):
    """The model on which it was found: a layer with a learned decay below a GRUCell of five units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.input = nn.Linear(6, 8)
        self.recurrent = nn.Linear(8, 8, bias=False)
        self.decay = nn.Parameter(torch.zeros(8))
        self.gru = nn.GRUCell(8, 5)
        self.readout = nn.Linear(5, 7)

    def forward(self, token, state=None):
        zeros = [torch.zeros(len(token), n, dtype=self.decay.dtype) for n in (8, 5)]
        m, h = zeros if state is None else state
        d = torch.sigmoid(self.decay)
        m = d * m + (1 - d) * torch.tanh(self.input(self.embedding(token)) + self.recurrent(m))
        h = self.gru(m, h)
        return self.readout(h), (m, h)


@pytest.mark.usefixtures("without_single_steps")  # they run in float32
@pytest.mark.parametrize(("rule", "chunk"), [("bptt", 10), ("rtrl", 5)])
def test_a_gru_cell_of_five_units_at_batch_four(rule, chunk):
    torch.manual_seed(3)
    tokens = torch.randint(0, 7, (10, 4))
    report = eb.check_gradients(
        DecayAndGates(), tokens, tokens.roll(1, 0), loss=cross_entropy, rule=rule, chunk=chunk
    )
    assert report.ok, str(report)
    assert report.worst().relative_error < 1e-9


def options_of_jit(monkeypatch, **how) -> dict:
    jit(abs)  # asks XLA what it knows
    seen = []
    monkeypatch.setattr(jax, "jit", lambda function, **options: seen.append(options) or function)
    jit(abs, **how)
    monkeypatch.undo()
    (options,) = seen
    return options["compiler_options"]


@pytest.mark.x32
def test_float32_keeps_the_emitters(monkeypatch):
    assert options_of_jit(monkeypatch) == OPTIONS | SEQUENCE_OPTIONS
    assert options_of_jit(monkeypatch, one_step=True) == OPTIONS


@pytest.mark.x32
def test_float32_gates_at_every_small_size():
    """The program that is wrong in float64, where a wrong vector of floats would show: sizes up to
    beyond a register of 512 bits.
    """
    for batch, units in itertools.product((1, 2, 3, 4, 8), range(1, 21)):
        rng = np.random.default_rng(batch)
        stored = [rng.normal(size=(3, batch, units)).astype(np.float32) for _ in range(7)]
        cotangent, kept = (rng.normal(size=(batch, units)).astype(np.float32) for _ in range(2))
        found = jit(gate_cotangents)(stored, cotangent, kept, jnp.array(1))
        np.testing.assert_allclose(
            found,
            expected_cotangents(stored, cotangent, kept),
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"{batch} x {units}",
        )


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setitem(OPTIONS, "xla_cpu_of_another_time", True)
    assert int(jit(abs)(-3)) == 3
    known = OPTIONS | SEQUENCE_OPTIONS | FLOAT64_OPTIONS
    del known["xla_cpu_of_another_time"]
    assert options_of_jit(monkeypatch) == known
