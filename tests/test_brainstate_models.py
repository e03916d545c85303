"""brainstate modules as models: gradients beside `jax.grad`, units, random keys, sparse products,
the user's own weights.
"""

from __future__ import annotations

from pathlib import Path

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import etrace_bridge as eb
from etrace_bridge.check.module_reference import flat_gradient, module_reference
from etrace_bridge.check.rule_comparison import RuleComparison

T, B, I, H = 6, 3, 2, 4  # noqa: E741


class RNN(brainstate.nn.Module):
    """A plain recurrent module with a readout."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.inner = brainstate.nn.Linear(I, H)
        self.recurrent = brainstate.nn.Linear(H, H)
        self.out = brainstate.nn.Linear(H, 2)
        self.noise, self.rng = noise, brainstate.random.RandomState(3)

    def init_state(self, batch_size: int, **_) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        x = x + self.noise * self.rng.normal(size=x.shape) if self.noise else x
        self.h.value = jnp.tanh(self.inner(x) + self.recurrent(self.h.value))
        return self.out(self.h.value)


class Membrane(brainstate.nn.Module):
    """A leaky membrane in mV, driven through weights in mA, with a time constant in ms that is
    learned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = brainstate.ParamState(brainstate.random.randn(I, H) * u.mA)
        self.tau = brainstate.ParamState(jnp.asarray(5.0) * u.ms)

    def init_state(self, batch_size: int, **_) -> None:
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, H)) * u.mV)

    def update(self, x):
        current = x @ self.w.value
        self.V.value = self.V.value + (current * (1.0 * u.ohm) - self.V.value) / self.tau.value * (
            1.0 * u.ms
        )
        return self.V.value / u.mV


def data(outputs: int = 2):
    draw = np.random.default_rng(1)
    return jnp.asarray(draw.standard_normal((T, B, I))), jnp.asarray(
        draw.standard_normal((T, B, outputs))
    )


def squared(output, target):
    return jnp.mean((output - target) ** 2)


def reference(net, xs, targets):
    brainstate.nn.init_all_states(net, batch_size=B)
    return module_reference(net, [xs], targets, squared, np.full(T, 1 / T)).grads


def assert_grads(found: dict, wanted: dict, tolerance: float = 1e-9) -> None:
    assert set(found) == set(wanted)
    for name, e in wanted.items():
        assert np.abs(e).max() > 1e-6, f"{name}: nothing to compare"
        np.testing.assert_allclose(
            flat_gradient(found[name]), e, rtol=0, atol=tolerance * np.abs(e).max()
        )


def test_gradients_have_the_names_of_the_report_and_the_module_learns() -> None:
    net, (xs, targets) = RNN(), data()
    wanted = reference(net, xs, targets)
    learner = eb.OnlineLearner(net, "rtrl", squared, optax.sgd(0.1), chunk=2)
    result = learner.gradients(xs, targets)
    assert_grads(result.grads, wanted)
    assert set(result.grads["inner.weight"]) == {"weight", "bias"}
    assert all(name in learner.graph.report() for name in result.grads)
    assert isinstance(result.outputs, jax.Array) and isinstance(learner.predict(xs), jax.Array)
    before = np.asarray(net.inner.weight.value["weight"]).copy()
    learner.update(xs, targets)
    moved = (before - np.asarray(net.inner.weight.value["weight"])) / 0.1
    np.testing.assert_allclose(moved, np.asarray(result.grads["inner.weight"]["weight"]), atol=1e-9)


def test_check_gradients_of_a_module(tmp_path: Path) -> None:
    net, (xs, targets) = RNN(), data()
    report = eb.check_gradients(net, xs, targets, squared, rule="rtrl")
    assert report.ok and {p.name for p in report} == {
        "inner.weight",
        "recurrent.weight",
        "out.weight",
    }
    wrong = eb.check_gradients(net, xs, targets, squared, rule="d_rtrl")
    assert 0.5 < min(p.cosine for p in wrong) < 1 - 1e-6
    silent = eb.check_gradients(net, 0 * xs, targets, squared, rule="rtrl")
    assert not silent.ok
    # whatever shows a report says what the rule was compared with
    both = RuleComparison((report, wrong))
    page = both.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    shown = [str(report), repr(wrong), report._repr_html_(), str(silent), str(both), page]
    for text in [*shown, both._repr_html_(), both.to_json()]:
        assert "jax.grad through time" in text and "torch BPTT" not in text
    assert "jax.grad through time" in report.plot().get_suptitle()


