"""Programs for GPUs and TPUs, seen without having one: they are lowered, not run."""

from __future__ import annotations

import re
from typing import Any

import brainstate
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from benchmarks import tpu
from benchmarks.programs import Programs
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.lowering import CPUTuning, Tuning, compiler_options, tuning_for
from etrace_bridge.rules import make_rule, rule_names
from quick_jit import quick_jit

PLATFORMS = ("cuda", "rocm", "tpu")
B, I, O, T = 2, 9, 2, 7  # noqa: E741
SOLVERS = {  # of eigenvectors, and of singular vectors: cuSOLVER, hipSOLVER and the TPU compiler's own
    "low_rank": {"cusolver_syevd_ffi", "hipsolver_syevd_ffi", "Eigh"},
    "ok_rtrl": {
        "cusolver_gesvdj_ffi", "hipsolver_gesvdj_ffi",
        "Eigh", "Qr", "ProductOfElementaryHouseholderReflectors",
    },
}  # fmt: skip
mixed_dtypes = pytest.mark.implicit_promotion(
    "rules multiply derivatives of the model's states, whose dtypes differ"
)


class Mixed(nn.Module):
    """A group of two states of different precision; the weights have that of the first."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.w, self.u, self.out = (
            nn.Linear(n, m, dtype=first) for n, m in ((I, 4), (4, 4), (4, O))
        )

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if state is None:
            state = (
                torch.zeros(x.shape[0], 4, dtype=self.first),
                torch.zeros(x.shape[0], 4, dtype=self.second),
            )
        h, c = state
        drive = torch.tanh(self.w(x) + self.u(h)).to(self.second)
        c = 0.7 * c + 0.3 * drive + 0.1 * h.to(self.second)
        h = torch.tanh(c).to(self.first)
        return self.out(h), (h, c)


@pytest.fixture(scope="module")
def everything() -> CompiledStep:
    with brainstate.environ.context(precision=32):
        return CompiledStep(eb.wrap(tpu.Everything()), [np.zeros((B, I), np.float32)], "gpu")


@pytest.mark.x32
@pytest.mark.parametrize("rule", rule_names())
def test_every_program_lowers_for_accelerators(everything: CompiledStep, rule: str) -> None:
    """Step and chunks, exported for all platforms at once: no float64, callback or barrier in
    them.
    """
    assert len(everything.hidden_names) == 4, everything.hidden_names
    programs = Programs(everything, make_rule(rule))
    for function, shapes in (programs.step(), programs.gradients(T, 2)):
        exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*shapes)
        text = exported.mlir_module()
        assert exported.platforms == PLATFORMS
        assert "stablehlo.dot_general" in text and "f64" not in text and "barrier" not in text
        called = set(re.findall(r"custom_call @(\w+)", text))
        assert called == SOLVERS.get(rule, set()), called


def test_tuning_and_options_follow_the_platform() -> None:
    for platform in ("gpu", *PLATFORMS):
        assert type(tuning_for(platform)) is Tuning
        assert (
            compiler_options(platform=platform)
            == compiler_options(one_step=True, platform=platform)
            == {}
        )
    assert type(tuning_for("cpu")) is CPUTuning and compiler_options(platform="cpu")


@mixed_dtypes
@pytest.mark.x32
@pytest.mark.parametrize(
    ("dtypes", "rules"),
    [
        ((torch.bfloat16, torch.float32), rule_names()),
        ((torch.float32, torch.float16), ("rtrl", "rflo")),
    ],
    ids=["bfloat16 weights", "float16 state"],
)
def test_mixed_precision_keeps_every_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], rules: tuple[str, ...]
) -> None:
    """The state comes back as it went in, and gradients have the weights' precision, with every
    rule; `rtrl` failed.
    """
    example = np.zeros((B, I), jnp.dtype(str(dtypes[0]).removeprefix("torch.")))
    compiled = CompiledStep(eb.wrap(Mixed(*dtypes)), [example], "cpu")
    assert len({leaf.invar.aval.dtype for leaf in compiled.program.leaves}) == 2
    for name in rules:
        programs = Programs(compiled, make_rule(name))
        function, shapes = programs.step()
        assert _kinds(jax.eval_shape(function, *shapes)[0]) == _kinds(programs.state), name
        if dtypes[0] != torch.bfloat16:  # those have numbers below
            function, shapes = programs.gradients(T, 2)
            assert _kinds(jax.eval_shape(function, *shapes)[0]) == _kinds(programs.state.theta)


def _kinds(tree: Any) -> list[tuple]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def half_and_whole() -> list[CompiledStep]:
    """The same weights in bfloat16 with a state in float32, and all in float32."""
    with brainstate.environ.context(precision=32):
        half, whole = Mixed(torch.bfloat16, torch.float32), Mixed(torch.float32, torch.float32)
        whole.load_state_dict({n: p.float() for n, p in half.state_dict().items()})
        kinds = (half, jnp.bfloat16), (whole, jnp.float32)
        return [CompiledStep(eb.wrap(m), [np.zeros((B, I), kind)], "cpu") for m, kind in kinds]


@mixed_dtypes
@pytest.mark.x32
@pytest.mark.parametrize("name", rule_names())
def test_mixed_precision_gradients(half_and_whole: list[CompiledStep], name: str) -> None:
    """Those of the same model in float32 under the same rule, up to the rounding of bfloat16: 2^-8
    of each number, and a few times that after several steps. Random rules draw the same signs.
    """
    xs, ys = torch.randn(4, B, I).bfloat16().float(), torch.randn(4, B, O).bfloat16().float()
    found = []
    for compiled, kind in zip(half_and_whole, (jnp.bfloat16, jnp.float32), strict=True):
        programs = Programs(compiled, make_rule(name))
        run, _ = programs.gradients(4, 2)

        def gradients(theta: Any, hidden: Any, other: Any, x: Any, y: Any, *, run=run, p=programs):
            return run(theta, (hidden, other, p.spec.core.zero_trace()), [x], y, None)[0]

        data = (jnp.asarray(x.numpy()).astype(kind) for x in (xs, ys))
        found.append(quick_jit(gradients)(*compiled.read(), *data))
    half, whole = found
    assert {g.dtype for g in half} == {jnp.dtype(jnp.bfloat16)}
    for n, (a, b) in enumerate(zip(half, whole, strict=True)):
        size = float(jnp.linalg.norm(b))
        assert size > 1e-4
        assert float(jnp.linalg.norm(a.astype(b.dtype) - b)) < 0.03 * size, n
