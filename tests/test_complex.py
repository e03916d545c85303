"""Complex numbers: every value becomes two real ones, and gradients follow torch's convention."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.frontend.complex import split_complex
from etrace_bridge.frontend.trace import trace_function

B, H, T = 2, 3, 6


def complex_normal(*shape: int, scale: float = 0.5) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.complex128)


class Rotating(nn.Module):
    """A diagonal complex recurrence with complex weights; `read` says what of the state is seen."""

    def __init__(self, read: str = "real") -> None:
        super().__init__()
        self.decay = nn.Parameter(
            0.8 * torch.exp(1j * torch.linspace(0.3, 1.2, H)).to(torch.complex128)
        )
        self.inp = nn.Parameter(complex_normal(H, 2))
        self.bias = nn.Parameter(complex_normal(H))
        self.read = read

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], H, dtype=torch.complex128) if h is None else h
        h = self.decay * h + nn.functional.linear(x.to(h.dtype), self.inp, self.bias)
        return {"real": h.real, "complex": h, "abs": h.abs(), "angle": h.angle()}[self.read], h


class ModReLU(nn.Module):
    """A complex RNN with the nonlinearity of unitary RNNs, which no complex derivative describes."""

    def __init__(self) -> None:
        super().__init__()
        self.hh = nn.Parameter(complex_normal(H, H))
        self.ih = nn.Parameter(complex_normal(H, 2))
        self.b = nn.Parameter(torch.randn(H).double())

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], H, dtype=torch.complex128) if h is None else h
        z = h @ self.hh.T + x.to(h.dtype) @ self.ih.T
        h = torch.relu(z.abs() + self.b) * z.sgn()
        return torch.cat([h.real, h.imag], -1), h


class ComplexGate(nn.Module):
    """Complex weights under tanh, sigmoid, division, conjugate, power, exponential and logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.hh, self.ih, self.out = (
            nn.Linear(n, m, dtype=torch.complex128) for n, m in ((H, H), (2, H), (H, 2))
        )

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], H, dtype=torch.complex128) if h is None else h
        z = self.ih(x.to(h.dtype)) + self.hh(h)
        gate = torch.sigmoid(z.conj()) / (2 + z**2)
        h = (
            torch.tanh(z * h.conj())
            + gate * torch.log(3 + torch.exp(0.3j * z))
            + torch.sqrt(2 + z.real**2) * torch.polar(z.abs() + 1, z.imag)
        )
        return self.out(0.3 * h), 0.3 * h


class Clip(torch.autograd.Function):
    """A surrogate on a complex value: a step forwards, its own gradient backwards."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return torch.complex((z.real > 0).to(z.real), (z.imag > 0).to(z.real))

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        return grad * z.conj() / (1 + z.abs() ** 2)


class Spiking(Rotating):
    """A resonate-and-fire layer: its spikes are complex."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, h = super().forward(x, h)
        s = Clip.apply(h - 0.1)
        return torch.view_as_real(s).flatten(-2), h - 0.5 * s


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).abs().square().mean()


MODELS = {
    "real part": (lambda: Rotating("real"), H), "complex output": (lambda: Rotating("complex"), H), "abs": (lambda: Rotating("abs"), H),
    "angle": (lambda: Rotating("angle"), H), "modReLU": (ModReLU, 2 * H), "gate": (ComplexGate, 2), "spiking": (Spiking, 2 * H),
}  # fmt: skip
DIAGONAL = ("real part", "complex output", "abs", "angle", "spiking")


def data(outputs: int) -> tuple[Tensor, Tensor]:
    return torch.randn(T, B, 2).double(), torch.randn(T, B, outputs).double()


@pytest.mark.usefixtures("without_single_steps")
@pytest.mark.parametrize("name", MODELS)
def test_rtrl_gives_torchs_gradient(name: str) -> None:
    make, outputs = MODELS[name]
    report = eb.check_gradients(make(), *data(outputs), loss=squared, rule="rtrl")
    assert report.ok and all(
        p.verdict == "exact" and p.relative_error < 1e-9 and p.norm > 1e-6
        for p in report.parameters.values()
    ), str(report)


