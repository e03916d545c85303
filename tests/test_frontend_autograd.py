"""Gradients through torch's own ways of changing them: `autograd.Function`, `detach`, `no_grad`,
in-place writes and views.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import etrace_bridge as eb

TOLERANCE = 1e-10


def check(function: Any, *inputs: Tensor, forward_mode: bool = True) -> Any:
    """Compare value and gradient of a torch function with its JAX form, in reverse and forward
    mode; none may be dead.
    """
    inputs = inputs or (torch.randn(3, 4, dtype=torch.float64),)
    tensors = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    floating = [i for i, x in enumerate(tensors) if x.requires_grad]
    wanted = function(*[x.clone() if x.requires_grad else x for x in tensors])
    weight = torch.randn_like(wanted)
    grads = torch.autograd.grad(
        (wanted * weight).sum(), [tensors[i] for i in floating], allow_unused=True
    )
    grads = [
        torch.zeros_like(tensors[i]) if g is None else g
        for i, g in zip(floating, grads, strict=True)
    ]
    assert any(g.abs().max() > 1e-6 for g in grads)

    traced = eb.trace_function(function)
    arrays = [jnp.array(x.detach().numpy()) for x in tensors]
    loss = lambda *xs: jnp.sum(traced(*xs) * weight.numpy())
    np.testing.assert_allclose(jax.jit(traced)(*arrays), wanted.detach(), atol=TOLERANCE)
    found = jax.jit(jax.grad(loss, tuple(floating)))(*arrays)
    for i, (a, b) in enumerate(zip(found, grads, strict=True)):
        np.testing.assert_allclose(a, b, atol=TOLERANCE, err_msg=f"gradient {i}")
    if forward_mode:
        tangents = [
            np.random.randn(*x.shape) if i in floating else np.zeros(x.shape, jax.dtypes.float0)
            for i, x in enumerate(arrays)
        ]
        _, tangent = jax.jvp(loss, tuple(arrays), tuple(tangents))
        expected = sum(
            float((g.numpy() * tangents[i]).sum()) for i, g in zip(floating, grads, strict=True)
        )
        np.testing.assert_allclose(tangent, expected, atol=1e-9)
    return traced


# ---- autograd.Function


class Spike(Function):
    """A step with a triangular surrogate."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad * torch.clamp(1 - v.abs(), min=0)


pre_bound = Spike.apply


def test_surrogate_gradient() -> None:
    check(lambda x: Spike.apply(x) * x)
    check(lambda x: pre_bound(x))


def test_surrogate_is_one_custom_jvp_call() -> None:
    traced = eb.trace_function(lambda x: Spike.apply(x))
    jaxpr = jax.make_jaxpr(traced)(jnp.ones(3))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["custom_jvp_call"]


class Scaled(Function):
    """`setup_context`, a non-tensor argument, an attribute of `ctx`, and None gradients."""

    @staticmethod
    def forward(x: Tensor, factor: float, shift: Tensor) -> Tensor:
        return x.sign() * factor + shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.factor, _ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return (
            grad * ctx.factor * torch.exp(-x.abs()),
            None,
            grad if ctx.needs_input_grad[2] else None,
        )


def test_setup_context_and_other_arguments() -> None:
    check(
        lambda x, s: Scaled.apply(x, 3.0, s),
        torch.randn(2, 3, dtype=torch.float64),
        torch.randn(2, 3, dtype=torch.float64),
    )
    check(lambda x: Scaled.apply(x, 3.0, torch.ones(3, 4, dtype=torch.float64)))


class TwoOutputs(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = a * b
        mask = product > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(a, b, product)
        return product, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        a, b, product = ctx.saved_tensors
        return grad * b * 2, grad * (a + product)


def test_several_inputs_and_outputs() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        product, mask = TwoOutputs.apply(a, b)
        return torch.where(mask, product, 2 * product)

    check(function, torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64))


class Clipped(Function):
    """The identity with a gradient that is clipped: not linear in the cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.3, 0.3)


def test_backward_that_is_not_linear_keeps_reverse_mode() -> None:
    traced = check(lambda x: Clipped.apply(x) * 2, forward_mode=False)
    assert "custom_vjp_call" in str(jax.make_jaxpr(traced)(jnp.ones(3)))


class Nested(Function):
    """A forward that calls another Function, whose gradient must not be used, and a backward that
    does the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Spike.apply(x) * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (Spike.apply(ctx.saved_tensors[0]) + 0.5)


def test_nested_functions() -> None:
    check(lambda x: Nested.apply(x * 2))


