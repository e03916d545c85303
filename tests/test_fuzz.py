"""Random recurrent programs against torch: outputs, exact RTRL, D-RTRL by brute force, and the
certificate.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given

import etrace_bridge as eb
from etrace_bridge.compiler.diagnostics import show_path
from fuzz_models import INPUTS, STYLES, Program, programs
from fuzz_oracle import find_faults, measure, one_run_of
from fuzz_record import record

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("users_compiler")]


def test_random_programs():
    """Every program agrees, and together they show something: exact and approximate, traced and
    not, all kinds of inputs and states.
    """
    seen: Counter[str] = Counter()
    # The same few programs in the suite meet every rule; of many new ones each meets one, and one
    # in 16 is compiled.
    many = "FUZZ_PROGRAMS" in os.environ

    def run(program: Program) -> None:
        try:
            if many:
                measured = measure(program, one_run_of(program), len(program.source) % 16 == 0)
            else:
                measured = measure(program)
        except eb.CompilationError as error:
            # no state or no weight is read: nothing to learn
            hypothesis.assume("takes part in this step" not in str(error))
            raise
        faults = find_faults(measured)
        assert not faults, "\n".join(faults)
        record("test_random_programs", "programs")
        seen["programs"] += 1
        seen[program.style] += 1
        seen[next(iter(measured.grads))] += 1
        seen[program.inputs] += 1
        for path, certificate in measured.graph.certificate().items():
            grad = measured.torch_grads[show_path(path)]
            if grad is not None and np.abs(grad).max() > 1e-6:
                seen[f"{certificate.kind}, {'exact' if certificate.exact else 'approximate'}"] += 1

    # Each kind has a share of the programs, dense inputs the largest: what is tried does not depend
    # on chance.
    share = {
        inputs: max(hypothesis.settings().max_examples // (6 if inputs == "dense" else 12), 2)
        for inputs in INPUTS
    }
    for inputs, style in itertools.product(INPUTS, STYLES):
        hypothesis.settings(max_examples=share[inputs])(given(programs(inputs, style))(run))()
    assert seen["programs"] >= 24
    assert all(seen[kind] >= 6 for kind in (*INPUTS, *STYLES)), seen
    for kind in ("traced, exact", "traced, approximate", "direct, exact", "upstream, approximate"):
        assert seen[kind] >= 3, f"hardly any parameter with a gradient is {kind}: {seen}"


def test_the_comparison_can_fail():
    """A fault in any of the quantities is found."""
    source = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = nn.Parameter(torch.zeros(3, 3))\n"
        "        self.h = None\n\n"
        "    def forward(self, x):\n"
        "        h = torch.zeros(2, 3, dtype=x.dtype) if self.h is None else self.h\n"
        "        self.h = 0.5 * h + torch.tanh(x @ self.w)\n"
        "        return self.h\n"
    )
    measured = measure(Program(source, "attribute", "dense", 1))
    assert find_faults(measured) == []
    assert measured.graph.certificate()[("w",)].exact
    for run in measured.grads:
        measured.grads[run]["w"][0, 0] += 1e-5
        assert any(f"{run}: gradient of w" in fault for fault in find_faults(measured))
        measured.grads[run]["w"][0, 0] -= 1e-5
    measured.brute["step"]["w"][1, 1] += 1e-5
    assert any("certified exact" in fault for fault in find_faults(measured))
    measured.outputs[0][2, 1, 1] += 1e-5
    assert "output 0 against torch" in find_faults(measured)[0]


def test_programs_are_reproducible():
    found: list[Program] = []

    @hypothesis.settings(max_examples=3, phases=[hypothesis.Phase.generate])
    @given(programs())
    def run(program: Program) -> None:
        found.append(program)

    run()
    for program in found:
        a, b = program.build(), program.build()
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
        assert torch.equal(program.data(), program.data())
