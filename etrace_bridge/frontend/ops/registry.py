"""The op table: one dict from torch op names to JAX rules, and the ways into it.

A rule is a pure function on JAX arrays and Python numbers, with torch's signature and torch's
result dtypes. Keys:

* ``"add"`` serves `torch.add`, `Tensor.add`, `Tensor.__add__`, `Tensor.add_` and ``aten::add.*``,
  all of one signature;
* ``"F.embedding"`` serves `torch.nn.functional.embedding`, where its signature differs from
  `torch.embedding`, and ``"Tensor.where"`` the method, where it differs from the function;
* ``"aten::native_dropout"`` serves an aten overload whose signature differs from the torch-level
  function of that name;
* ``"normal_"`` serves an in-place op that has no out-of-place twin; ``"mylib::myop"`` a custom C++
  op.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from etrace_bridge._errors import InputError, TracingError


@dataclass(frozen=True)
class OpRule:
    """What the tracer needs to know about one torch op.

    Attributes:
        name: The key of the op in the table.
        rule: The pure JAX function with torch's signature.
        inplace: The torch function writes its result into its first argument (`add_`, `__iadd__`,
            `__setitem__`).
        view: The result aliases the first argument in torch, so writes to one show in the other.
        may_copy: A view that torch makes by a copy where the elements' places in memory demand it:
            `"reshape"`, for another shape, or `"contiguous"`.
        copies: Tells from the arguments that the result is a copy and no view.
        may_return_input: The torch function returns its first argument itself, not a copy, where
            nothing changes (`to`, `float`, `contiguous`). The rule then returns the same array
            object.
        writes: Names of further arguments that torch writes in place (the running statistics of
            `batch_norm`). The rule then returns `(result, *new values)`, None for one that stays as
            it is.
    """

    name: str
    rule: Callable[..., Any]
    inplace: bool = False
    view: bool = False
    may_copy: str | None = None
    copies: Callable[..., bool] | None = None
    may_return_input: bool = False
    writes: tuple[str, ...] = ()

    def written(self, args: tuple, kwargs: dict) -> list[Any]:
        """Return the arguments of this call that `writes` names, None where one is absent."""
        positions = {name: k for k, name in enumerate(inspect.signature(self.rule).parameters)}
        return [
            args[positions[n]] if positions[n] < len(args) else kwargs.get(n) for n in self.writes
        ]

    def writes_input(self, args: tuple, kwargs: dict) -> bool:
        """Return whether this call writes to its first argument, by name (`relu_`) or by flag
        (`inplace=True`).
        """
        if self.inplace:
            return True
        position = _inplace_position(self.rule)
        if position is None:
            return False
        return bool(kwargs.get("inplace", args[position] if position < len(args) else False))


_RULES: dict[str, OpRule] = {}
_BY_FUNCTION: dict[Callable, OpRule] = {}
_LOOKUP_CACHE: dict[Callable, OpRule | None] = {}

# Arguments that say where or how a tensor is stored: they have no meaning for a traced value.
_STORAGE_ARGUMENTS = (
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "requires_grad",
    "implicit",
)
# Names under which torch accepts what a rule takes as `*sizes`.
_LIST_ARGUMENTS = ("size", "shape", "sizes", "dims", "repeats", "tensors", "matrices")
# Second names that torch's argument parser accepts.
_ARGUMENT_ALIASES = {
    "self": "input",
    "axis": "dim",
    "keepdims": "keepdim",
    "x2": "other",
    "x": "input",
    "a": "input",
}

_OPERATORS = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__rsub__": "rsub", "__mul__": "mul", "__rmul__": "mul",
    "__div__": "div", "__truediv__": "div", "__rdiv__": "rdiv", "__rtruediv__": "rdiv", "__floordiv__": "floor_divide",
    "__rfloordiv__": "rfloordiv", "__mod__": "remainder", "__rmod__": "rmod", "__pow__": "pow", "__rpow__": "rpow",
    "__matmul__": "matmul", "__rmatmul__": "rmatmul", "__neg__": "neg", "__pos__": "positive", "__abs__": "abs",
    "__and__": "bitwise_and", "__rand__": "bitwise_and", "__or__": "bitwise_or", "__ror__": "bitwise_or",
    "__xor__": "bitwise_xor", "__rxor__": "bitwise_xor", "__invert__": "bitwise_not",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
    "__rlshift__": "rlshift", "__rrshift__": "rrshift",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__getitem__": "getitem", "__setitem__": "setitem_",
    "__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__idiv__": "div_", "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_", "__imod__": "remainder_", "__ipow__": "pow_", "__imatmul__": "matmul_",
    "__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
    "__ilshift__": "bitwise_left_shift_", "__irshift__": "bitwise_right_shift_",
}  # fmt: skip


# ---- filling the table


def implements(
    *names: str,
    view: bool = False,
    may_copy: str | None = None,
    copies: Callable[..., bool] | None = None,
    may_return_input: bool = False,
    writes: tuple[str, ...] = (),
) -> Callable[[Callable], Callable]:
    """Enter the decorated rule in the table under every name given; the rule itself is returned
    unchanged.
    """

    def enter(rule: Callable) -> Callable:
        for name in names:
            _RULES[name] = OpRule(
                name,
                _normalise_arguments(rule),
                _is_inplace_name(name),
                view,
                may_copy,
                copies,
                may_return_input,
                writes,
            )
        _LOOKUP_CACHE.clear()
        return rule

    return enter


def register_op(
    op: Callable | str, rule: Callable | None = None, *, view: bool = False
) -> Callable:
    """Teach the bridge a torch op that it does not know, or replace a rule.

    Example:
        A rule takes what the torch op takes, with JAX arrays in the place of tensors, and returns
        JAX arrays::

            import jax, torch, etrace_bridge as eb

            eb.register_op(torch.special.i0, jax.scipy.special.i0)
            eb.register_op("mylib::decay", lambda v, tau: v * jax.numpy.exp(-1 / tau))   # torch.ops.mylib.decay

    Args:
        op: The torch function (`torch.special.i0`, `torch.ops.mylib.decay`), or its name in the
            table. Methods, in-place variants and aten overloads of the same name follow.
        rule: The JAX function. Left out, `register_op(op)` is a decorator.
        view: The result aliases the first argument.

    Returns:
        The rule.
    """
    if rule is None:
        return functools.partial(register_op, op, view=view)
    if not callable(rule):
        raise InputError(
            f"`register_op` got a rule of type `{type(rule).__name__}` for {op!r}. It must be a "
            "function on JAX arrays."
        )
    if isinstance(op, str):
        return implements(op, view=view)(rule)
    if not callable(op):
        raise InputError(
            f"`register_op` got {op!r}. The op must be a torch function, a `torch.ops` entry or a "
            "name."
        )
    name = getattr(op, "__name__", str(op))
    _BY_FUNCTION[op] = OpRule(name, _normalise_arguments(rule), _is_inplace_name(name), view)
    keys = _candidate_keys(op)
    # A rule for a function of `torch.nn.functional` may have that function's own signature: it
    # serves no other.
    return implements(*(keys[:1] if keys and keys[0].startswith("F.") else keys[-1:]), view=view)(
        rule
    )


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


@functools.cache
def _inplace_position(rule: Callable) -> int | None:
    names = list(inspect.signature(rule).parameters)
    return names.index("inplace") if "inplace" in names else None


def _normalise_arguments(rule: Callable) -> Callable:
    """Let the rule be called with torch's storage arguments and second argument names."""
    try:
        parameters = inspect.signature(rule).parameters
    except ValueError:  # a builtin without a signature
        return rule
    own = frozenset(parameters)
    first = next(iter(parameters), None)
    takes_list = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())

    @functools.wraps(rule)
    def call(*args, **kwargs):
        if kwargs:
            for name in _STORAGE_ARGUMENTS:
                if name not in own:
                    kwargs.pop(name, None)
            if "out" not in own and kwargs.get("out", 0) is None:
                del kwargs["out"]
            for name in [n for n in kwargs if n not in own and n in _ARGUMENT_ALIASES]:
                kwargs[_ARGUMENT_ALIASES[name]] = kwargs.pop(name)
            for name in [n for n in _LIST_ARGUMENTS if takes_list and n in kwargs]:
                args = (*args, kwargs.pop(name))
            if "input" in kwargs and "input" not in own and first is not None:
                return rule(kwargs.pop("input"), *args, **kwargs)
        return rule(*args, **kwargs)

    return call