@pytest.mark.parametrize("name", ["complex output", "spiking", "modReLU"])
def test_d_rtrl_is_exact_where_it_is_certified(name: str) -> None:
    """A diagonal complex recurrence is a 2×2 block for each position: exact. A complex matrix mixes
    positions, and is not.
    """
    make, outputs = MODELS[name]
    report = eb.check_gradients(make(), *data(outputs), loss=squared, rule="d_rtrl")
    assert report.ok, str(report)
    exact = [p.verdict == "exact" and p.relative_error < 1e-9 for p in report.parameters.values()]
    assert not any(exact) if name == "modReLU" else all(exact)


def test_a_complex_state_is_a_group_of_two() -> None:
    """Real and imaginary part are two states of one group, and nothing that the compiler sees is
    complex.
    """
    x = torch.randn(B, 2).double()
    net = eb.wrap(Rotating(), example_input=x)
    net.init_state(batch_size=B)
    graph = eb.compile_etrace_graph(net, eb.to_jax(x))
    (group,) = graph.hidden_groups
    assert group.num_state == 2 and np.prod(group.varshape) == B * H
    eqns = graph.module_info.jaxpr.eqns
    assert eqns and not any(
        jnp.issubdtype(v.aval.dtype, jnp.complexfloating)
        for e in eqns
        for v in (*e.invars, *e.outvars)
    )
    assert net.parameter_values()["decay"].shape == (H, 2) and net.hidden_values()[0].shape == (
        B,
        H,
        2,
    )
    found = net.state_dict()["decay"]
    assert found.dtype == torch.complex128 and torch.equal(found, net.model.decay)
    with pytest.raises(
        eb.InputError, match="`decay` as `torch.float64`; the model's is `torch.complex128`"
    ):
        net.load_state_dict({n: t.real for n, t in net.state_dict().items()})


RULES = ("rtrl", "d_rtrl", "snap1", "eprop", "pp_prop", "bptt")


class InParts(Rotating):
    """The same model with real numbers only: what a complex model must learn, whatever the rule."""

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a, b = (
            state if state is not None else (x.new_zeros(x.shape[0], H), x.new_zeros(x.shape[0], H))
        )
        decay, inp, bias = (
            self.get_parameter(f"{n}_parts").unbind(-1) for n in ("decay", "inp", "bias")
        )
        a, b = (
            decay[0] * a - decay[1] * b + x @ inp[0].T + bias[0],
            decay[0] * b + decay[1] * a + x @ inp[1].T + bias[1],
        )
        return a, (a, b)

    @classmethod
    def of(cls, model: Rotating) -> InParts:
        twin = cls()
        for name, parameter in model.named_parameters():
            delattr(twin, name)
            twin.register_parameter(
                f"{name}_parts", nn.Parameter(torch.view_as_real(parameter.detach()).clone())
            )
        return twin


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns_as_with_real_and_imaginary_parts(rule: str) -> None:
    """The approximate rules too: their gradient is that of the same model written with two real
    states.
    """
    model = Rotating()
    xs, targets = data(H)
    found, wanted = (
        eb.OnlineLearner(m, rule=rule, loss=nn.functional.mse_loss, chunk=2)
        .gradients(xs, targets)
        .grads
        for m in (model, InParts.of(model))
    )
    assert set(found) == {"decay", "inp", "bias"}
    for name, grad in found.items():
        other = torch.view_as_complex(wanted[f"{name}_parts"])
        assert grad.dtype == torch.complex128 and grad.abs().max() > 1e-4
        assert torch.allclose(grad, other, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("rule", "same"),
    [("low_rank:rank=100", "bptt"), ("low_rank:rank=0", "d_rtrl:credit=chunk"), ("ostl", "bptt")],
)
def test_rules_with_an_influence_have_the_ends_that_real_models_have(rule: str, same: str) -> None:
    """On complex recurrent weights, of which `d_rtrl` drops what crosses from unit to unit."""
    xs, targets = data(2 * H)
    model = ModReLU()
    found, wanted, diagonal = (
        eb.OnlineLearner(model, rule=r, loss=squared, chunk=T if r == "bptt" else 2)
        .gradients(xs, targets)
        .grads
        for r in (rule, same, "d_rtrl")
    )
    for name, grad in wanted.items():
        size = grad.abs().max()
        assert size > 1e-4 and (found[name] - grad).abs().max() < 1e-10 * size, name
    assert (found["hh"] - diagonal["hh"]).abs().max() > 1e-3 * wanted["hh"].abs().max()


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.05, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "nadam, run by torch": lambda ps: torch.optim.NAdam(ps, lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_move_complex_parameters_as_torch_does(name: str) -> None:
    """Three updates by the learner against three of torch's own loop; then torch's optimizer goes
    on by itself.
    """
    model, own = Rotating("complex"), Rotating("complex")
    own.load_state_dict(model.state_dict())
    batches = [data(H) for _ in range(3)]
    learner = eb.OnlineLearner(
        model, rule="d_rtrl", loss=squared, optimizer=OPTIMIZERS[name](model.parameters()), chunk=3
    )
    optimizer = OPTIMIZERS[name](own.parameters())
    start = {n: p.detach().clone() for n, p in own.named_parameters()}
    for xs, targets in batches:
        learner.update(xs, targets)
        torch_update(own, optimizer, xs, targets)
    learner.sync_to_torch()
    for n, p in own.named_parameters():
        assert (p - start[n]).abs().max() > 1e-3
        assert torch.allclose(model.get_parameter(n), p, rtol=1e-9, atol=1e-12), n
    torch_update(own, optimizer, *batches[0])
    torch_update(model, learner.runtime.optimizer, *batches[0])
    assert all(
        torch.allclose(model.get_parameter(n), p, rtol=1e-9, atol=1e-12)
        for n, p in own.named_parameters()
    )


def torch_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, xs: Tensor, targets: Tensor
) -> None:
    optimizer.zero_grad()
    h, losses = None, []
    for x, target in zip(xs, targets, strict=True):
        y, h = model(x, h)
        losses.append(squared(y, target))
    torch.stack(losses).mean().backward()
    optimizer.step()


