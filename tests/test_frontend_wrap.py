"""`wrap` on torch modules: the contract, names, state dicts, modes, randomness, and that the torch
model is never changed.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb

B, I, H, T = 3, 4, 5, 6  # noqa: E741


class Readout(nn.Module):
    """A two-layer GRU with a linear readout."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(I, H, num_layers=2, batch_first=batch_first), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[0])


def run(net: eb.BridgedModule, xs: Tensor) -> np.ndarray:
    return np.stack([np.asarray(net(x)) for x in xs])


def double(module: nn.Module) -> nn.Module:
    return module.double()


def primitives(net: eb.BridgedModule, x: Any) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in net.traced_step(jnp.asarray(x)).jaxpr.jaxpr.eqns)


# ---- the contract


def test_readme_example() -> None:
    model = double(nn.GRU(32, 128))
    net = eb.wrap(model)
    net.init_state(batch_size=16)
    x = torch.randn(16, 32, dtype=torch.float64)
    y = net(x)
    assert (
        isinstance(net, brainstate.nn.Module) and isinstance(y, jax.Array) and y.shape == (16, 128)
    )
    np.testing.assert_allclose(y, model(x[None])[0][0].detach(), atol=1e-12)
    assert net.parameter_names == tuple(name for name, _ in model.named_parameters())


def test_paths_are_torch_names_split_at_dots() -> None:
    net = eb.wrap(Readout())
    net.init_state(B)
    states = net.states()
    trained = {path for path, state in states.items() if isinstance(state, brainstate.ParamState)}
    hidden = {path for path, state in states.items() if isinstance(state, brainstate.HiddenState)}
    assert trained == {tuple(name.split(".")) for name in net.parameter_names}
    assert hidden == {("gru", "h_l0"), ("gru", "h_l1")} == set(net.hidden_paths)
    assert states["gru", "h_l0"].value.shape == (B, H)


@pytest.mark.parametrize("batch_first", [False, True])
def test_steps_equal_the_whole_sequence(batch_first: bool) -> None:
    model = double(Readout(batch_first))
    net = eb.wrap(model)
    net.init_state(B)
    xs = torch.randn(T, B, I, dtype=torch.float64)
    wanted = model(xs.transpose(0, 1)).transpose(0, 1) if batch_first else model(xs)
    found = run(net, xs)
    np.testing.assert_allclose(found, wanted.detach(), atol=1e-12)
    assert net.batch_first is batch_first
    assert np.abs(found[-1] - found[0]).max() > 1e-3


@pytest.mark.parametrize(("kind", "products"), [(nn.GRU, 4), (nn.LSTM, 4), (nn.RNN, 4)])
def test_one_product_per_weight(kind: type, products: int) -> None:
    net = eb.wrap(kind(I, H, num_layers=2))
    net.init_state(B)
    found = primitives(net, np.ones((B, I), np.float32))
    assert found["dot_general"] == products
    assert not set(found) & {
        "pjit",
        "jit",
        "transpose",
        "convert_element_type",
        "copy",
        "concatenate",
        "gather",
        "squeeze",
        "reshape",
    }


def test_module_path_and_user_line_reach_the_jaxpr() -> None:
    net = eb.wrap(Readout())
    net.init_state(B)
    step = brainstate.transform.StatefulFunction(net)
    x = jnp.ones((B, I), jnp.float32)
    step.make_jaxpr(x)
    products = [eqn for eqn in step.get_jaxpr(x).eqns if eqn.primitive.name == "dot_general"]
    assert [str(eqn.source_info.name_stack) for eqn in products] == ["gru"] * 4 + ["fc"]
    assert all(
        any("test_frontend_wrap" in f.file_name for f in eqn.source_info.traceback.frames)
        for eqn in products
    )


