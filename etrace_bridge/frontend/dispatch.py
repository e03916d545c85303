"""Computing one torch call on traced tensors: by our rule, by torch itself, or by the aten pieces
torch makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch2jax
from jax import lax

from etrace_bridge._errors import BridgeError, NotSupportedError, TracingError, UnsupportedOpError
from etrace_bridge.frontend import masked, messages
from etrace_bridge.frontend.derivatives import replace_value
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.ops.dtypes import cast
from etrace_bridge.frontend.tensor import TracedTensor, torch_dtype
from etrace_bridge.frontend.tracer import Tracer, current, map_tensors, tensors_in

# ---- kinds of calls, by name

_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)
_METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "itemsize",
        "nbytes",
        "names",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_xla",
        "is_mps",
        "is_ipu",
        "is_hpu",
        "is_mtia",
        "is_maia",
        "is_vulkan",
        "is_sparse",
        "is_sparse_csr",
        "is_mkldnn",
        "is_quantized",
        "is_meta",
        "is_nested",
        "is_leaf",
        "grad_fn",
        "grad",
        "_version",
        "output_nr",
        "name",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_coalesced",
        "is_inference",
        "is_conj",
        "is_neg",
        "stride",
        "element_size",
        "get_device",
        "has_names",
        "storage_offset",
        "__len__",
        "__hash__",
        "__repr__",
        "__format__",
        "_is_view",
        "is_tensor",
        "is_pinned",
        "is_shared",
        "_is_zerotensor",
        "_has_compatible_shallow_copy_type",
        "retains_grad",
    ]
)
_CONCRETE = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__contains__",
        "item",
        "tolist",
        "numpy",
        "__array__",
        "is_nonzero",
        "equal",
        "allclose",
        "_local_scalar_dense",
        "__dlpack__",
        "data_ptr",
        "untyped_storage",
        "storage",
        "nonzero",
        "masked_select",
        "unique",
        "unique_consecutive",
        "argwhere",
        "_unique2",
        "bincount",
        "cpu_numpy",
        "__reduce_ex__",
    ]
)
_COMPARISONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne"))
# They change a tensor's shape, not its memory: a traced tensor keeps its shape.
_RESHAPING = frozenset(("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"))
_GRAD_FLAGS = frozenset(
    ("requires_grad", "requires_grad_", "retain_grad", "detach_", "register_hook")
)
_SHAPE_ONLY = frozenset(
    [
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_tensor",
    ]
)
_RANDOM = frozenset(
    [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "poisson",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "random_",
        "dropout",
        "F.dropout",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "F.alpha_dropout",
        "F.feature_alpha_dropout",
        "F.dropout1d",
        "F.dropout2d",
        "F.dropout3d",
        "native_dropout",
        "rrelu",
        "F.rrelu",
        "F.gumbel_softmax",
        "aten::native_dropout",
    ]
)


class BridgeMode(torch2jax.TorchishMode):
    """Sees every torch call while tracing, also those on parameters and those that make new
    tensors.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute one torch call: by our rule, by torch itself if no traced value takes part, else by
    its aten pieces.
    """
    tracer = current()
    name = _name(func)
    if tracer is None:
        raise messages.escaped_tensor(name)
    if any(isinstance(tensor, masked.MaskedTensor) for tensor in tensors_in((args, kwargs))):
        return _apply_masked(tracer, func, name, args, kwargs)
    if name in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    rule = registry.lookup(func)
    live = _any_live(tracer, args) or _any_live(tracer, kwargs)
    if name in ("__eq__", "__ne__") and not isinstance(
        args[1], (torch.Tensor, bool, int, float, complex)
    ):
        return name == "__ne__"
    if not live and not (rule is not None and rule.name in _RANDOM):
        return _with_grad_flag(tracer, func, name, args, kwargs)
    if torch.is_autocast_enabled("cpu"):
        raise messages.autocast(tracer.place())
    if name in _GRAD_FLAGS:
        return _grad_flag(tracer, func, name, args)
    if name in _CONCRETE and (rule is None or name not in ("item", "equal")):
        raise messages.needs_value(name, tracer.place())
    if name in _SHAPE_ONLY and not (_any_live(tracer, args[1:]) or _any_live(tracer, kwargs)):
        # a constant: known while tracing, and no state
        args = (_stand_in(args[0]), *args[1:])
        return _with_grad_flag(tracer, func, name, args, kwargs)
    if name == "__getitem__" and masked.is_mask_of(args[1], args[0]):
        source, mask = tracer.traced(args[0]), args[1]
        return masked.MaskedTensor.select(
            source.value, mask.value, tracer.place(), source.origin | mask.origin
        )
    special = _SPECIAL.get(func)
    if special is not None:
        return special(tracer, *args, **kwargs)
    if rule is not None:
        return _apply(tracer, rule, args, kwargs)
    handled = _FROM_TORCH2JAX.get(func)
    if handled is not None:
        args, kwargs = _to_traced(tracer, args), _to_traced(tracer, kwargs)
        return TracedTensor(handled(*args, **kwargs).value, origin=_origin(tracer, args))
    args, kwargs = _to_traced(tracer, args), _to_traced(tracer, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def dispatch_aten(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute one aten call that torch's own code made from traced tensors."""
    tracer = current()
    name = _name(func)
    if tracer is None:
        raise messages.escaped_tensor(name)
    rule = registry.lookup(func)
    if rule is not None:
        return _apply(tracer, rule, args, kwargs)
    if name in _CONCRETE:
        raise messages.needs_value(name, tracer.place())
    decomposed = _decompose(func, args, kwargs)
    if decomposed is NotImplemented:
        raise messages.unsupported_op(str(func), tracer.place())
    return decomposed