# ---- reading the table


def lookup(function: Callable) -> OpRule | None:
    """Find the rule of a callable from `__torch_function__` or of an overload from
    `__torch_dispatch__`.
    """
    try:
        return _LOOKUP_CACHE[function]
    except KeyError:
        pass
    found = _BY_FUNCTION.get(function)
    for key in _candidate_keys(function) if found is None else ():
        found = _find(key)
        if found is not None:
            break
    _LOOKUP_CACHE[function] = found
    return found


def _find(key: str) -> OpRule | None:
    if key in _RULES:
        return _RULES[key]
    if _is_inplace_name(key) and key[:-1] in _RULES:
        plain = _RULES[key[:-1]]
        return OpRule(key, plain.rule, inplace=True, view=plain.view)
    return None


def op_names() -> tuple[str, ...]:
    """List the keys of the table, sorted."""
    return tuple(sorted(_RULES))


def _candidate_keys(function: Callable) -> tuple[str, ...]:
    """Return the keys under which a callable may be listed, the most specific first."""
    if isinstance(function, torch._ops.OpOverload):
        packet, overload = function._schema.name, function._overloadname
        return _aten_keys(packet, f"{packet}.{overload}")
    if isinstance(function, torch._ops.OpOverloadPacket):
        return _aten_keys(function._qualified_op_name)
    name = getattr(function, "__name__", "")
    if name == "__get__":  # a property: `torch.Tensor.T.__get__`
        descriptor = function.__self__
        return (descriptor.__name__,) if _is_tensor_member(descriptor) else ()
    module = getattr(function, "__module__", None) or ""
    if _is_tensor_member(function) or module == "torch._tensor":
        prefix = ("Tensor.",)
    elif module == "torch.nn.functional":
        prefix = ("F.",)
    elif module in ("torch", "torch.functional") or module.startswith("torch._C"):
        prefix = ()
    else:  # `torch.masked.sum` is not `torch.sum`
        return ()
    name = _OPERATORS.get(name, name)
    keys = (*(p + name for p in prefix), name)
    return keys + ((name.removeprefix("special_"),) if name.startswith("special_") else ())


