"""Running torch's own code on JAX values: every torch call on a traced tensor is looked up and computed with JAX."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch2jax
from jax import lax
from torch import nn

from etrace_bridge._errors import BridgeError, NotSupportedError, TracingError, UnsupportedOpError
from etrace_bridge.frontend import autograd, locate, messages
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.calls import LOCK, intercepted_calls, plain_call
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.ops.dtypes import cast
from etrace_bridge.frontend.tensor import TracedTensor, strided_view, torch_dtype

_active = threading.local()


def current() -> Tracer | None:
    """Give the tracer of this thread, or None if nothing is being traced."""
    return getattr(_active, "tracer", None)


class Tracer:
    """What is known while one piece of torch code is traced.

    Attributes:
        paths: Module path by `id(module)`.
        on_module_call: Called as `(module, *args, **kwargs)` in place of a module's plain call.
        make_key: Gives random ops their keys, or None.
    """

    def __init__(self, paths: dict[int, str] | None = None, on_module_call: Callable = plain_call,
                 make_key: Callable[[], Any] | None = None) -> None:  # fmt: skip
        self.paths = paths or {}
        self.on_module_call = on_module_call
        self.make_key = make_key
        self.scope: list[str] = []
        self.functions: dict[Any, Any] = {}  # autograd Functions traced so far
        self.inside_function = False  # an autograd Function gives its own gradient: no need to stop one inside
        self._tracked: dict[int, tuple[torch.Tensor, TracedTensor]] = {}
        self._storages: dict[int, tuple[torch.Tensor, TracedTensor]] = {}
        self._read_only: dict[int, str] = {}

    def track(self, tensor: torch.Tensor, traced: TracedTensor, *, read_only: str | None = None) -> None:
        """Let a plain tensor (a parameter, a buffer) stand for a traced one; `read_only` names a parameter."""
        self._tracked[id(tensor)] = (tensor, traced)
        storage = _storage(tensor)
        if storage is not None:
            self._storages.setdefault(storage, (tensor, traced))
        if read_only is not None:
            self._read_only[id(traced)] = read_only

    def find(self, tensor: torch.Tensor) -> TracedTensor | None:
        """Give the traced tensor that a tensor is or stands for, or None for a constant."""
        if isinstance(tensor, TracedTensor):
            return tensor
        found = self._tracked.get(id(tensor))
        if found is not None:
            return found[1]
        owner = self._storages.get(_storage(tensor)) if self._storages else None
        return None if owner is None else self._alias(tensor, *owner)

    def _alias(self, tensor: torch.Tensor, plain: torch.Tensor, owner: TracedTensor) -> TracedTensor:
        """Make the traced tensor of a plain one that shares the memory of a tracked one (`weight.data`, an old view)."""
        with torch._C.DisableTorchFunction():
            return self._make_alias(tensor, plain, owner)

    def _make_alias(self, tensor: torch.Tensor, plain: torch.Tensor, owner: TracedTensor) -> TracedTensor:
        if tensor.dtype != plain.dtype or not plain.is_contiguous() or plain.storage_offset() != 0:
            raise messages.unfollowed_view("a tensor shares the memory of a parameter or buffer in another layout", self.place())
        flat = TracedTensor(lax.reshape(owner.value, (owner.value.size,)), base=owner, carried=owner.carried,
                            view=lambda v: v.reshape(-1))  # fmt: skip
        alias = strided_view(tensor, flat)
        alias.differentiable = False
        self._tracked[id(tensor)] = (tensor, alias)
        return alias

    def promote(self, tensor: torch.Tensor) -> TracedTensor:
        """Make a constant tensor traced because traced values are written into it."""
        with torch._C.DisableTorchFunction():
            return self._make_traced(tensor)

    def _make_traced(self, tensor: torch.Tensor) -> TracedTensor:
        if tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self.track(tensor, TracedTensor(constant(tensor), differentiable=tensor.is_floating_point()))
            return self._tracked[id(tensor)][1]
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = torch.as_strided(tensor.detach(), (size,), (1,), 0)
        self.track(whole, TracedTensor(constant(whole), differentiable=tensor.is_floating_point()))
        view = strided_view(tensor, self._tracked[id(whole)][1])
        self._tracked[id(tensor)] = (tensor, view)
        return view

    def read(self, tensor: torch.Tensor) -> Any:
        """Give the JAX value of any tensor."""
        traced = self.find(tensor)
        if traced is not None:
            return traced.value
        with torch._C.DisableTorchFunction():
            requires_grad = tensor.requires_grad
        if requires_grad:
            raise messages.captured_tensor(tensor, self.place())
        return constant(tensor)

    def refuse_parameter_write(self, target: TracedTensor) -> None:
        """Raise if an in-place write would change a parameter."""
        name = self._read_only.get(id(target.root))
        if name is not None:
            raise messages.parameter_write(name, self.place())

    def call_module(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call a module inside the JAX name scope of its torch path; scopes nest, so each adds only its own part."""
        path = self.paths.get(id(module))
        if path is None:
            return plain_call(module, *args, **kwargs)
        outer = self.scope[-1] + "." if self.scope and self.scope[-1] else ""
        self.scope.append(path)
        try:
            with jax.named_scope(path.removeprefix(outer)) if path else contextlib.nullcontext():
                return self.on_module_call(module, *args, **kwargs)
        finally:
            self.scope.pop()

    def place(self) -> str:
        """Describe where in the model the trace is now: the module's path and the user's line."""
        return f"module `{self.scope[-1] or '(root)'}`, {locate.user_line()}" if self.scope else locate.user_line()


