"""Calls of a learner in random order, against a learner in plain torch: what each gives, and
weights and states after it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import etrace_bridge as eb
from fuzz_record import record
from online_oracle import FAMILIES, OUT, H, I, Recurrent, take_apart
from test_user_mode import FLOATS

pytestmark = pytest.mark.fuzz
LR, STATE = 0.1, "rnn.h_l0"
# A run compiles a program for nearly every kind of call, so there are two in the suite; `make fuzz
# N=2000` makes 100.
RUNS = max(2, int(os.environ.get("FUZZ_PROGRAMS", "0")) // 20)


class PlainLearner:
    """Exact RTRL and SGD on a GRU in plain torch, in float64."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.p = {
            name: t.detach().double().clone().requires_grad_()
            for name, t in model.named_parameters()
        }
        self.h = self.J = None

    def reset(self, mask: np.ndarray | None = None) -> None:
        if mask is None:
            self.h = self.J = None
        elif self.h is not None:
            keep = torch.tensor(~mask, dtype=torch.float64)
            self.h = self.h * keep[None, :, None]
            self.J = self.J * keep.repeat_interleave(H)[:, None]

    def step(
        self, x: Tensor, target: Tensor | None
    ) -> tuple[Tensor, float | None, dict[str, Tensor]]:
        """Moves state and influence on; gives output, loss and gradient, and leaves the weights."""
        h = torch.zeros(1, len(x), H, dtype=torch.float64) if self.h is None else self.h
        outputs: list[Tensor] = []

        def loss(y: Tensor) -> Tensor:
            outputs.append(y.detach())
            return F.mse_loss(y, torch.zeros_like(y) if target is None else target.double())

        s = take_apart(FAMILIES["GRU"].cell, self.p, x.double(), h, loss)
        J = torch.zeros_like(s.by_theta) if self.J is None else self.J
        past = (s.b_whole @ J).split(
            [t.numel() for name, t in self.p.items() if not name.startswith("out.")]
        )
        grads = dict(s.direct)
        for (name, t), g in zip(
            ((n, t) for n, t in self.p.items() if not n.startswith("out.")), past, strict=True
        ):
            grads[name] = grads[name] + g.view_as(t)
        self.h, self.J = s.state, s.whole @ J + s.by_theta
        return outputs[0], None if target is None else s.loss.item(), grads

    def sequence(
        self, xs: Tensor, ys: Tensor, carry: bool
    ) -> tuple[Tensor, list[float], dict[str, Tensor]]:
        """Outputs, losses and mean gradient; states and influence go on only if they are carried."""
        before = self.h, self.J
        if not carry:
            self.h = self.J = None
        outputs, losses, grads = zip(
            *(self.step(x, y) for x, y in zip(xs, ys, strict=True)), strict=True
        )
        if not carry:
            self.h, self.J = before
        return (
            torch.stack(outputs),
            list(losses),
            {name: sum(g[name] for g in grads) / len(xs) for name in self.p},
        )

    def descend(self, grads: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, t in self.p.items():
                t -= LR * grads[name]


class Calls(RuleBasedStateMachine):
    """Both learners side by side."""

    dtype, tolerance = torch.float64, 1e-9
    shared: dict[torch.dtype, eb.OnlineLearner]  # one learner for all runs: compiling is the cost
    counts: dict[str, int]

    @initialize(seed=st.integers(0, 99), batch=st.sampled_from([2, 3]))
    def begin(self, seed: int, batch: int) -> None:
        self.batch, self.numbers, self.calls = batch, torch.Generator().manual_seed(seed), 0
        if self.dtype not in self.shared:
            torch.manual_seed(7)
            self.shared[self.dtype] = self.make(Recurrent(torch.nn.GRU).to(self.dtype))
        self.learner = self.shared[self.dtype]
        if self.learner.runtime.store.started:
            self.learner.reset()
            self.learner.sync_from_torch()  # its torch model still has the first weights
        self.plain = PlainLearner(self.learner._torch_model())
        # A run uses a random part of the rules only; these three calls belong to every run.
        self.step("torch clone", True)
        self.gradients(False, False)
        self.update(True)

    def make(self, model: torch.nn.Module) -> eb.OnlineLearner:
        return eb.OnlineLearner(
            model, "rtrl", F.mse_loss, torch.optim.SGD(model.parameters(), lr=LR), chunk=2
        )

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.numbers, dtype=torch.float64).to(self.dtype)

    def compare(self, found: Any, wanted: Any, what: str) -> None:
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        assert found.shape == wanted.shape, what
        worst = np.abs(found - wanted).max(initial=0.0)
        assert worst <= self.tolerance * max(1.0, np.abs(wanted).max(initial=0.0)), (
            f"{what}: off by {worst:.1e}"
        )

    def compare_all(self, call: str) -> None:
        """Weights, and the state if there is one."""
        self.counts[call] = self.counts.get(call, 0) + 1
        runtime = self.learner.runtime
        for name, value in zip(
            runtime.store.compiled.weight_names, runtime.store.state.theta, strict=True
        ):
            self.compare(value, self.plain.p[name].detach(), f"{name} after `{call}`")
        if self.plain.h is not None and runtime.store.compiled.batch == self.plain.h.shape[1]:
            states = dict(
                zip(runtime.store.compiled.hidden_names, runtime.store.state.hidden, strict=True)
            )
            self.compare(states[STATE], self.plain.h[0], f"{STATE} after `{call}`")

    @rule(form=st.sampled_from(sorted(FLOATS)), learn=st.sampled_from([True, True, False]))
    def step(self, form: str, learn: bool) -> None:
        x, y = self.draw(self.batch, I), self.draw(self.batch, OUT)
        info = self.learner.step(FLOATS[form](x), FLOATS[form](y) if learn else None)
        output, loss, grads = self.plain.step(x, y if learn else None)
        self.compare(info.output, output, "output")
        if learn:
            self.compare(info.loss, loss, "loss")
            self.plain.descend(grads)
        self.compare_all("step" if learn else "step without target")

    def _sequence(
        self, call: Callable, carry: bool, other_batch: bool, descend: bool, name: str
    ) -> None:
        batch = self.batch if carry or not other_batch else 5 - self.batch
        xs, ys = self.draw(4, batch, I), self.draw(4, batch, OUT)
        result = call(xs, ys, carry=carry)
        outputs, losses, grads = self.plain.sequence(xs, ys, carry)
        self.compare(result.outputs, outputs, "outputs")
        self.compare(result.losses, losses, "losses")
        if descend:
            self.plain.descend(grads)
        else:
            for key, g in result.grads.items():
                self.compare(g, grads[key].detach(), f"gradient of {key}")
        self.compare_all(name)

    @rule(carry=st.booleans(), other_batch=st.booleans())
    def gradients(self, carry: bool, other_batch: bool) -> None:
        self._sequence(self.learner.gradients, carry, other_batch, False, "gradients")

    @rule(carry=st.booleans())
    def update(self, carry: bool) -> None:
        self._sequence(self.learner.update, carry, False, True, "update")

    @rule(carry=st.booleans())
    def predict(self, carry: bool) -> None:
        xs = self.draw(4, self.batch, I)
        before = self.plain.h, self.plain.J
        outputs, _, _ = self.plain.sequence(xs, torch.zeros(4, self.batch, OUT), carry)
        self.plain.h, self.plain.J = before
        self.compare(self.learner.predict(xs, carry=carry), outputs, "prediction")
        if self.learner.runtime.store.started:
            self.compare_all("predict")

    @precondition(lambda self: self.plain.h is not None)
    @rule(mask=st.lists(st.booleans(), min_size=3, max_size=3))
    def reset_some(self, mask: list[bool]) -> None:
        chosen = np.array(mask[: self.batch])
        self.learner.reset(chosen)
        self.plain.reset(chosen)
        self.compare_all("reset with mask")

    @rule(batch=st.sampled_from([2, 3]))
    def reset_and_change_batch(self, batch: int) -> None:
        if self.learner.runtime.store.started:
            self.learner.reset()
        self.plain.reset()
        self.batch = batch
        self.counts["reset"] = self.counts.get("reset", 0) + 1

    @precondition(lambda self: self.plain.h is not None)
    @rule()
    def another_batch_in_the_stream(self) -> None:
        """It is refused, and nothing has changed."""
        with pytest.raises(eb.InputError, match="batch"):
            self.learner.step(self.draw(5 - self.batch, I), self.draw(5 - self.batch, OUT))
        self.compare_all("refused step")

    @precondition(lambda self: self.plain.h is not None and self.learner is self.shared[self.dtype])
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = self.learner.save(Path(folder) / "learner")
            model = Recurrent(torch.nn.GRU).to(self.dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            self.learner = eb.OnlineLearner.load(path, model, loss=F.mse_loss, optimizer=optimizer)
        self.compare_all("load")


def run(dtype: torch.dtype, tolerance: float) -> dict[str, int]:
    """Run the machine in one precision; give how often each call was compared."""
    kind = type(
        "Calls", (Calls,), {"dtype": dtype, "tolerance": tolerance, "shared": {}, "counts": {}}
    )
    quick = "FUZZ_PROGRAMS" not in os.environ
    options = hypothesis.settings(
        max_examples=RUNS, stateful_step_count=20, deadline=None, derandomize=quick, database=None, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(kind, settings=options)
    mode = "float64" if dtype is torch.float64 else "default"
    record(f"test_calls_in_random_order_in_{mode}_mode", "programs", RUNS)
    return kind.counts


ALL = {
    "step", "step without target", "gradients", "update", "predict", "reset", "reset with mask",
    "refused step", "load",
}  # fmt: skip


def test_calls_in_random_order_in_float64_mode() -> None:
    counts = run(torch.float64, 1e-9)
    assert {"step", "gradients", "update"} <= set(counts) and sum(counts.values()) >= 15, counts
    assert RUNS < 20 or set(counts) == ALL, counts


@pytest.mark.x32
def test_calls_in_random_order_in_default_mode() -> None:
    counts = run(torch.float32, 2e-5)
    assert {"step", "gradients", "update"} <= set(counts) and sum(counts.values()) >= 15, counts
    assert RUNS < 20 or set(counts) == ALL, counts