def _is_tensor_member(function: Any) -> bool:
    return issubclass(torch.Tensor, getattr(function, "__objclass__", ()))


def _aten_keys(qualified: str, *specific: str) -> tuple[str, ...]:
    namespace, _, name = qualified.partition("::")
    if namespace != "aten":
        return (*specific, qualified)
    name = _OPERATORS.get(name, name)
    return (*specific, qualified, name, name.removeprefix("special_"))


# ---- randomness

_KEY_SOURCE: contextvars.ContextVar[Callable[[], Any] | None] = contextvars.ContextVar(
    "key_source", default=None
)


@contextlib.contextmanager
def key_source(make_key: Callable[[], Any]) -> Iterator[None]:
    """Provide random ops in this context with JAX keys: each op calls `make_key()` once."""
    token = _KEY_SOURCE.set(make_key)
    try:
        yield
    finally:
        _KEY_SOURCE.reset(token)


def next_key() -> Any:
    """Return a fresh JAX random key from the surrounding `key_source`."""
    make_key = _KEY_SOURCE.get()
    if make_key is None:
        raise TracingError(
            "A random torch op (dropout, bernoulli, rand_like, ...) ran where no random key is "
            "available. Random ops need a key per step, so that a trace can be replayed. Call the "
            "model through `eb.wrap`, or run the rule inside `with key_source(make_key):`."
        )
    return make_key()