def test_a_checkpoint_holds_complex_weights_and_goes_on(tmp_path) -> None:
    make = lambda: Rotating("complex")
    xs, targets = data(H)
    learner = eb.OnlineLearner(make(), rule="d_rtrl", loss=squared, optimizer=optax.adam(0.05))
    for x, t in zip(xs[:3], targets[:3], strict=True):
        learner.step(x, t)
    learner.save(tmp_path / "here")
    loaded = eb.OnlineLearner.load(
        tmp_path / "here", make(), loss=squared, optimizer=optax.adam(0.05)
    )
    assert loaded.net.state_dict()["decay"].dtype == torch.complex128
    for x, t in zip(xs[3:], targets[3:], strict=True):
        assert learner.step(x, t).loss == loaded.step(x, t).loss
    learner.sync_to_torch()
    assert all(
        torch.equal(learner.net.state_dict()[n], p) for n, p in learner.net.model.named_parameters()
    )


def test_hooks_and_grad_fields_see_complex_gradients() -> None:
    model = Rotating()
    seen = []
    model.decay.register_hook(lambda g: seen.append(g) or 2 * g)
    plain = Rotating()
    plain.load_state_dict(model.state_dict())
    xs, targets = data(H)
    found, wanted = (
        eb.OnlineLearner(m, rule="d_rtrl", loss=nn.functional.mse_loss).gradients(xs, targets).grads
        for m in (model, plain)
    )
    assert seen[0].dtype == torch.complex128 and torch.allclose(found["decay"], 2 * wanted["decay"])


@pytest.mark.x32
def test_complex64_in_the_default_mode() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(0.5 * torch.randn(H, 2, dtype=torch.complex64))
            self.out = nn.Linear(H, 1, dtype=torch.complex64)

        def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
            h = torch.zeros(x.shape[0], H, dtype=torch.complex64) if h is None else h
            h = 0.7j * h + torch.tanh(x.to(torch.complex64) @ self.w.T)
            return self.out(h).abs(), h

    report = eb.check_gradients(
        Single(),
        torch.randn(T, B, 2),
        torch.randn(T, B, 1),
        loss=nn.functional.mse_loss,
        dtype="float32",
    )
    assert report.ok and report.dtype == "float32", str(report)
    with pytest.raises(eb.NotSupportedError, match="complex128"):
        eb.wrap(Rotating())