def test_units_stay_and_gradients_have_the_inverse() -> None:
    net, (xs, targets) = Membrane(), data(H)
    wanted = reference(net, xs, targets)
    learner = eb.OnlineLearner(net, "rtrl", squared, optax.sgd(0.1), chunk=2)
    grads = learner.gradients(xs, targets).grads
    assert_grads(
        jax.tree.map(u.get_magnitude, grads, is_leaf=lambda x: isinstance(x, u.Quantity)), wanted
    )
    assert grads["w"].unit == 1 / u.mA and grads["tau"].unit == 1 / u.ms
    learner.update(xs, targets)
    assert net.w.value.unit == u.mA and net.V.value.unit == u.mV
    np.testing.assert_allclose(
        net.tau.value.to_decimal(u.ms), 5.0 - 0.1 * wanted["tau"][0], rtol=1e-9
    )


def test_random_numbers_of_a_module() -> None:
    net, (xs, targets) = RNN(noise=0.5), data()
    wanted = reference(net, xs, targets)
    learner = eb.OnlineLearner(net, "rtrl", squared, chunk=2)
    first = learner.gradients(xs, targets)
    assert_grads(first.grads, wanted)
    assert learner.gradients(xs, targets).loss != first.loss


def test_packed_sequences_are_padded_sequences_with_a_mask() -> None:
    net, (xs, targets) = RNN(), data()
    lengths = torch.tensor([6, 3, 1])
    packed = pack_padded_sequence(torch.tensor(np.asarray(xs)), lengths)
    learner = eb.OnlineLearner(net, "bptt", squared)
    wanted = learner.gradients(xs, targets, eb.length_mask(lengths)).grads
    found = learner.gradients(packed, targets).grads
    assert_grads(found, {name: flat_gradient(g) for name, g in wanted.items()})


def test_one_example_at_a_time() -> None:
    net, (xs, targets) = RNN(), data()
    stream = eb.StreamLearner(net, rule="bptt", loss=squared, optimizer=optax.sgd(0.1))
    expected = stream.learner.predict(xs[:1, :1])[0, 0]
    np.testing.assert_array_equal(stream.predict_one(xs[0, 0]), expected)
    stream.learn_one(xs[0, 0], targets[0, 0])
    assert np.abs(stream.predict_one(xs[0, 0]) - expected).max() > 1e-3


class Dropped(RNN):
    """The same with brainstate's dropout and batch norm, whose mode is `fit` of its environment."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = brainstate.nn.Dropout(0.5), brainstate.nn.BatchNorm0d((H,))

    def update(self, x):
        self.h.value = jnp.tanh(self.inner(x) + self.recurrent(self.h.value))
        return self.out(self.drop(self.norm(self.h.value)))


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    """Without a word about `fit`, and in the reference too; `fit` given by the user holds."""
    net, (xs, targets) = Dropped(), data()
    wanted = reference(net, xs, targets)
    learner = eb.OnlineLearner(net, "rtrl", squared, chunk=2)
    first = learner.gradients(xs, targets)
    assert_grads(first.grads, wanted)
    assert learner.gradients(xs, targets).loss != first.loss
    np.testing.assert_array_equal(learner.predict(xs), learner.predict(xs))
    with brainstate.environ.context(fit=False):
        still = eb.OnlineLearner(net, "bptt", squared)
        assert still.gradients(xs, targets).loss == still.gradients(xs, targets).loss


class Leaky(brainstate.nn.Module):
    """A leaky state behind a layer."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def init_state(self, batch_size: int, **_) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(x))
        return self.h.value


