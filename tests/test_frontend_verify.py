"""`verify` and `run_torch`: they agree where they should, and notice where the bridge would be
wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.frontend.hooks import apply_parameter_hooks
from etrace_bridge.frontend.ops import registry

B, H, T = 3, 4, 5


class Net(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.gru, self.fc, self.scale = nn.GRU(H, H), nn.Linear(H, 2), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sinc(self.gru(x)[0])) * self.scale


def test_verify_agrees_and_prints() -> None:
    module, x = Net().double(), torch.randn(B, H, dtype=torch.float64)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    report = eb.verify(module, x)
    assert report.ok and bool(report) and report.steps == 4 and not report.dead
    assert report.outputs < 1e-12 and max(report.gradients.values()) < 1e-12
    assert set(report.gradients) == {*(name for name, _ in module.named_parameters()), "input"}
    text = str(report)
    assert "equal (tolerance 1e-09)" in text and "gradient gru.weight_hh_l0" in text.replace(
        "  ", " "
    )
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_verify_notices_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_BY_FUNCTION", dict(registry._BY_FUNCTION))
    monkeypatch.setattr(registry, "_LOOKUP_CACHE", {})
    eb.register_op(torch.sinc, lambda input: input * 1.01)
    report = eb.verify(Net().double(), torch.randn(B, H, dtype=torch.float64))
    assert not report.ok and "NOT EQUAL" in str(report) and "<-- differs" in str(report)
    assert report.gradients["fc.bias"] <= report.tolerance < report.gradients["gru.weight_ih_l0"]


def test_verify_notices_a_wrong_gradient() -> None:
    class Lies(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Lies.calls += 1
            return grad * Lies.calls

    class Uses(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Lies.apply(super().forward(x))

    report = eb.verify(Uses().double(), torch.randn(B, H, dtype=torch.float64))
    assert report.outputs < 1e-12 and not report.ok


def test_verify_names_dead_parameters() -> None:
    report = eb.verify(Net(scale=0.0), torch.randn(B, H))
    assert set(report.dead) == set(report.gradients) and "(zero in torch)" in str(report)


def test_verify_compares_random_models_in_eval_mode() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(H, H)).train()
    report = eb.verify(module, torch.randn(B, H))
    assert report.ok and "eval mode" in str(report) and module.training and module[0].training


def test_verify_takes_states_and_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(H, H)

        def forward(self, x: Tensor, index: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.fc(x) + state)
            return state[:, index], state

    report = eb.verify(
        Two().double(),
        (torch.randn(B, H, dtype=torch.float64), torch.tensor([2, 0, 1])),
        state=lambda b: torch.zeros(b, H),
    )
    assert (
        report.ok
        and set(report.states) == {"state"}
        and set(report.gradients) == {"fc.weight", "fc.bias", "input"}
    )


# ---- run_torch


class StepGRU(nn.Module):
    """The state in an attribute, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(H, H)
        self.register_buffer("h", torch.zeros(B, H))

    def forward(self, x: Tensor) -> Tensor:
        new = self.cell(x, self.h.clone())
        self.h.copy_(new)
        return new * 1.0


def same_weights(target: nn.Module, source: nn.GRU) -> nn.Module:
    names = {
        "weight_ih": "weight_ih_l0",
        "weight_hh": "weight_hh_l0",
        "bias_ih": "bias_ih_l0",
        "bias_hh": "bias_hh_l0",
    }
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(getattr(source, names[name.split(".")[-1]]))
    return target


@pytest.mark.parametrize("kind", ["cell", "attribute", "sequence", "batch_first", "stepwise"])
def test_run_torch_chains_the_steps(kind: str) -> None:
    """Every way of keeping a GRU's state gives the outputs and gradients of `nn.GRU` on the whole
    sequence.
    """
    gru = nn.GRU(H, H)
    xs = torch.randn(T, B, H)
    wanted = gru(xs)[0]
    wanted.sin().sum().backward()
    if kind == "cell":
        run, module = eb.run_torch(cell := same_weights(nn.GRUCell(H, H), gru), xs), cell
    elif kind == "attribute":
        run, module = eb.run_torch(held := same_weights(StepGRU(), gru), xs), held
        assert not held.h.any() and not held.h.requires_grad
    elif kind == "batch_first":
        first = nn.GRU(H, H, batch_first=True)
        first.load_state_dict(gru.state_dict())
        run, module = eb.run_torch(first, xs.transpose(0, 1)), first
    else:
        other = nn.GRU(H, H)
        other.load_state_dict(gru.state_dict())
        run, module = eb.run_torch(other, xs, stepwise=kind == "stepwise"), other
    assert len(run.outputs) == T
    torch.testing.assert_close(run.stacked(), wanted)
    run.stacked().sin().sum().backward()
    for parameter, reference in zip(module.parameters(), gru.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
    if kind in ("cell", "attribute", "stepwise"):
        assert len(run.states) == T and len(run.states[0]) == 1


def test_run_torch_can_run_twice_with_the_same_result() -> None:
    module, xs = StepGRU(), torch.randn(T, B, H)
    first, second = eb.run_torch(module, xs).stacked(), eb.run_torch(module, xs).stacked()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert (first[0] - first[-1]).abs().max() > 1e-3


def test_run_torch_wants_tensors() -> None:
    with pytest.raises(eb.InputError, match="torch tensors with a time axis"):
        eb.run_torch(nn.GRU(H, H), np.ones((T, B, H)))


# ---- parameter hooks and borders


def test_parameter_hooks() -> None:
    module = nn.Linear(H, H)
    module.weight.register_hook(lambda g: g * 2)
    module.weight.register_hook(lambda g: None)
    grads = {"weight": torch.ones(H, H), "bias": torch.ones(H)}
    found = apply_parameter_hooks(module, grads)
    assert torch.equal(found["weight"], torch.full((H, H), 2.0)) and torch.equal(
        found["bias"], torch.ones(H)
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
def test_borders_copy_and_keep_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    array = eb.to_jax(tensor)
    tensor.zero_()
    assert np.asarray(array).astype(complex).sum() == 3
    back = eb.to_torch(array)
    assert back.dtype == dtype
    back.zero_()
    assert np.asarray(array).astype(complex).sum() == 3
    source = np.ones(3)
    array = eb.to_jax(source)
    source[:] = 0
    assert np.asarray(array).sum() == 3


def test_verify_asks_for_the_torch_module() -> None:
    net = eb.wrap(nn.GRU(H, H))
    with pytest.raises(eb.InputError, match="Pass the torch module: `net.model`"):
        eb.verify(net, torch.randn(B, H))  # pyright: ignore[reportArgumentType]
    with pytest.raises(eb.InputError, match="does not take a `int`"):
        eb.verify(3, torch.randn(B, H))  # pyright: ignore[reportArgumentType]