def _decompose(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute an op without a rule by the ops that torch itself makes of it; `NotImplemented` if
    torch knows none.

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
    rule, origin = registry.lookup(func), _origin(tracer, (args, kwargs))
    if (
        name == "__setitem__"
        and args[2] is first
        and getattr(tracer.find(args[1]), "value", None) is first.mask
    ):
        target = tracer.read(args[0])
        _write(tracer, args[0], masked.write_back(target, first.mask, first.full), origin)
        return None
    if rule is None or not masked.can_compute(
        rule.name, list(tensors_in((args, kwargs))), first.mask
    ):
        raise messages.masked_selection(name, first.place, tracer.place())
    full = lambda t: t.full if isinstance(t, masked.MaskedTensor) else tracer.read(t)
    result = _run(tracer, rule, map_tensors(full, args), map_tensors(full, kwargs))
    if rule.writes_input(args, kwargs):
        first.full = result
        return first
    return masked.MaskedTensor.select(result, first.mask, first.place, origin)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Make a plain tensor with the shape and dtype of a traced one."""
    with torch._C.DisableTorchFunction():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _name(func: Callable) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func.__self__, "__name__", "")
        return owner if name == "__get__" else f"{owner}.{name}"
    return name


def _apply(tracer: Tracer, rule: registry.OpRule, args: tuple, kwargs: dict) -> Any:
    """Run a rule on values and wrap what it gives as torch would: a new tensor, a view or the
    written input.
    """
    origin = _origin(tracer, args) | _origin(tracer, kwargs)
    out = kwargs.get("out")
    if out is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    values, named = _to_values(tracer, args), _to_values(tracer, kwargs)
    result = (
        _compare(tracer, rule, values)
        if rule.name in _COMPARISONS and not named
        else _run(tracer, rule, values, named)
    )
    if rule.writes:
        result, *written = result
        for target, value in zip(rule.written(args, kwargs), written, strict=True):
            if value is not None:
                _write(tracer, target, lax.stop_gradient(value), origin)
    if out is not None:
        return _write_out(tracer, out, result, origin)
    if rule.name in _RESHAPING and np.shape(result) != tuple(args[0].shape):
        raise messages.inplace_shape(tuple(args[0].shape), np.shape(result), tracer.place())
    if rule.writes_input(args, kwargs):
        target = args[0] if args else kwargs["input" if "input" in kwargs else "self"]
        _write(tracer, target, result, origin)
        return None if rule.name == "setitem_" else target
    if not torch.is_grad_enabled() and not tracer.inside_function:
        result = jax.tree.map(_stop_gradient, result)
    source = tracer.find(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    if source is not None and rule.may_return_input and result is source.value:
        return args[0]
    if source is not None and rule.view:
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
            _run(tracer, rule, values, {}),
            values,
        )  # values stay alive, so their ids stay theirs
    return tracer.comparisons[key][0]


def _run(tracer: Tracer, rule: registry.OpRule, values: tuple, named: dict) -> Any:
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
        origin=origin,
        differentiable=source.differentiable,
    )


def _write(tracer: Tracer, target: torch.Tensor, value: Any, origin: int) -> torch.Tensor:
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
        return _write(tracer, out, result, origin)
    return type(out)(
        [_write(tracer, target, value, origin) for target, value in zip(out, result, strict=True)]
    )


def _with_grad_flag(tracer: Tracer, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Let torch compute a constant. One that `forward` itself makes a leaf that requires grad (an
    initial state, say) is no parameter from outside: it is traced from here on.
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


def _any_live(tracer: Tracer, value: Any) -> bool:
    return any(tracer.find(tensor) is not None for tensor in tensors_in(value))


def _origin(tracer: Tracer, value: Any) -> int:
    found = 0
    for tensor in tensors_in(value):
        traced = tracer.find(tensor)
        found |= 0 if traced is None else traced.origin
    return found


def _to_values(tracer: Tracer, value: Any) -> Any:
    return map_tensors(tracer.read, value)


def _to_traced(tracer: Tracer, value: Any) -> Any:
    """Replace tensors that stand for traced ones, so that torch's own code dispatches on them."""
    return map_tensors(
        lambda tensor: tracer.find(tensor) if tracer.find(tensor) is not None else tensor, value
    )


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
    """`x.data = y`: a new value, the old gradient; nothing if `y` is what `x.data` gave (a bound
    that is not set, say).
    """
    known = tracer.data_values.get(id(tracer.traced(tensor).value))
    if known is not None and tracer.read(value) is known[1]:
        return
    with torch.no_grad():
        _write(tracer, tensor, tracer.read(value), _origin(tracer, value))


def _set_part(part: Any) -> Callable:
    """`z.real = x`, `z.imag = x`: a write through the view."""

    def write(tracer: Tracer, tensor: torch.Tensor, value: torch.Tensor) -> None:
        _write(
            tracer,
            dispatch(part.__get__, (tracer.traced(tensor),), {}),
            tracer.read(value),
            _origin(tracer, value),
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