def _storage(tensor: torch.Tensor) -> int | None:
    """Give the address of a tensor's memory, or None if it has none of its own."""
    with torch._C.DisableTorchFunction():
        if tensor.layout != torch.strided or tensor.numel() == 0:
            return None
        return tensor.untyped_storage().data_ptr()


def constant(tensor: torch.Tensor) -> Any:
    """Turn a plain tensor into a JAX constant; a tensor of one repeated value becomes a fill, not an array in the program."""
    with torch._C.DisableTorchFunction():
        return _constant(tensor)


def _constant(tensor: torch.Tensor) -> Any:
    value = np.asarray(tensor.detach().resolve_conj().numpy(force=True)) if tensor.dtype != torch.bfloat16 else None
    if value is None or value.size == 0:
        return to_jax(tensor)
    dtype = jnp.dtype(cast(value.flat[0].item(), tensor.dtype).dtype)
    first = value.flat[0]
    if value.size > 1 and np.all(value == first):
        return lax.full(value.shape, np.asarray(first, dtype), dtype)
    return jnp.array(value, dtype=dtype)


# ---- dispatch

_MISSING = object()
_METADATA = frozenset(
    "shape dtype device ndim layout itemsize nbytes names is_cuda is_cpu is_xpu is_xla is_mps is_ipu is_hpu is_mtia is_maia is_vulkan "
    "is_sparse is_sparse_csr is_mkldnn is_quantized is_meta is_nested is_leaf grad_fn grad _version output_nr name size dim "
    "ndimension numel nelement is_floating_point is_complex is_signed is_contiguous is_coalesced is_inference is_conj is_neg "
    "stride element_size get_device has_names storage_offset __len__ __hash__ __repr__ __format__ _is_view is_tensor is_pinned is_shared "
    "_is_zerotensor _has_compatible_shallow_copy_type retains_grad".split()
)  # fmt: skip
_CONCRETE = frozenset(
    "__bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist numpy __array__ is_nonzero equal allclose "
    "_local_scalar_dense __dlpack__ data_ptr untyped_storage storage nonzero masked_select unique unique_consecutive argwhere "
    "_unique2 bincount cpu_numpy __reduce_ex__".split()
)  # fmt: skip
_GRAD_FLAGS = frozenset(("requires_grad", "requires_grad_", "retain_grad", "detach_"))
_RANDOM = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal normal_ uniform_ poisson "
    "exponential_ geometric_ cauchy_ log_normal_ random_ dropout F.dropout alpha_dropout feature_dropout feature_alpha_dropout "
    "F.alpha_dropout F.feature_alpha_dropout F.dropout1d F.dropout2d F.dropout3d native_dropout rrelu F.rrelu F.gumbel_softmax "
    "aten::native_dropout".split()
)  # fmt: skip
class BridgeMode(torch2jax.TorchishMode):
    """Sees every torch call while tracing, also those on parameters and those that make new tensors."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute one torch call: by our rule, by torch itself if no traced value takes part, else by its aten pieces."""
    tracer = current()
    name = _name(func)
    if tracer is None:
        raise messages.escaped_tensor(name)
    if name in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    rule = registry.lookup(func)
    live = _any_live(tracer, args) or _any_live(tracer, kwargs)
    if name in ("__eq__", "__ne__") and not isinstance(args[1], (torch.Tensor, bool, int, float, complex)):
        return name == "__ne__"
    if not live and not (rule is not None and rule.name in _RANDOM):
        return func(*args, **kwargs)
    if name in _GRAD_FLAGS:
        return _grad_flag(tracer, func, name, args)
    if name in _CONCRETE and (rule is None or name not in ("item", "equal")):
        raise messages.needs_value(name, tracer.place())
    special = _SPECIAL.get(func)
    if special is not None:
        return special(tracer, *args, **kwargs)
    if rule is not None:
        return _apply(tracer, rule, args, kwargs)
    handled = _FROM_TORCH2JAX.get(func)
    if handled is not None:
        args, kwargs = _to_traced(tracer, args), _to_traced(tracer, kwargs)
        return TracedTensor(handled(*args, **kwargs).value, carried=_any_carried(tracer, args))
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
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    from torch._decomp import decomposition_table  # slow to import, and rarely needed

    if func in decomposition_table:
        return decomposition_table[func](*args, **kwargs)
    raise messages.unsupported_op(str(func), tracer.place())


