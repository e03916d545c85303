"""Compute one torch call on traced tensors: by a rule, by torch itself, or by the aten ops that
torch breaks it into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch2jax
from jax import lax

from etrace_bridge.frontend import masked, messages
from etrace_bridge.frontend.applying import (
    any_live,
    apply_rule,
    origin_of,
    run_rule,
    to_traced,
    write_to,
)
from etrace_bridge.frontend.call_kinds import (
    CONCRETE,
    GRAD_FLAGS,
    METADATA,
    RANDOM,
    SHAPE_ONLY,
    name_of,
    with_all_arguments,
)
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.tensor import TracedTensor
from etrace_bridge.frontend.tracer import Tracer, current, map_tensors, tensors_in

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class BridgeMode(torch2jax.TorchishMode):
    """Receives every torch call while tracing, including calls on parameters and calls that make
    new tensors.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute one torch call: by its rule, by torch itself if no traced value takes part, else by
    its aten ops.
    """
    tracer = current()
    name, kwargs = name_of(func), with_all_arguments(func, kwargs)
    if tracer is None:
        raise messages.escaped_tensor(name)
    if any(isinstance(tensor, masked.MaskedTensor) for tensor in tensors_in((args, kwargs))):
        return _apply_masked(tracer, func, name, args, kwargs)
    if name in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    rule = registry.lookup(func)
    live = any_live(tracer, args) or any_live(tracer, kwargs)
    if name in ("__eq__", "__ne__") and not isinstance(
        args[1], (torch.Tensor, bool, int, float, complex)
    ):
        return name == "__ne__"
    if not live and not (rule is not None and rule.name in RANDOM):
        return _with_grad_flag(tracer, func, name, args, kwargs)
    if torch.is_autocast_enabled("cpu"):
        raise messages.autocast(tracer.place())
    if name in GRAD_FLAGS:
        return _grad_flag(tracer, func, name, args)
    if name in CONCRETE and (rule is None or name not in ("item", "equal")):
        raise messages.needs_value(name, tracer.place())
    if name in SHAPE_ONLY and not (any_live(tracer, args[1:]) or any_live(tracer, kwargs)):
        # a constant: known while tracing, and no state
        args = (_stand_in(args[0]), *args[1:])
        return _with_grad_flag(tracer, func, name, args, kwargs)
    if name == "__getitem__" and masked.is_mask_of(args[1], args[0]):
        source, mask = tracer.traced(args[0]), args[1]
        return masked.MaskedTensor.select(
            source.value, mask.value, tracer.place(), source.origin | mask.origin
        )
    if name in ("__getitem__", "__setitem__"):
        args = (args[0], _known_index(tracer, args[1]), *args[2:])
    special = _SPECIAL.get(func)
    if special is not None:
        return special(tracer, *args, **kwargs)
    if rule is not None:
        return apply_rule(tracer, rule, args, kwargs)
    handled = _FROM_TORCH2JAX.get(func)
    if handled is not None:
        args, kwargs = to_traced(tracer, args), to_traced(tracer, kwargs)
        return TracedTensor(handled(*args, **kwargs).value, origin=origin_of(tracer, args))
    args, kwargs = to_traced(tracer, args), to_traced(tracer, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def dispatch_aten(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute one aten call that torch's own code made from traced tensors."""
    tracer = current()
    name = name_of(func)
    if tracer is None:
        raise messages.escaped_tensor(name)
    rule = registry.lookup(func)
    if rule is not None:
        return apply_rule(tracer, rule, args, kwargs)
    if name in CONCRETE:
        raise messages.needs_value(name, tracer.place())
    decomposed = _decompose(func, args, kwargs)
    if decomposed is NotImplemented:
        raise messages.unsupported_op(str(func), tracer.place())
    return decomposed


