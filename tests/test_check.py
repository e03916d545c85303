"""`check_gradients` tells the truth: what agrees, what does not, and when there was nothing to
compare.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge._bytes import parse_bytes
from etrace_bridge.check.torch_reference import map_tensors
from etrace_bridge.rules import RTRL, EProp

pytestmark = pytest.mark.usefixtures("without_single_steps")
T, B, IN, H, OUT = 6, 2, 3, 4, 2


class Net(nn.Module):
    """A GRU and a readout."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(IN, H, batch_first=batch_first)
        self.out = nn.Linear(H, OUT)

    def forward(self, x):
        return self.out(self.gru(x)[0])


class Leaky(nn.Module):
    """A diagonal recurrence: D-RTRL is exact for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, H)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, H))
        self.h = None

    def forward(self, x):
        h = torch.zeros(x.shape[0], H) if self.h is None else self.h
        self.h = self.decay * h + torch.tanh(self.fc(x))
        return self.h


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 2 * v.abs()) ** 2


class Spiking(nn.Module):
    """Leaky neurons whose only output are spikes, with a surrogate gradient."""

    def __init__(self, gain: float = 2.0) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, H)
        self.gain = gain
        self.v = None

    def forward(self, x):
        v = torch.zeros(x.shape[0], H) if self.v is None else self.v
        v = 0.8 * v + self.gain * self.fc(x)
        spikes = Spike.apply(v - 0.5)
        self.v = v - 0.5 * spikes.detach()
        return spikes


@dataclass(frozen=True)
class Wrong(RTRL):
    """RTRL whose first weight matrix is off in one element."""

    name: ClassVar[str] = "wrong"

    def past(self, program, theta, memory, h0):
        found = super().past(program, theta, memory, h0)
        return found | {0: found[0].at[2, 1].add(1e-4)}


def data(width: int = OUT) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, B, IN), torch.randn(T, B, width)


def torch_gradients(model: nn.Module, xs: torch.Tensor, ys: torch.Tensor) -> dict[str, np.ndarray]:
    """BPTT in float64 by hand, on a copy."""
    import copy

    double = copy.deepcopy(model).double()
    total = torch.stack(
        [mse_loss(o, y) for o, y in zip(double(xs.double()), ys.double(), strict=True)]
    ).mean()
    total.backward()
    return {name: p.grad.numpy() for name, p in double.named_parameters()}


@cache
def shared(rule: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, eb.GradientReport]:
    """A model, its data and its report, for tests that only look."""
    torch.manual_seed(0)
    model, (xs, ys) = Net(), data()
    return model, xs, ys, eb.check_gradients(model, xs, ys, loss=mse_loss, rule=rule)


# ---- what is reported


def test_exact_rule_agrees_and_the_report_reads_well():
    model, _, _, report = shared("rtrl")
    assert report.ok and bool(report)
    assert list(report.parameters) == [name for name, _ in model.named_parameters()]
    for p in report:
        assert p.verdict == "exact" and p.expectation.kind == "exact"
        assert p.relative_error < 1e-12 and p.cosine > 1 - 1e-12 and p.sign_agreement == 1
        assert p.norm > 1e-3
    assert report["gru.weight_hh_l0"].past > 0.01  # the trace carried a part of it
    text = str(report)
    assert text.startswith("rtrl against torch BPTT: exact")
    assert all(name in text for name in report.parameters)


def test_numbers_are_those_of_the_gradients():
    model, xs, ys, report = shared("d_rtrl")
    assert report.ok and report.chunk == 2 and report.steps == T
    wanted = torch_gradients(model, xs, ys)
    for p in report:
        a, b = p.online_gradient, wanted[p.name]
        np.testing.assert_allclose(p.torch_gradient, b, rtol=1e-9, atol=1e-15)
        assert p.cosine == pytest.approx(
            (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()), rel=1e-9
        )
        assert p.relative_error == pytest.approx(
            np.sqrt(((a - b) ** 2).sum() / (b * b).sum()), rel=1e-6, abs=1e-12
        )
        assert p.norm_ratio == pytest.approx(np.sqrt((a * a).sum() / (b * b).sum()), rel=1e-9)
        assert p.sign_agreement == pytest.approx(np.mean(np.sign(a) == np.sign(b)))
        assert p.max_difference == pytest.approx(np.abs(a - b).max(), rel=1e-6, abs=1e-14)
        assert p.found == a[p.max_index] and p.expected == p.torch_gradient[p.max_index]
    recurrent, readout = report["gru.weight_hh_l0"], report["out.weight"]
    assert recurrent.verdict == "approximate (as certified)" and 0.5 < recurrent.cosine < 1 - 1e-6
    assert "product with `gru.weight_hh_l0`" in recurrent.expectation.reason
    assert readout.verdict == "exact" and readout.expectation.kind == "exact"
    assert report.worst().name.startswith("gru.")
    assert report.loss == pytest.approx(report.torch_loss, rel=1e-12)
    assert "drops" in str(report)


def test_diagonal_recurrence_is_certified_and_measured_exact():
    report = eb.check_gradients(Leaky(), *data(H), loss=mse_loss, rule="d_rtrl")
    assert report.ok
    assert {p.verdict for p in report} == {"exact"} and {p.expectation.kind for p in report} == {
        "exact"
    }
    assert min(p.past for p in report) > 1e-3


def test_surrogates_are_compared_analytic_to_analytic():
    report = eb.check_gradients(Spiking(), *data(H), loss=mse_loss, rule="d_rtrl")
    assert report.ok and {p.verdict for p in report} == {"exact"}
    assert report["fc.weight"].norm > 1e-3


def test_truncated_bptt_says_so():
    report = eb.check_gradients(Net(), *data(), loss=mse_loss, rule="bptt", chunk=3)
    assert report.ok
    assert report["gru.weight_hh_l0"].verdict == "truncated (as certified)"
    assert report["out.bias"].verdict == "exact"
    assert (
        eb.check_gradients(Net(), *data(), loss=mse_loss, rule="bptt")["gru.weight_hh_l0"].verdict
        == "exact"
    )


def test_rules_that_promise_nothing_are_reported_and_ok():
    model, (xs, ys) = Net(), data()
    report = eb.check_gradients(model, xs, ys, loss=mse_loss, rule=EProp(feedback="random"))
    assert report["gru.weight_hh_l0"].verdict == "approximate (as certified)"
    assert "random feedback" in report["gru.weight_hh_l0"].expectation.reason


def test_unused_parameter_has_no_gradient():
    model = Leaky()
    model.extra = nn.Parameter(torch.ones(2))
    report = eb.check_gradients(model, *data(H), loss=mse_loss, rule="d_rtrl")
    assert report.ok and report["extra"].verdict == "no gradient (as certified)"
    assert report["extra"].expectation.reason == "the step does not use it"
    content = json.loads(report.to_json())  # strict JSON, though the cosine is NaN
    assert {p["name"]: p["cosine"] for p in content["parameters"]}["extra"] is None


# ---- what is wrong


def test_a_wrong_gradient_is_found_and_reads_like_assert_close():
    model, xs, ys, _ = shared("rtrl")
    report = eb.check_gradients(model, xs, ys, loss=mse_loss, rule=Wrong())
    assert not report.ok and report.worst().name == "gru.weight_ih_l0"
    assert [p.name for p in report if not p.ok] == ["gru.weight_ih_l0"]
    wrong = report["gru.weight_ih_l0"]
    assert wrong.verdict == "MISMATCH" and wrong.max_index == (2, 1)
    text = "\n\n".join(report.mismatches())
    assert "`gru.weight_ih_l0` is not close" in text and "index (2, 1)" in text
    assert (
        repr(wrong.found) in text and repr(wrong.expected) in text and "up to 1e-09 allowed" in text
    )
    assert f"Mismatched elements: 1 / {3 * H * IN}" in text
    assert text in str(report)


def test_a_contradicted_certificate_is_found(monkeypatch):
    def forget(program, traces, *rest):
        return jax.tree.map(jnp.zeros_like, traces)

    monkeypatch.setattr("etrace_bridge.schedule.dense.advance_traces", forget)
    report = eb.check_gradients(Leaky(), *data(H), loss=mse_loss, rule="d_rtrl")
    assert not report.ok and report["decay"].verdict == "MISMATCH"
    assert "expected to be exact: every path through time is position by position" in str(report)


def test_assert_gradients_close_passes_and_asks_for_a_cosine():
    model, (xs, ys) = Net(), data()
    assert eb.assert_gradients_close(Leaky(), *data(H), mse_loss, "d_rtrl", min_cosine=0.99999).ok
    with pytest.raises(
        AssertionError,
        match=r"`gru\.\w+` has cosine 0\.\d+ to torch's; it must be at least 0\.99999",
    ):
        eb.assert_gradients_close(model, xs, ys, mse_loss, "d_rtrl", min_cosine=0.99999)


# ---- it cannot pass in vain


class Stopped(Leaky):
    def forward(self, x):
        out = super().forward(x)
        self.h = self.h.detach()
        return out


def only_problem(report: eb.GradientReport) -> str:
    assert not report.ok
    (text,) = report.problems
    assert text in str(report) and "NOT OK" in str(report)
    return text


def test_one_chunk_never_uses_the_trace():
    xs, ys = data(H)
    assert "one chunk" in only_problem(
        eb.check_gradients(Leaky(), xs, ys, mse_loss, "rtrl", chunk=T)
    )
    report = eb.check_gradients(Leaky(), xs[:1], ys[:1], mse_loss, "d_rtrl", allow_zero=["decay"])
    assert "one step" in only_problem(report)


def test_loss_in_the_first_chunk_never_uses_the_trace():
    mask = torch.zeros(T)
    mask[:3] = 1
    assert "only the first chunk" in only_problem(
        eb.check_gradients(Leaky(), *data(H), mse_loss, "rtrl", chunk=3, mask=mask)
    )


def test_detached_state_never_uses_the_trace():
    report = eb.check_gradients(Stopped(), *data(H), mse_loss, "d_rtrl")
    assert "trace is never used" in only_problem(report)


def test_silent_network_is_not_ok():
    assert "silent" in only_problem(
        eb.check_gradients(Spiking(gain=1e-3), *data(H), mse_loss, "d_rtrl")
    )


def test_zero_input_is_not_ok():
    xs, ys = data(H)
    assert (
        "input is zero" in eb.check_gradients(Leaky(), 0 * xs, ys, mse_loss, "d_rtrl").problems[0]
    )


def test_zero_gradients_are_not_ok():
    model = Net()
    nn.init.zeros_(model.out.weight)
    for p in model.out.parameters():
        p.requires_grad_(False)
    assert "All gradients are zero" in only_problem(
        eb.check_gradients(model, *data(), mse_loss, "rtrl")
    )


def test_loss_that_ignores_the_model_is_not_ok():
    with pytest.raises(eb.InputError, match="no derivative by the model's output"):
        eb.check_gradients(Leaky(), *data(H), lambda y, t: (y.detach() * 0 + t).mean(), "d_rtrl")
    report = eb.check_gradients(Leaky(), *data(H), lambda y, t: 0 * y.sum(), "d_rtrl")
    assert "loss does not depend" in only_problem(report)


def test_a_parameter_with_zero_gradient_is_not_ok_unless_allowed():
    class Dead(Leaky):
        def forward(self, x):
            return super().forward(x) + torch.relu(self.scale)

    model = Dead()
    model.scale = nn.Parameter(torch.tensor(-1.0))
    xs, ys = data(H)
    report = eb.check_gradients(model, xs, ys, mse_loss, "d_rtrl")
    assert not report.ok and report["scale"].verdict == "nothing to compare"
    assert "allow_zero=['scale']" in str(report)
    assert eb.check_gradients(model, xs, ys, mse_loss, "d_rtrl", allow_zero=["scale"]).ok


def test_different_outputs_are_a_problem(monkeypatch):
    from etrace_bridge.check import torch_check as check

    real = check.torch_reference

    def other(*args):
        found = real(*args)
        found.outputs[4][0][1, 0] += 1e-3
        return found

    monkeypatch.setattr(check, "torch_reference", other)
    assert (
        "outputs differ at step 4"
        in eb.check_gradients(Leaky(), *data(H), mse_loss, "d_rtrl").problems[0]
    )


# ---- the user's world stays as it was


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        name: (t.data_ptr(), t.dtype, t._version, t.detach().clone())
        for name, t in model.state_dict(keep_vars=True).items()
    }


@pytest.mark.x32
def test_float64_check_in_a_float32_world_changes_nothing():
    model, (xs, ys) = Net(), data()
    before, rng = snapshot(model), torch.get_rng_state()
    assert not jax.config.jax_enable_x64
    report = eb.check_gradients(model, xs, ys, mse_loss, "rtrl")
    assert report.ok and report.dtype == "float64" and report.worst().relative_error < 1e-12
    assert not jax.config.jax_enable_x64 and jnp.ones(1).dtype == jnp.float32
    assert torch.get_default_dtype() == torch.float32 and torch.equal(torch.get_rng_state(), rng)
    for name, (pointer, dtype, version, value) in snapshot(model).items():
        assert (pointer, dtype, version) == before[name][:3] and torch.equal(value, before[name][3])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.x32
def test_float32_and_the_models_own_precision():
    model, (xs, ys) = Net(), data()
    for dtype in (torch.float32, None):
        report = eb.check_gradients(model, xs, ys, mse_loss, "rtrl", dtype=dtype)
        assert report.ok and report.dtype == "float32" and report.tolerance == 1e-5
        assert 1e-10 < report.worst().relative_error < 1e-5


def test_model_is_restored_when_the_check_fails():
    model, (xs, ys) = Net(), data()
    before = snapshot(model)
    with pytest.raises(eb.InputError, match="scalar"):
        eb.check_gradients(model, xs, ys, lambda y, t: (y - t) ** 2, "rtrl")
    assert {n: v[:3] for n, v in snapshot(model).items()} == {n: v[:3] for n, v in before.items()}
    assert torch.get_default_dtype() == torch.float32


def test_weights_in_closures_and_constants_in_tuples_are_cast_too():
    weight = nn.Parameter(torch.randn(H, IN))
    scale = torch.tensor([0.5, 1.0, 1.5, 2.0])

    class Closure(Leaky):
        def __init__(self):
            super().__init__()
            self.weight = weight
            self.constants = (scale, "name")
            self.run = lambda x: x @ weight.t() * self.constants[0]

        def forward(self, x):
            return super().forward(x) + self.run(x)

    report = eb.check_gradients(Closure(), *data(H), mse_loss, "d_rtrl")
    assert report.ok and report["weight"].norm > 1e-3
    assert weight.dtype == scale.dtype == torch.float32


def test_a_fixed_precision_gives_advice():
    class Fixed(Leaky):
        def forward(self, x):
            return super().forward(x) @ torch.ones(H, H, dtype=torch.float32)

    model, (xs, ys) = Fixed(), data(H)
    for report in (
        eb.check_gradients(model, xs, ys, mse_loss, "d_rtrl"),
        eb.check_gradients(model, xs, ys, mse_loss, dtype="float64"),
    ):
        assert (
            report.dtype == "float32" and "cannot run in float64" in report.notes[0] and report.ok
        )
    double = Fixed().double()  # its own precision is float64, so there is none to fall back to
    with pytest.raises(eb.InputError, match="cannot run in float64.*Pass `dtype=None`"):
        eb.check_gradients(double, xs, ys, mse_loss, "d_rtrl")


def test_the_default_precision_is_float64():
    assert inspect.signature(eb.check_gradients).parameters["dtype"].default == "float64"
    assert shared("rtrl")[-1].dtype == "float64"


# ---- losses, layouts, data


def test_jax_loss_equals_torch_loss():
    model, xs, ys, by_torch = shared("d_rtrl")
    by_jax = eb.check_gradients(
        model, xs, ys, lambda y, t: jnp.mean(jnp.square(jnp.subtract(y, t))), "d_rtrl"
    )
    assert by_jax.ok and by_jax.torch_loss == pytest.approx(by_torch.torch_loss, rel=1e-12)
    for p in by_torch:
        np.testing.assert_allclose(
            by_jax[p.name].torch_gradient, p.torch_gradient, rtol=1e-10, atol=1e-15
        )


def test_batch_first_mask_sum_and_numpy():
    model, (xs, ys) = Net(batch_first=True), data()
    mask = np.linspace(0, 1, T)
    report = eb.check_gradients(
        model,
        xs.transpose(0, 1).numpy(),
        ys.transpose(0, 1).numpy(),
        mse_loss,
        "rtrl",
        mask=mask,
        reduction="sum",
    )
    assert report.ok
    twin = Net()
    twin.load_state_dict(model.state_dict())
    same = eb.check_gradients(twin, xs, ys, mse_loss, "rtrl", mask=mask, reduction="sum")
    np.testing.assert_allclose(
        report["gru.weight_hh_l0"].torch_gradient,
        same["gru.weight_hh_l0"].torch_gradient,
        rtol=1e-9,
    )


def test_tokens_and_several_outputs():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.h = nn.Embedding(5, IN), nn.GRUCell(IN, H), None

        def forward(self, x):
            self.h = self.cell(self.embed(x), self.h)
            return self.h, {"twice": 2 * self.h}

    def loss(output, target):
        return ((output[0] - target) ** 2).mean() + (output[1]["twice"] * target).mean()

    report = eb.check_gradients(
        Words(), torch.randint(0, 5, (T, B)), torch.randn(T, B, H), loss, "rtrl"
    )
    assert report.ok and report["embed.weight"].norm > 1e-3


def test_random_model_is_compared_in_evaluation_mode():
    class Dropped(Net):
        def forward(self, x):
            return self.out(nn.functional.dropout(self.gru(x)[0], 0.5, self.training))

    model = Dropped()
    report = eb.check_gradients(model, *data(), mse_loss, "rtrl")
    assert report.ok and model.training
    assert any("evaluation mode" in note for note in report.notes)


def test_hooks_on_parameters_are_part_of_the_gradient():
    model, xs, ys, plain = shared("rtrl")
    handle = model.out.bias.register_hook(lambda g: 3 * g)
    hooked = eb.check_gradients(model, xs, ys, mse_loss, "rtrl")
    handle.remove()
    assert hooked.ok
    np.testing.assert_allclose(
        hooked["out.bias"].torch_gradient, 3 * plain["out.bias"].torch_gradient, rtol=1e-9
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "nonsense"}, "There is no rule 'nonsense'"),
        ({"rule": []}, "empty list"),
        ({"dtype": "float16"}, "`dtype` is 'float16'"),
        ({"chunk": 0}, "`chunk` is 0"),
        ({"loss": None}, "`loss` is a NoneType"),
        ({"mask": torch.ones(3)}, "`mask` has shape"),
        ({"mask": torch.zeros(T)}, "no step with a positive weight"),
        (
            {"allow_zero": ["nope"]},
            "`allow_zero` names parameters that the model does not train: nope",
        ),
        ({"reduction": "max"}, "`reduction` is 'max'"),
        ({"xs": torch.randn(T)}, "needs a time axis and a batch axis"),
        ({"model": "a string"}, "takes a torch or brainstate module, not a `str`"),
    ],
)
def test_bad_use_is_explained(change, message):
    xs, ys = data()
    given = {"model": Net(), "xs": xs, "targets": ys, "loss": mse_loss, "rule": "rtrl"} | change
    with pytest.raises(eb.InputError, match=message):
        eb.check_gradients(**given)


def test_a_bridged_module_is_not_the_torch_model():
    with pytest.raises(eb.InputError, match=r"Pass `net\.model`"):
        eb.check_gradients(eb.wrap(Net()), *data(), mse_loss)


# ---- files


def test_report_as_dict_json_html_and_picture(tmp_path):
    report = shared("d_rtrl")[-1]
    content = report.to_dict()
    assert (
        json.loads(report.to_json(tmp_path / "r.json"))
        == content
        == json.loads((tmp_path / "r.json").read_text())
    )
    assert content["ok"] is True and [p["name"] for p in content["parameters"]] == list(
        report.parameters
    )
    page = report.to_html(tmp_path / "r.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and all(name in page for name in report.parameters)
    assert (
        "http://" not in page
        and "https://" not in page
        and "<script" not in page
        and "src=" not in page
    )
    figure = report.plot(tmp_path / "r.png")
    assert len(figure.axes) == 3 and (tmp_path / "r.png").stat().st_size > 5000
    with pytest.raises(eb.InputError, match="Cannot write"):
        report.to_html(tmp_path / "no" / "r.html")
    with pytest.raises(eb.InputError, match="no parameter `x` in this report"):
        report["x"]


def test_budget_is_read():
    assert (
        parse_bytes("500MB") == 500_000_000
        and parse_bytes("2 GiB") == 2**31
        and parse_bytes("1.5kb") == 1500
    )
    assert parse_bytes(12) == 12
    for bad in ("much", "-5MB", "5 apples", 0, -1, True, float("inf")):
        with pytest.raises(eb.InputError, match="`budget` is"):
            parse_bytes(bad)


def test_budgets_of_learner_and_rule_are_text_or_numbers():
    options = [
        eb.OnlineLearner(torch.nn.GRU(2, 3), budget=budget).runtime.options
        for budget in ("2kB", 2000, None)
    ]
    assert [o.budget for o in options] == [2000, 2000, None]
    assert eb.rules.LowRankRTRL(max_bytes="2kB") == eb.rules.LowRankRTRL(max_bytes=2000)
    assert eb.rules.make_rule("low_rank:max_bytes=2kB").max_bytes == 2000
    with pytest.raises(eb.InputError, match="`budget` is 'much'"):
        eb.OnlineLearner(torch.nn.GRU(2, 3), budget="much")
    with pytest.raises(eb.InputError, match="`max_bytes` is 0"):
        eb.rules.LowRankRTRL(max_bytes=0)


def test_map_tensors_keeps_structure():
    tree = {"a": (torch.ones(1), [torch.zeros(1)]), "b": 3}
    found = map_tensors(tree, lambda t: t + 1)
    assert (
        found["a"][0].item() == 2
        and found["a"][1][0].item() == 1
        and found["b"] == 3
        and isinstance(found["a"], tuple)
    )


class RootOfState(nn.Module):
    """Found by the fuzzer: the slope of the root at a state of zero is infinite, and torch never
    asks for it at the first state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, H)

    def forward(self, x, h=None):
        h = x.new_zeros(x.shape[0], H) if h is None else h
        v = torch.maximum(self.fc(x), h)
        h = v.abs().sqrt() + v
        return h, h


@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl"])
def test_an_infinite_slope_at_the_first_state_is_reported_not_hidden(rule):
    """A limit, said in docs/limits.md: the online gradient is NaN where torch's is finite, and the
    report says so.
    """
    torch.manual_seed(0)
    report = eb.check_gradients(
        RootOfState(), torch.randn(T, B, IN), torch.randn(T, B, H), loss=mse_loss, rule=rule
    )
    assert not report.ok and "nan" in str(report)
    assert all(math.isfinite(report[name].norm) for name in ("fc.weight", "fc.bias"))