def _name(func: Callable) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func.__self__, "__name__", "")
        return owner if name == "__get__" else f"{owner}.{name}"
    return name


def _apply(tracer: Tracer, rule: registry.OpRule, args: tuple, kwargs: dict) -> Any:
    """Run a rule on values and wrap what it gives as torch would: a new tensor, a view or the written input."""
    carried = _any_carried(tracer, args) or _any_carried(tracer, kwargs)
    out = kwargs.get("out")
    if out is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    values, named = _to_values(tracer, args), _to_values(tracer, kwargs)
    result = _run(tracer, rule, values, named)
    if rule.writes:
        result, *written = result
        for target, value in zip(rule.written(args, kwargs), written, strict=True):
            if value is not None:
                _write(tracer, target, lax.stop_gradient(value), carried)
    if out is not None:
        return _write_out(tracer, out, result, carried)
    if rule.writes_input(args, kwargs):
        target = args[0] if args else kwargs.get("input", kwargs.get("self"))
        _write(tracer, target, result, carried)
        return None if rule.name == "setitem_" else target
    if not torch.is_grad_enabled() and not tracer.inside_function:
        result = jax.tree.map(_stop_gradient, result)
    source = tracer.find(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    if source is not None and rule.may_return_input and result is source.value:
        return args[0]
    if source is not None and rule.view:
        return _wrap_views(rule, source, values, named, result, carried)
    return _wrap(result, carried)


def _run(tracer: Tracer, rule: registry.OpRule, values: tuple, named: dict) -> Any:
    try:
        return rule.rule(*values, **named)
    except BridgeError as error:
        if isinstance(error, (TracingError, UnsupportedOpError, NotSupportedError)) and " at " not in str(error):
            raise type(error)(f"{error}\nIn {tracer.place()}.") from error
        raise
    except jax.errors.ConcretizationTypeError as error:
        raise messages.needs_value(rule.name, tracer.place()) from error
    except (TypeError, ValueError, IndexError) as error:
        raise messages.rule_failed(rule.name, values, error, tracer.place()) from error


def _stop_gradient(value: Any) -> Any:
    return lax.stop_gradient(value) if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact) else value


def _wrap(result: Any, carried: bool) -> Any:
    grad = torch.is_grad_enabled()
    if isinstance(result, (list, tuple)):
        items = [_wrap(item, carried) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if isinstance(result, (jax.Array, np.ndarray, np.generic)):
        return TracedTensor(jnp.asarray(result), carried=carried, differentiable=grad)
    return result


def _wrap_views(rule: registry.OpRule, source: TracedTensor, values: tuple, named: dict, result: Any, carried: bool) -> Any:
    rest = values[1:]
    if isinstance(result, (list, tuple)):
        views = [
            TracedTensor(item, base=source, view=lambda v, i=i: rule.rule(v, *rest, **named)[i], carried=carried,
                         differentiable=source.differentiable)
            for i, item in enumerate(result)
        ]  # fmt: skip
        return type(result)(views)
    return TracedTensor(result, base=source, view=lambda v: rule.rule(v, *rest, **named), carried=carried,
                        differentiable=source.differentiable)  # fmt: skip


def _write(tracer: Tracer, target: torch.Tensor, value: Any, carried: bool) -> torch.Tensor:
    """Write a value into a tensor as torch's in-place ops do: same shape, same dtype, gradients kept under `no_grad`."""
    traced = tracer.find(target)
    if traced is None:
        traced = tracer.promote(target)
    tracer.refuse_parameter_write(traced)
    old = traced.value
    value = cast(value, torch_dtype(old.dtype))
    if value.shape != old.shape:
        if np.broadcast_shapes(value.shape, old.shape) != old.shape:
            raise messages.inplace_shape(tuple(old.shape), tuple(value.shape), tracer.place())
        value = lax.broadcast_in_dim(value, old.shape, tuple(range(old.ndim - value.ndim, old.ndim)))
    if not torch.is_grad_enabled() and not tracer.inside_function and jnp.issubdtype(old.dtype, jnp.inexact):
        value = autograd.replace_value(old, value)
    traced.write(value, carried=carried)
    return target


def _write_out(tracer: Tracer, out: Any, result: Any, carried: bool) -> Any:
    """Write results into the tensors of an `out=` argument."""
    if isinstance(out, torch.Tensor):
        return _write(tracer, out, result, carried)
    return type(out)([_write(tracer, target, value, carried) for target, value in zip(out, result, strict=True)])


def _grad_flag(tracer: Tracer, func: Callable, name: str, args: tuple) -> Any:
    """Answer for `requires_grad` and its relatives, which torch stores in the tensor."""
    target = tracer.find(args[0])
    if name == "requires_grad":
        return target.differentiable
    if name == "detach_":
        target.write(lax.stop_gradient(target.value))
        target.differentiable = False
    return args[0]


def _walk(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, slice):
        yield from _walk((value.start, value.stop, value.step))


def _any_live(tracer: Tracer, value: Any) -> bool:
    return any(tracer.find(tensor) is not None for tensor in _walk(value))


def _any_carried(tracer: Tracer, value: Any) -> bool:
    return any(traced is not None and traced.carried for traced in map(tracer.find, _walk(value)))


def _map(function: Callable, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_map(function, item) for item in value])
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map(function, item) for item in value])
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*[_map(function, item) for item in (value.start, value.stop, value.step)])
    return value


