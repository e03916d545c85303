"""The contract of `torch.autograd.Function` in every supported torch: how it is called, and what
its `ctx` and class can say.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import etrace_bridge as eb
from test_frontend_autograd import Spike, check

pytestmark = pytest.mark.usefixtures("without_single_steps")
needs_torch_214 = pytest.mark.skipif(
    not hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype"),
    reason="new in torch 2.14",
)


class Halved(Function):
    """`setup_context`; the backward is not the derivative of the forward."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return grad * x / ctx.factor, None


spike, halved = Spike.apply, Halved.apply


def apply_by_class(x: Tensor) -> Tensor:
    return Spike.apply(x) + Halved.apply(x, 3.0) + Halved.apply(x)


def apply_bound_before(x: Tensor) -> Tensor:
    return spike(x) + halved(x, 3.0) + halved(x)


def apply_bound_in_forward(x: Tensor) -> Tensor:
    first, second = Spike.apply, Halved.apply
    return first(x) + second(x, 3.0) + second(x)


def apply_from_a_subclass(x: Tensor) -> Tensor:
    class Inner(Spike):
        pass

    class InnerHalved(Halved):
        pass

    return Inner.apply(x) + InnerHalved.apply(x, 3.0) + InnerHalved.apply(x)


@pytest.mark.parametrize(
    "function", [apply_by_class, apply_bound_before, apply_bound_in_forward, apply_from_a_subclass]
)
def test_declared_gradient_however_apply_was_bound(function: Any) -> None:
    check(function)


@pytest.mark.parametrize("function", [spike, halved, Spike.apply, Halved.apply])
@pytest.mark.parametrize(
    "guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
def test_the_callers_grad_mode_holds(function: Any, guard: Any) -> None:
    def guarded(x: Tensor) -> Tensor:
        with guard():
            y = function(x)
            assert not y.requires_grad
        return y.clone() * x if guard is torch.inference_mode else y * x

    check(guarded)


def test_grad_mode_after_a_function() -> None:
    def model(x: Tensor) -> Tensor:
        assert torch.is_grad_enabled()
        y = spike(x)
        assert torch.is_grad_enabled() and y.requires_grad
        return y

    check(model)


def test_traced_results_carry_no_torch_graph() -> None:
    """A parameter that requires grad, as an argument: torch must not record what JAX
    differentiates.
    """

    class Weighted(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple:
            x, weight = ctx.saved_tensors
            return 2 * grad * weight, 3 * grad * x

    graphs: list = []

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.h = torch.zeros(3, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y = Weighted.apply(self.h * 0.5 + x, self.weight)
            if type(y) is not Tensor:  # traced
                graphs.append(y.grad_fn)
            self.h = y
            return y

    model = Cell()
    xs, targets = torch.randn(2, 5, 3, 4, dtype=torch.float64).unbind()
    report = eb.check_gradients(model, xs, targets, loss=nn.functional.mse_loss, rule="rtrl")
    assert report.ok, report
    assert graphs and all(graph is None for graph in graphs)


def test_forward_called_by_name_is_plain_code() -> None:
    """`Function.forward(ctx, x)` inside another Function's forward has no gradient of its own."""

    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return Spike.forward(ctx, x) + 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return Spike.backward(ctx, grad) * 2.0

    check(lambda x: Outer.apply(x))


def test_setup_context_called_by_name_is_plain_code() -> None:
    class Outer(Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return Halved.forward(x, factor)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
            Halved.setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple:
            return Halved.backward(ctx, grad)

    check(lambda x: Outer.apply(x, 5.0))


def test_vjp_in_place_of_backward() -> None:
    class Tripled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def vjp(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * grad

    check(lambda x: Tripled.apply(x))


def test_boxed_gradients() -> None:
    """`boxed_grads_call`: `backward` gets one list."""
    if not hasattr(Function, "boxed_grads_call"):
        pytest.skip("not in this torch")

    class Boxed(Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple:
            return x * 1.0, x * 2.0

        @staticmethod
        def backward(ctx: Any, grads: list) -> Tensor:
            second, first = grads.pop(), grads.pop()
            return 5 * first - 7 * second

    check(lambda x: torch.stack(Boxed.apply(x)))


@needs_torch_214
def test_declared_gradient_dtype() -> None:
    class Low(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.set_output_grad_dtype(torch.float32)
            return x.double()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert grad.dtype == torch.float32
            return (grad * 3).double()

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((Low.apply(x) * weight).sum(), x)
    traced = eb.trace_function(lambda a: Low.apply(a))
    found = jax.grad(lambda a: jnp.sum(traced(a) * weight.numpy()))(jnp.array(x.detach().numpy()))
    np.testing.assert_array_equal(np.asarray(found), wanted.numpy())
    assert np.abs(found - 3 * weight.numpy()).max() > 1e-9  # the rounding to float32 is there


@pytest.mark.skipif(
    not hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers"),
    reason="new in torch 2.15",
)
def test_no_gradient_buffer_is_offered() -> None:
    class Fused(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor | None:
            (buffer,) = ctx.input_grad_buffers
            if buffer is None:
                return grad * 2
            buffer += grad * 2
            return None

    check(lambda x: Fused.apply(x))


def test_function_without_backward_is_refused_by_name() -> None:
    class OneWay(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(
        eb.NotSupportedError, match=r"`OneWay` defines neither `backward` nor `vjp`"
    ):
        jax.make_jaxpr(eb.trace_function(lambda x: OneWay.apply(x)))(jnp.ones(3))


def test_part_of_ctx_that_the_bridge_does_not_have() -> None:
    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert not hasattr(ctx, "of_my_own")
            return x * len(ctx.next_functions)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    with pytest.raises(eb.NotSupportedError, match=r"`ctx\.next_functions`"):
        jax.make_jaxpr(eb.trace_function(lambda x: Asks.apply(x)))(jnp.ones(3))


def test_other_threads_and_later_calls_see_plain_torch() -> None:
    """While one thread traces, a Function in another runs as torch runs it; afterwards nothing is
    left behind.
    """
    meta, seen = type(Function), []

    def elsewhere() -> None:
        x = torch.randn(3, requires_grad=True)
        seen.append(torch.autograd.grad(halved(x).sum(), x)[0] - x.detach() / 2)

    def model(x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return spike(x)

    check(model)
    assert len(seen) > 1 and all(difference.abs().max() == 0 for difference in seen)
    assert "__getattribute__" not in vars(meta)
