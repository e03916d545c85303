"""Run the rule of a torch call on values, and wrap the result as torch would: a new tensor, a view,
or the written input.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from etrace_bridge._errors import BridgeError, NotSupportedError, TracingError, UnsupportedOpError
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.call_kinds import COMPARISONS, RESHAPING
from etrace_bridge.frontend.derivatives import replace_value
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.ops.dtypes import cast
from etrace_bridge.frontend.tensor import TracedTensor, torch_dtype
from etrace_bridge.frontend.tracer import Tracer, map_tensors, tensors_in

_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)


def apply_rule(tracer: Tracer, rule: registry.OpRule, args: tuple, kwargs: dict) -> Any:
    """Run a rule on values and wrap what it gives as torch would: a new tensor, a view or the
    written input.
    """
    origin = origin_of(tracer, args) | origin_of(tracer, kwargs)
    out = kwargs.get("out")
    if out is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    values, named = _to_values(tracer, args), _to_values(tracer, kwargs)
    result = (
        _compare(tracer, rule, values)
        if rule.name in COMPARISONS and not named
        else run_rule(tracer, rule, values, named)
    )
    if rule.writes:
        result, *written = result
        for target, value in zip(rule.written(args, kwargs), written, strict=True):
            if value is not None:
                write_to(tracer, target, lax.stop_gradient(value), origin)
    if out is not None:
        return _write_out(tracer, out, result, origin)
    if rule.name in RESHAPING and np.shape(result) != tuple(args[0].shape):
        raise messages.inplace_shape(tuple(args[0].shape), np.shape(result), tracer.place())
    if rule.writes_input(args, kwargs):
        target = args[0] if args else kwargs["input" if "input" in kwargs else "self"]
        write_to(tracer, target, result, origin)
        return None if rule.name == "setitem_" else target
    if not torch.is_grad_enabled() and not tracer.inside_function:
        result = jax.tree.map(_stop_gradient, result)
    source = tracer.find(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    may_copy = rule.may_copy is not None and source is not None and source.base is not None
    if source is not None and rule.may_return_input and result is source.value and not may_copy:
        return args[0]
    copied = rule.copies is not None and rule.copies(*values, **named)
    if source is not None and rule.view and not copied:
        return _wrap_views(rule, source, values, named, result, origin)
    return _wrap(result, origin)


def _compare(tracer: Tracer, rule: registry.OpRule, values: tuple) -> Any:
    """Compute a comparison once, so that a mask that is written twice is one mask."""
    key = (
        rule.name,
        *[(type(v), v) if isinstance(v, (bool, int, float)) else id(v) for v in values],
    )
    if key not in tracer.comparisons:
        tracer.comparisons[key] = (
            run_rule(tracer, rule, values, {}),
            values,
        )  # values stay alive, so their ids stay theirs
    return tracer.comparisons[key][0]


def run_rule(tracer: Tracer, rule: registry.OpRule, values: tuple, named: dict) -> Any:
    """Run a rule on values; its errors name the line of the model."""
    try:
        return rule.rule(*values, **named)
    except BridgeError as error:
        if isinstance(
            error, (TracingError, UnsupportedOpError, NotSupportedError)
        ) and " at " not in str(error):
            raise type(error)(f"{error}\nIn {tracer.place()}.") from error
        raise
    except _NEEDS_VALUE as error:
        raise messages.needs_value(rule.name, tracer.place()) from error
    except (TypeError, ValueError, IndexError) as error:
        raise messages.rule_failed(rule.name, values, error, tracer.place()) from error


def _stop_gradient(value: Any) -> Any:
    return (
        lax.stop_gradient(value)
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)
        else value
    )


def _wrap(result: Any, origin: int) -> Any:
    grad = torch.is_grad_enabled()
    if isinstance(result, (list, tuple)):
        items = [_wrap(item, origin) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if isinstance(result, (jax.Array, np.ndarray, np.generic)):
        return TracedTensor(jnp.asarray(result), origin=origin, differentiable=grad)
    return result


def _wrap_views(
    rule: registry.OpRule,
    source: TracedTensor,
    values: tuple,
    named: dict,
    result: Any,
    origin: int,
) -> Any:
    rest = values[1:]
    if isinstance(result, (list, tuple)):
        views = [
            TracedTensor(item, base=source, view=lambda v, i=i: rule.rule(v, *rest, **named)[i], origin=origin,
                         differentiable=source.differentiable)
            for i, item in enumerate(result)
        ]  # fmt: skip
        return type(result)(views)
    return TracedTensor(
        result,
        base=source,
        view=lambda v: rule.rule(v, *rest, **named),
        may_copy=rule.may_copy,
        origin=origin,
        differentiable=source.differentiable,
    )


def write_to(tracer: Tracer, target: torch.Tensor, value: Any, origin: int) -> torch.Tensor:
    """Write a value into a tensor as torch's in-place ops do: same shape, same dtype, gradients
    kept under `no_grad`.
    """
    traced = tracer.traced(target)
    tracer.refuse_parameter_write(traced)
    old = traced.value
    value = cast(value, torch_dtype(old.dtype))
    if value.shape != old.shape:
        if np.broadcast_shapes(value.shape, old.shape) != old.shape:
            raise messages.inplace_shape(tuple(old.shape), tuple(value.shape), tracer.place())
        value = lax.broadcast_in_dim(
            value, old.shape, tuple(range(old.ndim - value.ndim, old.ndim))
        )
    if (
        not torch.is_grad_enabled()
        and not tracer.inside_function
        and jnp.issubdtype(old.dtype, jnp.inexact)
    ):
        value = replace_value(old, value)
    traced.write(value, origin=origin)
    return target


def _write_out(tracer: Tracer, out: Any, result: Any, origin: int) -> Any:
    """Write results into the tensors of an `out=` argument."""
    if isinstance(out, torch.Tensor):
        return write_to(tracer, out, result, origin)
    return type(out)(
        [write_to(tracer, target, value, origin) for target, value in zip(out, result, strict=True)]
    )


def any_live(tracer: Tracer, value: Any) -> bool:
    """Return whether nested arguments hold a traced tensor."""
    return any(tracer.find(tensor) is not None for tensor in tensors_in(value))


def origin_of(tracer: Tracer, value: Any) -> int:
    """Return what the traced tensors in nested arguments depend on: inputs, states, or neither."""
    found = 0
    for tensor in tensors_in(value):
        traced = tracer.find(tensor)
        found |= 0 if traced is None else traced.origin
    return found


def _to_values(tracer: Tracer, value: Any) -> Any:
    return map_tensors(tracer.read, value)


def to_traced(tracer: Tracer, value: Any) -> Any:
    """Replace tensors that stand for traced ones, so that torch's own code dispatches on them."""
    return map_tensors(
        lambda tensor: tracer.find(tensor) if tracer.find(tensor) is not None else tensor, value
    )