def test_stepping_works_under_jit_grad_and_scan() -> None:
    model = double(Readout())
    net = eb.wrap(model)
    net.init_state(B)
    xs = torch.randn(T, B, I, dtype=torch.float64)
    found = brainstate.transform.for_loop(net, jnp.array(xs.numpy()))
    np.testing.assert_allclose(found, model(xs).detach(), atol=1e-12)

    net.reset_state()
    grads = brainstate.transform.grad(
        lambda: jnp.sum(jnp.sin(brainstate.transform.for_loop(net, jnp.array(xs.numpy())))),
        net.states(brainstate.ParamState),
    )()
    model(xs).sin().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6
        np.testing.assert_allclose(
            grads[tuple(name.split("."))], parameter.grad, atol=1e-10, err_msg=name
        )


def test_init_state_resets_and_keeps_the_state_objects() -> None:
    net = eb.wrap(nn.GRU(I, H))
    net.init_state(B)
    state, x = net.states()["h_l0",], torch.randn(B, I)
    first = np.asarray(net(x))
    assert np.abs(np.asarray(net(x)) - first).max() > 1e-4
    net.init_state(B)
    assert net.states()["h_l0",] is state and not np.asarray(state.value).any()
    np.testing.assert_array_equal(net(x), first)
    net.init_state(batch_size=7)
    assert net(torch.randn(7, I)).shape == (7, H)


def test_unbatched() -> None:
    model = double(nn.LSTM(I, H))
    net = eb.wrap(model)
    net.init_state(batch_size=None)
    xs = torch.randn(T, I, dtype=torch.float64)
    np.testing.assert_allclose(run(net, xs), model(xs)[0].detach(), atol=1e-12)
    assert net.states()["c_l0",].value.shape == (H,)


def test_arrays_of_every_kind_and_numpy_float64() -> None:
    net = eb.wrap(nn.GRU(I, H))
    x = np.random.randn(B, I)
    results = []
    for given in (x, torch.tensor(x, dtype=torch.float32), jnp.array(x, jnp.float32)):
        net.init_state(B)
        results.append(np.asarray(net(given)))
        assert results[-1].dtype == np.float32
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)
    np.testing.assert_array_equal(results[1], results[2])