def _to_values(tracer: Tracer, value: Any) -> Any:
    return _map(tracer.read, value)


def _to_traced(tracer: Tracer, value: Any) -> Any:
    """Replace tensors that stand for traced ones, so that torch's own code dispatches on them."""
    return _map(lambda tensor: tracer.find(tensor) if tracer.find(tensor) is not None else tensor, value)


# ---- calls that are neither computation nor metadata


def _get_data(tracer: Tracer, tensor: torch.Tensor) -> TracedTensor:
    """`x.data`: the same memory without gradient."""
    source = tracer.find(tensor)
    return TracedTensor(lax.stop_gradient(source.value), base=source, view=lax.stop_gradient, carried=source.carried,
                        differentiable=False)  # fmt: skip


def _set_data(tracer: Tracer, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`x.data = y`: a new value, the old gradient."""
    with torch.no_grad():
        _write(tracer, tensor, tracer.read(value), _any_carried(tracer, value))


_SPECIAL: dict[Callable, Callable] = {
    torch.Tensor.data.__get__: _get_data,
    torch.Tensor.data.__set__: _set_data,
}
# torch2jax's own rules serve where ours are silent; those with known faults stay out.
_WRONG_IN_TORCH2JAX = (torch.tensor, torch.nn.functional.gelu)
_FROM_TORCH2JAX = {f: rule for f, rule in torch2jax.HANDLED_FUNCTIONS.items() if f not in _WRONG_IN_TORCH2JAX}


# ---- entering a trace


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[Tracer]:
    """Send this thread's torch calls to the tracer; gradients on, module calls and `autograd.Function` seen."""
    with LOCK, contextlib.ExitStack() as stack:
        previous = current()
        _active.tracer = tracer
        stack.callback(setattr, _active, "tracer", previous)
        stack.enter_context(intercepted_calls(tracer.call_module))
        stack.enter_context(autograd.intercepted())
        stack.enter_context(torch.enable_grad())
        if tracer.make_key is not None:
            stack.enter_context(registry.key_source(tracer.make_key))
        stack.enter_context(BridgeMode())
        yield tracer


def trace_function(function: Callable) -> Callable:
    """Turn a torch callable on tensors into a JAX callable on arrays.

    For losses and other stateless torch code: `F.mse_loss`, an `nn.CrossEntropyLoss()`, a lambda. Inputs that are arrays or
    tensors are traced; everything else is passed as it is. Parameters of a module are taken as constants.

    Args:
        function: The torch callable.

    Returns:
        A function of JAX arrays (nested in tuples, lists, dicts) that gives JAX arrays in the structure torch returned.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        tracer = Tracer()
        if isinstance(function, nn.Module):
            for parameter in function.parameters():
                tracer.track(parameter, TracedTensor(to_jax(parameter)))
        as_array = lambda x: to_jax(x) if isinstance(x, (jax.Array, np.ndarray, torch.Tensor)) else x  # noqa: E731
        args, kwargs = jax.tree.map(as_array, (args, kwargs), is_leaf=lambda x: isinstance(x, torch.Tensor))
        wrap = lambda x: TracedTensor(x) if isinstance(x, jax.Array) else x  # noqa: E731
        with tracing(tracer):
            result = function(*jax.tree.map(wrap, args), **jax.tree.map(wrap, kwargs))
            return _map(tracer.read, result)

    return traced