def _decompose(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute an op without a rule by the ops that torch breaks it into; `NotImplemented` if torch
    knows none.

    First by the C++ code of a composite op, then by torch's registered decompositions, where a
    `prims` op stands for the aten op of the same name.
    """
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    from torch._decomp import decomposition_table  # slow to import, and rarely needed

    return (
        decomposition_table[func](*args, **kwargs)
        if func in decomposition_table
        else NotImplemented
    )


def _apply_masked(tracer: Tracer, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Compute on the elements under a mask, and write them back: `x[mask] = f(x[mask])`."""
    first = next(t for t in tensors_in((args, kwargs)) if isinstance(t, masked.MaskedTensor))
    rule, origin = registry.lookup(func), origin_of(tracer, (args, kwargs))
    if (
        name == "__setitem__"
        and args[2] is first
        and getattr(tracer.find(args[1]), "value", None) is first.mask
    ):
        target = tracer.read(args[0])
        write_to(tracer, args[0], masked.write_back(target, first.mask, first.full), origin)
        return None
    if rule is None or not masked.can_compute(
        rule.name, list(tensors_in((args, kwargs))), first.mask
    ):
        raise messages.masked_selection(name, first.place, tracer.place())
    full = lambda t: t.full if isinstance(t, masked.MaskedTensor) else tracer.read(t)
    result = run_rule(tracer, rule, map_tensors(full, args), map_tensors(full, kwargs))
    if rule.writes_input(args, kwargs):
        first.full = result
        return first
    return masked.MaskedTensor.select(result, first.mask, first.place, origin)


def _known_index(tracer: Tracer, index: Any) -> Any:
    """Replace constant one-element integer tensors in an index by integers, as torch reads them:
    `for t in torch.arange(T): x[:, t]`.
    """
    if isinstance(index, tuple):
        return tuple(_known_index(tracer, item) for item in index)
    is_plain = isinstance(index, torch.Tensor) and tracer.find(index) is None
    if is_plain and index.dim() == 0 and index.dtype in _INTEGERS:
        return int(index)
    return index


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Make a plain tensor with the shape and dtype of a traced one."""
    with torch._C.DisableTorchFunction():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _with_grad_flag(tracer: Tracer, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Let torch compute a constant.

    A leaf that requires grad and is made by `forward` itself (an initial state, say) is not an
    external parameter, so it is traced from here on.
    """
    if name in ("requires_grad_", "requires_grad.__set__") and not args[0].requires_grad:
        tracer.promote(args[0])
        return args[0] if name == "requires_grad_" else None
    tracer.note_constants(args)
    result = func(*args, **kwargs)
    if kwargs.get("requires_grad") is True and isinstance(result, torch.Tensor):
        tracer.promote(result)
    return result


def _grad_flag(tracer: Tracer, func: Callable, name: str, args: tuple) -> Any:
    """Answer for `requires_grad` and its relatives, which torch stores in the tensor."""
    target = tracer.traced(args[0])
    if name == "register_hook":
        raise messages.tensor_hook(tracer.place())
    if name == "requires_grad":
        return target.differentiable
    if name == "detach_":
        target.write(lax.stop_gradient(target.value))
        target.differentiable = False
    return args[0]


# ---- calls that are neither computation nor metadata


def _get_data(tracer: Tracer, tensor: torch.Tensor) -> TracedTensor:
    """`x.data`: the same memory without gradient."""
    source = tracer.traced(tensor)
    if id(source.value) not in tracer.data_values:
        tracer.data_values[id(source.value)] = source.value, lax.stop_gradient(source.value)
    value = tracer.data_values[id(source.value)][1]
    return TracedTensor(
        value, base=source, view=lax.stop_gradient, origin=source.origin, differentiable=False
    )


def _set_data(tracer: Tracer, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Run `x.data = y`: a new value with the old gradient.

    Does nothing if `y` is what `x.data` returned (a bound that is not set, say).
    """
    known = tracer.data_values.get(id(tracer.traced(tensor).value))
    if known is not None and tracer.read(value) is known[1]:
        return
    with torch.no_grad():
        write_to(tracer, tensor, tracer.read(value), origin_of(tracer, value))


def _set_part(part: Any) -> Callable:
    """`z.real = x`, `z.imag = x`: a write through the view."""

    def write(tracer: Tracer, tensor: torch.Tensor, value: torch.Tensor) -> None:
        write_to(
            tracer,
            dispatch(part.__get__, (tracer.traced(tensor),), {}),
            tracer.read(value),
            origin_of(tracer, value),
        )

    return write


_SPECIAL: dict[Callable, Callable] = {
    torch.Tensor.real.__set__: _set_part(torch.Tensor.real),
    torch.Tensor.imag.__set__: _set_part(torch.Tensor.imag),
    torch.Tensor.data.__get__: _get_data,
    torch.Tensor.data.__set__: _set_data,
}
# torch2jax's own rules serve where ours are silent; those with known faults stay out.
# (Its attention knows neither training nor the weights; torch's own Python code for it is traced
# instead.)
_WRONG_IN_TORCH2JAX = (
    torch.tensor,
    torch.nn.functional.gelu,
    torch.nn.functional.multi_head_attention_forward,
)
_FROM_TORCH2JAX = {
    f: rule for f, rule in torch2jax.HANDLED_FUNCTIONS.items() if f not in _WRONG_IN_TORCH2JAX
}