def test_several_inputs() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.cell = nn.Linear(2, I), nn.GRUCell(I, H)

        def forward(
            self, x: Tensor, context: Tensor, h: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            h = self.cell(x + self.a(context), h)
            return h * 2, h

    model = TwoInputs()
    x, context = torch.randn(B, I), torch.randn(B, 2)
    net = eb.wrap(model, example_input=(x, context))
    net.init_state(B)
    net(x, context)
    _, h = model(x, context)
    np.testing.assert_allclose(net(x, context), model(x, context, h)[0].detach(), atol=1e-6)
    assert net.hidden_paths == (("h",),)


class SequenceAndExtra(nn.Module):
    """A second input that is required and meets the output of a sequence layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(I, H), nn.Linear(H + 2, 2)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return self.out(torch.cat([self.gru(x)[0], extra], -1))


def test_several_inputs_need_no_example() -> None:
    """The states wait for the first call, which shows all inputs."""
    model = SequenceAndExtra()
    xs, extras = torch.randn(4, B, I), torch.randn(4, B, 2)
    net = eb.wrap(model)
    net.init_state(B)
    found = np.stack([net(x, extra) for x, extra in zip(xs, extras, strict=True)])
    np.testing.assert_allclose(found, model(xs, extras).detach(), atol=1e-6)


def test_a_learner_with_several_inputs_needs_no_example() -> None:
    model = SequenceAndExtra().double()
    xs, extras, ys = (torch.randn(4, B, n, dtype=torch.float64) for n in (I, 2, 2))
    learner = eb.OnlineLearner(model, rule="bptt", loss=nn.functional.mse_loss)
    found = learner.gradients((xs, extras), ys).grads
    nn.functional.mse_loss(model(xs, extras), ys).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)


def test_an_argument_that_may_be_an_input_is_named_in_the_error() -> None:
    net = eb.wrap(SequenceAndExtra())
    net.init_state(B)
    with pytest.raises(
        eb.InputError,
        match=r"fails without `extra`.*call the model with all its inputs.*example_input=\(x, \.\.\.\)",
    ):
        net(torch.randn(B, I))


def test_deepcopy_is_independent() -> None:
    net = eb.wrap(nn.GRU(I, H))
    net.init_state(B)
    other = copy.deepcopy(net)
    x = torch.randn(B, I)
    net(x)
    assert not np.asarray(other.states()["h_l0",].value).any()
    np.testing.assert_array_equal(other(x), net.states()["h_l0",].value)


# ---- parameters, buffers, state dicts


class Mixed(nn.Module):
    """A frozen and a tied parameter, a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(H, H), nn.Linear(H, H, bias=False)
        self.rec.weight = self.inp.weight
        self.scale = nn.Parameter(torch.rand(H), requires_grad=False)
        self.register_buffer("shift", torch.randn(H))
        self.register_buffer("index", torch.tensor([4, 3, 2, 1, 0]))
        self.register_buffer("hidden_constant", torch.ones(H), persistent=False)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        h = torch.zeros_like(x) if h is None else h
        return torch.tanh(
            self.inp(x)
            + self.rec(h[:, self.index]) * self.scale
            + self.shift * self.hidden_constant
        )


def test_tied_frozen_and_buffers() -> None:
    model = double(Mixed())
    net = eb.wrap(model)
    net.init_state(B)
    assert net.parameter_names == ("inp.weight", "inp.bias")
    assert net.tied_names == {"inp.weight": ("inp.weight", "rec.weight")}
    kinds = {".".join(path): type(state) for path, state in net.states().items()}
    assert kinds == {
        "inp.weight": brainstate.ParamState, "inp.bias": brainstate.ParamState, "scale": eb.BufferState, "shift": eb.BufferState,
        "hidden_constant": eb.BufferState, "h": brainstate.HiddenState,
    }  # fmt: skip
    xs = torch.randn(T, B, H, dtype=torch.float64)
    h, wanted = None, []
    for x in xs:
        h = model(x, h)
        wanted.append(h.detach().numpy())
    np.testing.assert_allclose(run(net, xs), np.stack(wanted), atol=1e-12)


def test_state_dict_round_trip() -> None:
    model, other = Mixed(), Mixed()
    net = eb.wrap(model)
    found = net.state_dict()
    assert list(found) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    net.load_state_dict(other.state_dict())
    net.init_state(B)
    x = torch.randn(B, H)
    np.testing.assert_allclose(net(x), other(x).detach(), atol=1e-6)
    other.load_state_dict(found)
    assert torch.equal(other.inp.weight, model.inp.weight)


def test_state_dict_is_a_copy() -> None:
    model = nn.GRU(I, H)
    net = eb.wrap(model)
    before = net.state_dict()
    net.state_dict()["weight_ih_l0"].zero_()
    with torch.no_grad():
        model.weight_hh_l0.zero_()
    assert torch.equal(net.state_dict()["weight_ih_l0"], before["weight_ih_l0"])
    assert torch.equal(net.state_dict()["weight_hh_l0"], before["weight_hh_l0"])


def test_load_state_dict_names_what_does_not_fit() -> None:
    net = eb.wrap(nn.GRU(I, H))
    good = net.state_dict()
    bad = {name: value for name, value in good.items() if name.startswith("weight")} | {
        "zz": torch.ones(1),
        "aa": torch.ones(1),
    }
    with pytest.raises(
        eb.InputError, match=r"Missing names: bias_hh_l0, bias_ih_l0\. Unexpected names: aa, zz\."
    ):
        net.load_state_dict(bad)
    net.load_state_dict(bad, strict=False)
    with pytest.raises(
        eb.InputError, match=r"`weight_ih_l0` of shape \(2, 2\); the model's is \(15, 4\)"
    ):
        net.load_state_dict(good | {"weight_ih_l0": torch.ones(2, 2)})


def test_load_state_dict_reaches_buffers_without_a_new_trace() -> None:
    model = Mixed()
    net = eb.wrap(model)
    net.init_state(B)
    x = torch.randn(B, H)
    net(x)
    with torch.no_grad():
        model.shift.add_(1.0)
        model.scale.mul_(2.0)
    net.load_state_dict(model.state_dict())
    net.init_state(B)
    np.testing.assert_allclose(net(x), model(x).detach(), atol=1e-6)


# ---- the torch model is never changed


class Leaky(nn.Module):
    """Keeps its membrane in an attribute, a spike count in a buffer and a history in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(I, H)
        self.v: Any = None
        self.log: list[str] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.v is None:
            self.v = torch.zeros(x.shape[0], H)
        self.v = 0.9 * self.v + self.fc(x)
        self.log.append("step")
        self.count += 1
        if x.shape[0] == 13:
            raise ValueError("thirteen")
        return self.v


def fingerprint(model: nn.Module) -> Any:
    attributes = {k: repr(v) for m in model.modules() for k, v in m.__dict__.items()}
    values = {
        name: (id(t), t._version, t.detach().clone())
        for name, t in model.state_dict(keep_vars=True).items()
    }
    return attributes, values


def assert_same(before: Any, after: Any) -> None:
    assert before[0] == after[0]
    for name, (identity, _, value) in before[1].items():
        assert after[1][name][0] == identity and torch.equal(after[1][name][2], value), name


def test_model_is_not_changed_by_wrapping_calling_or_failing() -> None:
    model = Leaky()
    before, rng = fingerprint(model), torch.get_rng_state()
    net = eb.wrap(model)
    net.init_state(B)
    for _ in range(3):
        net(torch.ones(B, I))
    assert_same(before, fingerprint(model))
    with pytest.raises(ValueError, match="thirteen"):
        net.init_state(13)
        net(torch.ones(13, I))
    assert_same(before, fingerprint(model))
    assert torch.equal(rng, torch.get_rng_state())
    assert (
        nn.Module.__call__ is nn.Module.__dict__["__call__"]
        and "apply" not in torch.autograd.function._SingleLevelFunction.__dict__
    )


def test_weights_are_copied_both_ways() -> None:
    model = nn.GRU(I, H)
    net = eb.wrap(model)
    net.init_state(B)
    x = torch.randn(B, I)
    wanted = np.asarray(net(x)).copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    net.init_state(B)
    np.testing.assert_array_equal(net(x), wanted)


class Aliased(nn.Module):
    """Uses its weight also through `.data` and an old view: current values, and no gradient where
    torch has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H, bias=False)
        self.frozen, self.row = self.fc.weight.data, self.fc.weight.detach()[1]

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = torch.zeros_like(x) if h is None else h
        h = torch.tanh(self.fc(x) + h @ self.frozen + self.row)
        return h, h