def test_a_complex_input_and_a_loss_of_a_complex_output() -> None:
    class Takes(Rotating):
        def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
            h = torch.zeros(x.shape[0], H, dtype=x.dtype) if h is None else h
            h = self.decay * h + x @ self.inp.T + self.bias
            return h, h

    xs, targets = complex_normal(T, B, 2), complex_normal(T, B, H)
    losses = (
        lambda y, t: (y - t).abs().mean(),
        lambda y, t: (y * t.conj()).angle().square().mean(),
        lambda y, t: jnp.mean(jnp.abs(jnp.asarray(y) - t) ** 2),  # written in JAX
    )
    for loss in losses:
        report = eb.check_gradients(Takes(), xs, targets, loss=loss, rule="d_rtrl")
        assert report.ok and all(p.relative_error < 1e-9 for p in report.parameters.values()), str(
            report
        )


def test_writes_in_place_through_parts_of_a_complex_tensor() -> None:
    def forward(z: Tensor, x: Tensor) -> Tensor:
        z, buffer = z.clone(), torch.zeros(2, H, dtype=z.dtype)
        z.real.mul_(2.0)
        z.imag[:, 0] = x[:, 0]
        torch.view_as_real(z)[:, 1, 0] = x[:, 1]
        buffer[1] = z[0] * 1j
        z.conj()[:, 2] += x[:, 2]
        pairs = torch.stack([x, 2 * x], -1)
        torch.view_as_complex(pairs)[:, 0].mul_(1j)
        return torch.cat([z, buffer, torch.view_as_complex(pairs)])

    z, x = complex_normal(2, H), torch.randn(2, H).double()
    weights = complex_normal(6, H)
    leaves = [t.clone().requires_grad_() for t in (z, x)]
    wanted = forward(*leaves)
    grads = torch.autograd.grad((weights.conj() * wanted).sum().real, leaves)
    traced = trace_function(forward)
    total = lambda *a: jnp.sum(jnp.conj(weights.numpy()) * traced(*a)).real
    assert np.allclose(traced(z, x), wanted.detach().numpy(), rtol=1e-12)
    found = jax.grad(total, (0, 1))(jnp.asarray(z.numpy()), jnp.asarray(x.numpy()))
    for a, b in zip(found, grads, strict=True):
        assert np.abs(b.numpy()).max() > 0.1 and np.allclose(np.conj(a), b.numpy(), rtol=1e-12)


UNARY = (
    "exp exp2 expm1 log log1p sqrt sin cos tan sinh cosh tanh sigmoid asin acos atan asinh acosh "
    "atanh rsqrt reciprocal square abs angle sgn conj log2 log10"
).split()


def in_torch_and_bridged(function: Callable, z: Tensor) -> tuple[np.ndarray, ...]:
    """Value and gradient of a weighted sum of a function's values, by torch and by the bridge, in
    torch's convention.
    """
    leaf = z.clone().requires_grad_()
    wanted = function(leaf)
    weights = torch.randn_like(wanted).conj().resolve_conj()
    total = (weights * wanted).sum().real
    (grad,) = torch.autograd.grad(total, leaf)
    traced = trace_function(function)
    value, found = jax.jit(jax.value_and_grad(lambda a: jnp.sum(weights.numpy() * traced(a)).real))(
        jnp.asarray(z.numpy())
    )
    return total.item(), grad.resolve_conj().numpy(), np.asarray(value), np.conj(found)


@pytest.mark.parametrize("part", range(3))
def test_functions_of_complex_numbers(part: int) -> None:
    """Values and gradients in all quadrants, near the unit circle and near 0, against torch."""
    z = torch.randn(40, dtype=torch.complex128)
    z[:8] *= 1e-6
    z[8:16] /= z[8:16].abs()
    z[16:20] *= 50
    for name in UNARY[part::3]:
        use = z[:16] if name in ("sinh", "cosh", "sin", "cos", "exp", "exp2", "expm1") else z
        value, grad, found_value, found = in_torch_and_bridged(getattr(torch, name), use)
        assert np.allclose(found_value, value, rtol=1e-9), name
        assert np.allclose(found, grad, rtol=1e-8), name


