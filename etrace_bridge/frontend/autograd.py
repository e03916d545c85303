"""`torch.autograd.Function` as a JAX function with the same gradient, in forward and in reverse
mode.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from etrace_bridge._jax_compat import ClosedJaxpr, evaluate_jaxpr
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.complex import (
    from_parts,
    is_complex,
    part_shapes,
    split_into_parts,
    to_parts,
)
from etrace_bridge.frontend.declared_gradient import is_linear, with_jvp, with_vjp
from etrace_bridge.frontend.function_context import Context
from etrace_bridge.frontend.tensor import TracedTensor
from etrace_bridge.frontend.tracer import active


def plain_attribute(cls: type, name: str) -> Any:
    """Return a class attribute of a Function as the class defines it, even while `functions.py`
    replaces it.
    """
    return type.__getattribute__(cls, name)


def defines_setup_context(cls: type) -> bool:
    """Return whether `forward` takes no `ctx` because the class defines `setup_context`."""
    return plain_attribute(cls, "setup_context") is not plain_attribute(
        torch.autograd.Function, "setup_context"
    )


def apply_function(cls: type, args: tuple, kwargs: dict) -> Any:
    """Run a Function's forward on traced tensors and give the result the gradient of its own
    `backward`.
    """
    tracer = active()
    slots = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    values = [tracer.read(args[i]) for i in slots]
    traced = [tracer.find(args[i]) for i in slots]
    needs = tuple(
        isinstance(a, torch.Tensor)
        and (t := tracer.find(a)) is not None
        and t.differentiable
        and torch.is_grad_enabled()
        for a in args
    )
    call = _prepared(cls, args, kwargs, slots, values, needs, tracer.functions)
    outputs = call.function(*values)
    origin = functools.reduce(operator.or_, [t.origin for t in traced if t is not None], 0)
    _write_dirty(call, tracer, args, slots, outputs)
    grad = torch.is_grad_enabled()
    if not grad:
        outputs = [lax.stop_gradient(o) for o in outputs]
    return call.pack([TracedTensor(o, origin=origin, differentiable=grad) for o in outputs])


def _prepared(
    cls: type,
    args: tuple,
    kwargs: dict,
    slots: list[int],
    values: list,
    needs: tuple[bool, ...],
    known: dict,
) -> _FunctionCall:
    """Trace a call, or return an earlier one of this trace with the same class, shapes and other
    arguments.
    """
    others = tuple((i, type(a), a) for i, a in enumerate(args) if i not in slots)
    key = (
        cls,
        others,
        tuple(kwargs.items()),
        tuple((i, v.shape, v.dtype) for i, v in zip(slots, values, strict=True)),
        needs,
    )
    try:
        if key not in known:
            known[key] = _FunctionCall(cls, args, kwargs, slots, needs)
        return known[key]
    except TypeError:  # an argument cannot be hashed
        return _FunctionCall(cls, args, kwargs, slots, needs)


def _write_dirty(
    call: _FunctionCall, tracer: Any, args: tuple, slots: list[int], outputs: list
) -> None:
    """Write outputs that `forward` made in place back into the inputs they came from."""
    for position, output in call.dirty:
        tracer.find(args[slots[position]]).write(outputs[output])


class _FunctionCall:
    """One call of a Function: its forward, and its backward as a function of inputs and cotangents,
    as closed jaxprs.
    """

    def __init__(
        self, cls: type, args: tuple, kwargs: dict, slots: list[int], needs: tuple[bool, ...]
    ) -> None:
        self.cls, self.args, self.kwargs, self.slots, self.needs = cls, args, kwargs, slots, needs
        self.structure: Any = None
        self.differentiable_outputs: list[bool] = []
        self.dirty: list[tuple[int, int]] = []
        self.function = self._differentiable()

    def pack(self, tensors: list[TracedTensor]) -> Any:
        """Put output tensors into the structure that `forward` returned."""
        if isinstance(self.structure, tuple):
            waiting = iter(tensors)
            return tuple(
                next(waiting) if is_tensor else other for is_tensor, other in self.structure
            )
        return tensors[0]

    def _forward(self, values: list[Any]) -> tuple[Context, list[Any]]:
        ctx = Context(self.needs)
        inputs = list(self.args)
        tensors = [
            TracedTensor(v, differentiable=self.needs[i])
            for i, v in zip(self.slots, values, strict=True)
        ]
        for i, tensor in zip(self.slots, tensors, strict=True):
            inputs[i] = tensor
        with torch.no_grad():
            if defines_setup_context(self.cls):
                returned = plain_attribute(self.cls, "forward")(*inputs, **self.kwargs)
                plain_attribute(self.cls, "setup_context")(ctx, tuple(inputs), returned)
            else:
                returned = plain_attribute(self.cls, "forward")(ctx, *inputs, **self.kwargs)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        self.structure = (
            tuple((isinstance(o, torch.Tensor), o) for o in outputs)
            if isinstance(returned, tuple)
            else None
        )
        found = [o for o in outputs if isinstance(o, torch.Tensor)]
        self.dirty = [
            (tensors.index(t), _index(found, t))
            for t in ctx.dirty
            if _index(found, t) is not None and _index(tensors, t) is not None
        ]
        skip = [id(t) for t in ctx.non_differentiable]
        self.differentiable_outputs = [
            (o.is_floating_point() or o.is_complex()) and id(o) not in skip for o in found
        ]
        return ctx, found

    def _outputs(self, *values: Any) -> list[Any]:
        with _inside_function() as tracer:
            return [tracer.read(o) for o in self._forward(list(values))[1]]

    def _cotangents(self, values: tuple, cotangents: tuple) -> list[Any]:
        """Run forward for its saved tensors, then `backward`; return a cotangent for each
        floating-point input.
        """
        with _inside_function() as tracer:
            return self._run_backward(tracer, values, cotangents)

    def _run_backward(self, tracer: Any, values: tuple, cotangents: tuple) -> list[Any]:
        ctx, outputs = self._forward(list(values))
        waiting = iter(cotangents)
        grads = [
            TracedTensor(next(waiting) if wanted else jnp.zeros(o.shape, tracer.read(o).dtype))
            for o, wanted in zip(outputs, self.differentiable_outputs, strict=True)
        ]
        grads = [
            _with_dtype(g, d)
            for g, d in itertools.zip_longest(self._all_positions(grads), ctx.output_grad_dtypes)
        ]
        boxed = getattr(self.cls, "boxed_grads_call", False)
        with torch.no_grad():  # as torch runs it, unless a second derivative is asked for
            returned = (
                _backward_of(self.cls)(ctx, grads) if boxed else _backward_of(self.cls)(ctx, *grads)
            )
        returned = returned if isinstance(returned, tuple) else (returned,)
        result = []
        for slot, value in zip(self.slots, values, strict=True):
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                continue
            grad = returned[slot] if slot < len(returned) else None
            grad = jnp.zeros(value.shape, value.dtype) if grad is None else tracer.read(grad)
            result.append(_sum_to(grad, value))
        return result

    def _all_positions(self, grads: list[Any]) -> list[Any]:
        if not isinstance(self.structure, tuple):
            return grads
        waiting = iter(grads)
        return [next(waiting) if is_tensor else None for is_tensor, _ in self.structure]

    def _differentiable(self) -> Callable:
        """Build the JAX function: `custom_jvp` by transposing `backward`, or `custom_vjp` if that
        is not linear.

        The function is one of real numbers, complex values in two parts: torch's gradient by a
        complex value consists of the derivatives by its two parts, so no convention for complex
        derivatives is needed.
        """
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self._values()]
        forward = jax.make_jaxpr(self._outputs)(*avals)
        outputs, wanted = forward.out_avals, self.differentiable_outputs
        cts = [
            jax.ShapeDtypeStruct(o.shape, o.dtype)
            for o, w in zip(outputs, wanted, strict=True)
            if w
        ]
        if not cts or not any(self.needs):
            return lambda *values: evaluate_jaxpr(forward, *values)
        backward = jax.make_jaxpr(self._cotangents)(tuple(avals), tuple(cts))
        if not any(is_complex(a) for a in (*avals, *outputs)):
            return self._with_backward(forward, backward, avals, tuple(cts), wanted)
        wanted = [w for o, w in zip(outputs, wanted, strict=True) for _ in part_shapes([o])]
        split = self._with_backward(
            split_into_parts(forward),
            split_into_parts(backward),
            part_shapes(avals),
            tuple(part_shapes(cts)),
            wanted,
        )
        return lambda *values: from_parts(split(*to_parts(values)), outputs)

    def _with_backward(
        self,
        forward: ClosedJaxpr,
        backward: ClosedJaxpr,
        avals: list,
        cts: tuple,
        wanted: list[bool],
    ) -> Callable:
        run_forward = lambda *values: evaluate_jaxpr(forward, *values)
        run_backward = lambda values, c: evaluate_jaxpr(backward, *values, *c)
        run_forward.__name__ = run_backward.__name__ = self.cls.__name__
        if is_linear(run_backward, avals, cts):
            return with_jvp(run_forward, run_backward, cts, wanted)
        return with_vjp(run_forward, run_backward, wanted)

    def _values(self) -> list[Any]:
        return [active().read(self.args[i]) for i in self.slots]


@contextlib.contextmanager
def _inside_function() -> Iterator[Any]:
    tracer = active()
    outer, tracer.inside_function = tracer.inside_function, True
    try:
        yield tracer
    finally:
        tracer.inside_function = outer


def _backward_of(cls: type) -> Callable:
    """Return the method with which a class declares its gradient: `backward`, or its other name
    `vjp`.
    """
    for name in ("vjp", "backward"):
        method = plain_attribute(cls, name)
        if method is not plain_attribute(torch.autograd.Function, name):
            return method
    raise messages.no_backward(cls.__name__, active().place())


def _with_dtype(grad: TracedTensor | None, dtype: torch.dtype | None) -> Any:
    return grad if grad is None or dtype is None else grad.to(dtype)


def _index(tensors: list, wanted: Any) -> int | None:
    return next((i for i, t in enumerate(tensors) if t is wanted), None)


def _sum_to(grad: Any, value: Any) -> Any:
    """Bring a gradient to its input's shape and dtype, as autograd does for broadcast inputs."""
    if grad.shape != value.shape:
        extra = grad.ndim - value.ndim
        grad = grad.sum(axis=tuple(range(extra))) if extra > 0 else grad
        stretched = tuple(
            i
            for i, (g, v) in enumerate(zip(grad.shape, value.shape, strict=True))
            if v == 1 and g != 1
        )
        grad = grad.sum(axis=stretched, keepdims=True) if stretched else grad
        grad = jnp.broadcast_to(grad, value.shape)
    if is_complex(grad) and not is_complex(value):
        grad = lax.real(grad)
    return grad if grad.dtype == value.dtype else grad.astype(value.dtype)