class OnceOnly(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.tanh(ctx.saved_tensors[0])


def test_once_differentiable() -> None:
    check(lambda x: OnceOnly.apply(x))


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5.0


def test_mark_dirty() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        InPlace.apply(y)
        return y + 1.0

    check(function)


class Asks(Function):
    """Saves only if its input requires grad, as SpikingJelly's surrogates do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        if ctx.needs_input_grad[0]:
            return grad / (1 + ctx.saved_tensors[0] ** 2)
        return None


def test_requires_grad_inside_forward() -> None:
    check(lambda x: Asks.apply(x))


class UsesParameter(nn.Module):
    """A Function between parameters: its gradient reaches them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.threshold = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, x: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        v = (0.0 if v is None else 0.9 * v) + self.fc(x)
        z = Spike.apply(v - self.threshold)
        v = v - z * self.threshold
        return z, v


def test_function_in_a_module() -> None:
    report = eb.verify(UsesParameter().double(), torch.randn(3, 4, dtype=torch.float64), steps=6)
    assert report.ok and not report.dead, report
    assert set(report.gradients) == {"fc.weight", "fc.bias", "threshold", "input"}


def test_reference_gradients_are_not_those_of_the_forward_code() -> None:
    """The step function itself has a zero gradient: a bridge that differentiates it would give
    zeros.
    """
    gradient = jax.grad(lambda x: eb.trace_function(lambda v: Spike.apply(v))(x).sum())(
        jnp.array([0.25, -0.5, 2.0])
    )
    np.testing.assert_allclose(gradient, [0.75, 0.5, 0.0])


# ---- stopping gradients


def test_detach_and_no_grad() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            a = x * 3
        return x * a + x.detach() * x + (x**2).data

    check(function)


def test_straight_through() -> None:
    check(lambda x: x.sigmoid() + (x.gt(0).to(x) - x.sigmoid()).detach())


def test_in_place_write_under_no_grad_keeps_the_old_gradient() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            y.mul_(10)
            y[0] = 7.0
        return y * x

    check(function)


def test_data_assignment_keeps_the_old_gradient() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.data = y.data.clamp(-1, 1)
        return y * x

    check(function)


def test_detach_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.detach_()
        return y * x

    check(function)


# ---- in-place writes and views


def slice_write(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3] = x[:, :2] * 2
    y[0] *= 3
    y[-1, -1] = x.sum()
    return y.sin()


def chained_views(x: Tensor) -> Tensor:
    y = x * 1.0
    y.t()[1].view(-1)[1:].add_(x[0, 0])
    y.transpose(0, 1).mul_(2)
    return y * x


def read_after_write(x: Tensor) -> Tensor:
    y = x * 1.0
    view, row = y[:, 0], y[1]
    y.add_(1.0)
    row.mul_(3.0)
    return view * 2 + row.sum() + y[1].sum()


def write_into_constant(x: Tensor) -> Tensor:
    buffer = torch.zeros(5, 4, dtype=torch.float64)
    old_view = buffer[1:4]
    for i in range(3):
        buffer[i] = x[i] * (i + 1)
    return old_view.exp() + buffer.sum()


def write_through_constant_view(x: Tensor) -> Tensor:
    buffer = torch.ones(2, 3, 4, dtype=torch.float64)
    buffer[0].copy_(x)
    buffer[:, 1].mul_(x[2])
    return buffer.sum(0) * x


def masked_write(x: Tensor) -> Tensor:
    y = x * 1.0
    y[x > 0] = 2.0
    y[y < -0.5] *= 3.0
    y[x >= 0.1] = -(y[x >= 0.1] ** 2) + 1
    y.masked_fill_(x < -1, 5.0)
    return y * x


def indexed_write(x: Tensor) -> Tensor:
    y = x * 1.0
    y[torch.tensor([0, 2])] = x[:2] * 4
    y[:, [0, 3]] += 1.0
    return y * x


def strided_write(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, ::2] = x[:, 1::2] ** 2
    y.flip(0)[0] = 0.0  # a copy in torch: must not change y
    return y * x


def out_argument(x: Tensor) -> Tensor:
    y = torch.empty(3, 4, dtype=torch.float64)
    torch.mul(x.detach(), 2, out=y)
    return y * x


def inplace_activation(x: Tensor) -> Tensor:
    y = x * 1.0
    torch.nn.functional.relu(y, inplace=True)
    z = y * 2
    return z.mul_(3).add_(x, alpha=2)


def augmented_assignment(x: Tensor) -> Tensor:
    y = x * 1.0
    z = y
    y += 1
    y *= x
    y /= 2
    y **= 2
    return z


@pytest.mark.parametrize(
    "function",
    [
        slice_write,
        chained_views,
        read_after_write,
        write_into_constant,
        write_through_constant_view,
        masked_write,
        indexed_write,
        strided_write,
        out_argument,
        inplace_activation,
        augmented_assignment,
    ],
)
def test_in_place(function: Any) -> None:
    check(function)


def test_slice_writes_stay_structural() -> None:
    """Positions must stay visible to the compiler: slices and concatenation, no scatter."""

    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        y[:, 1:3] = x[:, :2]
        return y

    jaxpr = jax.make_jaxpr(eb.trace_function(function))(jnp.ones((3, 4)))
    assert {eqn.primitive.name for eqn in jaxpr.eqns} <= {"mul", "slice", "concatenate"}


# ---- losses


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (torch.nn.functional.mse_loss, torch.randn(3, 4, dtype=torch.float64)),
        (torch.nn.functional.cross_entropy, torch.tensor([0, 3, 1])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([0, 3, 1])),
        (nn.NLLLoss(reduction="sum"), torch.tensor([0, 3, 1])),
        (nn.HuberLoss(), torch.randn(3, 4, dtype=torch.float64)),
        (nn.BCEWithLogitsLoss(), torch.rand(3, 4, dtype=torch.float64)),
        (nn.SmoothL1Loss(), torch.randn(3, 4, dtype=torch.float64)),
        (nn.L1Loss(), torch.randn(3, 4, dtype=torch.float64)),
        (
            lambda y, t: ((y - t) ** 2).mean() + y.abs().max(),
            torch.randn(3, 4, dtype=torch.float64),
        ),
    ],
)
def test_losses(loss: Any, target: Tensor) -> None:
    check(lambda y: loss(y, target))
    traced = eb.trace_function(loss)
    y = torch.randn(3, 4, dtype=torch.float64)
    np.testing.assert_allclose(traced(jnp.array(y.numpy()), target), loss(y, target), atol=1e-12)
    np.testing.assert_allclose(
        traced(y.numpy(), jnp.array(target.numpy())), loss(y, target), atol=1e-12
    )