def test_aliases_of_a_parameter() -> None:
    module = double(Aliased())
    module.frozen, module.row = module.fc.weight.data, module.fc.weight.detach()[1]
    x = torch.randn(B, H, dtype=torch.float64)
    report = eb.verify(module, x)
    assert report.ok and not report.dead, report
    net = eb.wrap(module)
    net.init_state(B)
    changed = {"fc.weight": torch.eye(H, dtype=torch.float64)}
    net.load_state_dict(changed)
    np.testing.assert_allclose(
        net(x), torch.tanh(x + torch.eye(H, dtype=torch.float64)[1]), atol=1e-12
    )


# ---- modes and randomness


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.cell = nn.Dropout(0.5), nn.GRUCell(I, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(self.drop(x), h)
        return h, h


def test_dropout_follows_the_mode_and_the_seed() -> None:
    model, x = Noisy(), torch.ones(64, I)
    nets = [eb.wrap(model, seed=seed) for seed in (0, 0, 1)]
    for net in nets:
        net.init_state(64)
    first = [np.asarray(net(x)) for net in nets]
    np.testing.assert_array_equal(first[0], first[1])
    assert np.abs(first[0] - first[2]).max() > 1e-3
    nets[0].reset_state()
    assert np.abs(np.asarray(nets[0](x)) - first[0]).max() > 1e-3  # the key moved on: another draw
    key_states = [
        path for path, state in nets[0].states().items() if type(state).__name__ == "KeyState"
    ]
    assert len(key_states) == 1

    model.eval()
    net = eb.wrap(model)
    net.init_state(64)
    np.testing.assert_allclose(net(x), model(x)[0].detach(), atol=1e-6)
    assert not [path for path, state in net.states().items() if type(state).__name__ == "KeyState"]


def test_mode_change_after_wrap_is_honoured() -> None:
    model, x = Noisy().train(), torch.ones(B, I)
    net = eb.wrap(model)
    net.init_state(B)
    net(x)
    model.eval()
    net.reset_state()
    np.testing.assert_allclose(net(x), model(x)[0].detach(), atol=1e-6)


def test_mode_change_from_eval_to_train_keeps_the_state() -> None:
    model, x = double(Normed()).eval(), torch.randn(B, I, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(B)
    _, h = model(x)
    np.testing.assert_allclose(net(x), h.detach(), atol=1e-12)
    model.train()
    wanted, _ = copy.deepcopy(model)(x, h)
    np.testing.assert_allclose(net(x), wanted.detach(), atol=1e-12)
    assert np.asarray(net.states()["norm", "running_mean"].value).any()
    model.eval()
    net(x)
    assert np.asarray(net.states()["norm", "running_mean"].value).any()


def test_dropout_between_layers_drops_half() -> None:
    model = nn.GRU(I, 400, num_layers=2, dropout=0.5)
    net = eb.wrap(model)
    net.init_state(2)
    assert (
        primitives(net, np.ones((2, I), np.float32))["random_bits"]
        + primitives(net, np.ones((2, I), np.float32))["random_wrap"]
        > 0
    )
    a = np.asarray(net(torch.ones(2, I)))
    net.reset_state()
    assert np.abs(np.asarray(net(torch.ones(2, I))) - a).max() > 1e-3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(I), nn.GRUCell(I, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(self.norm(x), h)
        return h, h


def test_batch_norm_statistics_are_carried_and_not_hidden() -> None:
    model = double(Normed()).train()
    net = eb.wrap(model)
    net.init_state(B)
    assert net.hidden_paths == (("h",),)
    xs = torch.randn(T, B, I, dtype=torch.float64) * 3 + 1
    run(net, xs)
    reference, h = copy.deepcopy(model), None
    for x in xs:
        _, h = reference(x, h)
    found = net.state_dict()
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        np.testing.assert_allclose(
            found[name], reference.state_dict()[name], atol=1e-12, err_msg=name
        )
    assert isinstance(net.states()["norm", "running_mean"], eb.BufferState)
    assert model.norm.num_batches_tracked == 0


# ---- cost


def fastest(function: Any, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def test_tracing_is_fast() -> None:
    net = eb.wrap(Readout())
    net.init_state(B)
    x = jnp.ones((B, I), jnp.float32)

    def trace() -> None:
        net._session.steps.clear()
        net.traced_step(x)

    assert fastest(trace) < 0.2


def test_tracing_a_deep_spiking_stack_is_fast() -> None:
    snntorch = pytest.importorskip("snntorch")
    layers = [
        layer
        for _ in range(50)
        for layer in (nn.Linear(16, 16), snntorch.Leaky(beta=0.9, init_hidden=True))
    ]
    nets = []

    def start() -> None:
        nets.append(eb.wrap(nn.Sequential(*layers)))
        nets[-1].init_state(2)

    assert fastest(start, 2) < 3.0
    assert len(nets[-1].hidden_paths) == 50