STRUCTURAL: dict[str, Callable[[Tensor], Tensor]] = {
    "gather and scatter": lambda z: torch.zeros_like(z).index_add(
        0, torch.tensor([2, 0, 2, 1] * 10), z[torch.arange(40).flip(0)]
    ),
    "scatter": lambda z: torch.zeros_like(z).scatter(0, torch.tensor([3, 1, 2]), z[:3] * 1j),
    "cumulative": lambda z: z[:5].cumsum(0) + z[:5].cumprod(0) + z[5:9].prod(),
    "convolution": lambda z: torch.nn.functional.conv1d(z[:9].view(1, 1, 9), z[9:12].view(1, 1, 3)),
    "product": lambda z: (
        torch.einsum("ij,jk,k->i", z[:6].view(2, 3), z[6:15].view(3, 3).conj(), z[15:18])
        * z[:2].real
    ),
    "variance, vdot, resolve_conj": lambda z: (
        z.var() + torch.vdot(z[:5], z[5:10]) + z.conj().resolve_conj()[0]
    ),
    "power": lambda z: z[:5] ** 3 + z[:5] ** z[5:10] + (z[:5] + 1) ** -2 + z[:5] ** 0.5,
    "choice": lambda z: (
        torch.where(z.real > 0, z, z.conj() * 2) + torch.nn.functional.pad(z[:38], (1, 1)).roll(1)
    ),
}


@pytest.mark.parametrize("name", STRUCTURAL)
def test_operations_on_complex_arrays(name: str) -> None:
    value, grad, found_value, found = in_torch_and_bridged(
        STRUCTURAL[name], torch.randn(40, dtype=torch.complex128)
    )
    assert (
        np.abs(grad).max() > 0.1
        and np.allclose(found_value, value, rtol=1e-9)
        and np.allclose(found, grad, rtol=1e-9)
    )


def test_derivatives_at_zero_are_torchs() -> None:
    for name in ("abs", "angle", "sgn", "square"):
        _, grad, _, found = in_torch_and_bridged(
            getattr(torch, name), torch.zeros(2, dtype=torch.complex128)
        )
        assert np.array_equal(found, grad), name


def test_an_unknown_operation_is_refused_by_name_and_line() -> None:
    class Sorts(Rotating):
        def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, h = super().forward(x, h)
            return torch.linalg.inv(h.unsqueeze(-1) * h.unsqueeze(-2) + torch.eye(H)).real, h

    net = eb.wrap(Sorts())
    with pytest.raises(
        eb.UnsupportedOpError, match=r"is applied to a complex value, in .*test_complex.py:\d+"
    ):
        net.init_state(batch_size=B)
        net(torch.randn(B, 2).double())


def test_a_jaxpr_without_complex_values_is_left_alone() -> None:
    closed = jax.make_jaxpr(lambda a: a + 1)(jnp.zeros(3))
    assert split_complex(closed, [True], [True]) is closed


@pytest.mark.parametrize(
    "make, dtype",
    [
        (ModReLU, torch.float64),
        (lambda: Rotating("complex"), torch.float64),
        (lambda: Rotating("complex"), torch.complex128),
    ],
    ids=["real output", "complex output", "complex input and output"],
)
def test_torchs_own_backward_through_a_complex_model(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """`OnlineModule`: gradients of weights and of the input, in torch's convention."""
    model, xs = make(), torch.randn(T, B, 2, dtype=dtype, requires_grad=True)
    tilt = complex_normal(1)

    def loss(y: Tensor) -> Tensor:
        return (y * tilt).real.sum() + y.abs().square().sum()

    state, total = None, torch.zeros(()).double()
    for x in xs:
        y, state = model(x, state)
        total = total + loss(y)
    expected = torch.autograd.grad(total, list(model.parameters()))
    (first,) = torch.autograd.grad(loss(model(xs[0])[0]), xs)

    online = eb.OnlineModule(model, rule="rtrl")
    for x in xs:
        loss(online(x)).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and grad.abs().max() > 1
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-10)
    assert xs.grad is not None
    torch.testing.assert_close(xs.grad[0], first[0], rtol=1e-10, atol=1e-10)