@pytest.mark.parametrize("library", ["brainunit", "brainevent", "braintrace"])
def test_sparse_products_are_contacts(library: str) -> None:
    """The reference is the same model with a dense matrix: JAX differentiates `x @ CSR` wrongly,
    brainevent needs numba for it.
    """
    from brainevent import CSR

    dense = np.random.default_rng(2).uniform(0.2, 1, (I, H)) * (
        np.arange(I * H).reshape(I, H) % 3 != 0
    )
    matrix = (u.sparse.CSR if library == "brainunit" else CSR).fromdense(jnp.asarray(dense))
    layers = pytest.importorskip("braintrace").nn if library == "braintrace" else brainstate.nn
    xs, targets = data(H)
    plain = brainstate.nn.Linear(I, H, w_init=lambda *_, **__: jnp.asarray(dense), b_init=None)
    wanted = reference(Leaky(plain), xs, targets)["layer.weight"].reshape(I, H)[dense != 0]
    learner = eb.OnlineLearner(Leaky(layers.SparseLinear(matrix)), "d_rtrl", squared, chunk=2)
    assert_grads(learner.gradients(xs, targets).grads, {"layer.weight": wanted})
    assert learner.graph.certificate()["layer", "weight"].exact


def test_a_cut_is_not_at_a_line_of_the_library() -> None:
    from brainevent import CSR

    class Sparse(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = CSR.fromdense(jnp.eye(H) + jnp.eye(H, k=1))
            self.w = brainstate.ParamState(self.matrix.data)

        def init_state(self, batch_size: int, **_) -> None:
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

        def update(self, x):
            self.h.value = jnp.tanh(x + self.h.value @ self.matrix.with_data(self.w.value))
            return self.h.value

    net = Sparse()
    net.init_state(B)
    report = eb.compile_etrace_graph(net, jnp.zeros((B, H))).report()
    assert "product with `w`" in report and ".py:" not in report


@pytest.mark.x32
def test_weights_of_numpy_are_of_the_precision_of_jax() -> None:
    """NumPy's float64 is float32 in JAX's 32-bit mode, as in any other JAX program."""
    net, (xs, targets) = RNN(), data()
    xs, targets = np.asarray(xs, np.float32), np.asarray(targets, np.float32)
    for state in net.states(brainstate.ParamState).values():
        state.value = jax.tree.map(lambda a: np.asarray(a, np.float64), state.value)
    learner = eb.OnlineLearner(net, "rtrl", squared, optax.sgd(0.1), chunk=2)
    result = learner.gradients(xs, targets)
    wanted = reference(net, jnp.asarray(xs), jnp.asarray(targets))
    assert_grads(result.grads, wanted, tolerance=1e-5)
    assert np.isfinite(learner.step(xs[0], targets[0]).loss)


@pytest.mark.implicit_promotion("derivatives that braintrace declares promote")
def test_layers_and_operations_of_braintrace_are_plain_ones() -> None:
    """All of them in one layer, against `jax.grad`. A low-rank product is two, so its first weight
    is exact within a chunk only, and the certificate says so.
    """
    braintrace = pytest.importorskip("braintrace")
    nn = braintrace.nn

    class Layers(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.signed, self.scaled = nn.SignedWLinear(I, H), nn.ScaledWSLinear(I, H)
            self.conv, self.grouped = nn.Conv1d((I, 1), 2, 2), nn.GroupedLinear(2, 1, 2)
            self.lora = nn.LoRA(I, 2, H)
            self.w = brainstate.ParamState(brainstate.random.randn(I, H))
            self.gain = brainstate.ParamState(brainstate.random.randn(H))

        def update(self, x):
            flat = lambda y: y.reshape(x.shape[0], H)
            parts = [self.signed(x), self.scaled(x), flat(self.conv(x[..., None])), self.lora(x)]
            parts.append(flat(self.grouped(x[..., None])))
            product = braintrace.matmul(x, self.w.value)
            return sum(parts) + product * braintrace.element_wise(self.gain.value)

    brainstate.random.seed(1)
    net, (xs, targets) = Leaky(Layers()), data(H)
    wanted = reference(net, xs, targets)
    learner = eb.OnlineLearner(net, "d_rtrl", squared, chunk=2)
    found, certificates = learner.gradients(xs, targets).grads, learner.graph.certificate()
    exact = {".".join(path) for path, c in certificates.items() if c.exact}
    assert set(wanted) - exact == {"layer.lora.weight"}
    assert_grads({n: found[n] for n in exact}, {n: wanted[n] for n in exact})
