"""The private parts of torch, JAX, brainstate and torch2jax that this package relies on, each with
a check.

`HOOKS` lists them. `check_hooks` runs once per process, at the first `wrap`: a version in which one
of them has changed is refused by name, before it can give a wrong gradient. Parts that fail with an
error of their own when they change (`torch._decomp`, `Optimizer._opt_called`, an option of the
compiler) are not listed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch2jax
from torch import Tensor, nn
from torch.autograd import Function

from etrace_bridge import _jax_compat as compat
from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend.calls import intercepted_calls, plain_call
from etrace_bridge.frontend.hooks import is_in_backward
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.tensor import TracedTensor
from etrace_bridge.frontend.trace import trace_function, tracing
from etrace_bridge.frontend.tracer import Tracer

LIBRARIES = ("torch", "jax", "brainstate", "torch2jax")


@dataclass(frozen=True)
class Hook:
    """A private part of a library.

    Attributes:
        name: The part, as an error names it.
        needed_for: What the bridge does with it.
        holds: Whether it does what the bridge needs; an exception means no.
    """

    name: str
    needed_for: str
    holds: Callable[[], bool]


@functools.cache
def check_hooks() -> None:
    """Raise `NotSupportedError` for the first hook that does not hold; the second call does
    nothing.
    """
    for hook in HOOKS:
        cause = None
        try:
            with _plain_surroundings():
                holds = hook.holds()
        except Exception as error:
            holds, cause = False, error
        if not holds:
            raise NotSupportedError(_refusal(hook, cause)) from cause


@contextlib.contextmanager
def _plain_surroundings() -> Iterator[None]:
    """Shield the checks from the caller's modes: `no_grad`, `inference_mode`, warnings as errors.

    A JAX trace does no harm, because nothing runs.
    """
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _refusal(hook: Hook, cause: Exception | None) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    why = (
        "does not do what it did"
        if cause is None
        else f"failed with {type(cause).__name__}: {cause}"
    )
    return (
        f"{hook.name} {why}, in {versions} on Python {platform.python_version()}. The bridge "
        f"relies on it for {hook.needed_for}, and gradients would be wrong without it. Install "
        "versions that were tested: `pip install 'etrace-bridge'` with its own bounds (see "
        "Install in the README), and please report this."
    )


# ---- torch


class _Declared(Function):
    """A Function whose declared gradient is not that of its forward code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x


class _DeclaredApart(Function):
    """The same with `setup_context`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 500 * grad * x


_bound_before = _Declared.apply
_ONE = np.float32(1.0)


def _functions() -> bool:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = _Declared.apply(x) + _bound_before(x)
        return (
            _Declared.apply(x) + 10 * _bound_before(x) + _DeclaredApart.apply(x) + 7000 * constant
        )

    return _product(jax.make_jaxpr(jax.grad(trace_function(model)))(_ONE * 2)) == 2 * (3 + 30 + 500)


def _product(closed: Any) -> float:
    """Evaluate the gradient of the above at 2, operation by operation: compiling would take longer
    than all checks.
    """
    rules = {"mul": np.multiply, "add_any": np.add}
    jaxpr = compat.remove_dead_equations(closed.jaxpr)
    values = dict.fromkeys(jaxpr.invars, 2.0) | dict(
        zip(jaxpr.constvars, closed.consts, strict=True)
    )
    read = lambda v: v.val if isinstance(v, compat.Literal) else values[v]
    for eqn in jaxpr.eqns:
        values[eqn.outvars[0]] = rules[eqn.primitive.name](*map(read, eqn.invars))
    return float(read(jaxpr.outvars[0]))


def _module_calls() -> bool:
    inner, outer, seen = nn.Identity(), nn.Sequential(), []
    outer.append(inner)

    def handler(module: nn.Module, args: tuple, kwargs: dict) -> Any:
        seen.append(module)
        return plain_call(module, *args, **kwargs)

    with intercepted_calls(handler):
        outer(torch.zeros(1))
    return seen == [outer, inner]


def _traced(function: Callable, tracer: Tracer | None = None) -> tuple[str, ...]:
    """Name the primitives of a torch function of one traced tensor."""

    def run(value: Any) -> Any:
        own = tracer or Tracer()
        with tracing(own):
            return own.read(function(TracedTensor(value)))

    return tuple(eqn.primitive.name for eqn in jax.make_jaxpr(run)(_ONE).eqns)


def _torch_calls() -> bool:
    weight, tracer = nn.Parameter(torch.ones(())), Tracer()
    tracer.track(weight, TracedTensor(jnp.asarray(np.ones(()))))
    # no traced argument: only the mode can see it
    on_parameter = _traced(lambda x: torch.sin(weight), tracer)
    return on_parameter == ("sin",) and _traced(torch.sin) == ("sin",)


def _aten_calls() -> bool:
    def below(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.sin(x)

    return _traced(below) == ("sin",)


def _plain_reads() -> bool:
    def shares_memory(x: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return (
                x.view(1).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                and type(x + x) is Tensor
            )

    with tracing(Tracer()):
        return shares_memory(torch.zeros(()))


def _op_names() -> bool:
    names = (
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.add,
        torch.Tensor.add,
        torch.Tensor.__add__,
        torch.nn.functional.relu,
    )
    return all(registry.lookup(name) is not None for name in names) and callable(
        torch.ops.aten.add.Tensor.decompose
    )


def _hook_tables() -> bool:
    parameter, module = nn.Parameter(torch.ones(())), nn.Identity()

    def hook(*_: Any) -> None:
        return None

    parameter.register_hook(hook)
    parameter.register_post_accumulate_grad_hook(hook)
    module.register_full_backward_hook(hook)
    module.register_full_backward_pre_hook(hook)
    tables = (
        parameter._backward_hooks,
        parameter._post_accumulate_grad_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return all(hook in (table or {}).values() for table in tables)


def _backward_passes() -> bool:
    within = []
    x = torch.ones((), requires_grad=True)
    x.register_hook(lambda _: within.append(is_in_backward()))
    (2 * x).backward()
    return within == [True] and not is_in_backward()


def _memory() -> bool:
    module = nn.Module()
    module.register_buffer("state", torch.zeros(2))
    state = module.get_buffer("state")
    before = state._version
    attribute = cast(torch.Tensor, module.state)
    attribute.add_(1)
    return state is module._buffers["state"] is attribute and state._version > before


# ---- JAX, all in `_jax_compat.py`


def _jaxprs() -> bool:
    table = jnp.asarray(np.arange(3.0))

    def function(x: Any, unused: Any) -> tuple:
        return jnp.sin(unused), x * table + 1.0

    closed = jax.make_jaxpr(function)(2.0, 1.0)
    whole = closed.jaxpr
    part = compat.sub_jaxpr(whole, whole.eqns, whole.invars, whole.outvars[1:], whole.constvars)
    part = compat.remove_dead_equations(part)
    kept = (
        len(part.invars) == 2
        and len(part.constvars) == len(closed.consts) == 1
        and "sin" not in str(part)
    )
    again = compat.ClosedJaxpr(
        compat.sub_jaxpr(part, part.eqns, part.invars[:1], part.outvars, part.constvars),
        closed.consts,
    )
    copied = jax.make_jaxpr(lambda x: compat.evaluate_jaxpr(again, x))(2.0)
    names = lambda jaxpr: [eqn.primitive.name for eqn in jaxpr.eqns]
    return (
        kept
        and len(again.jaxpr.invars) == 1
        and names(copied.jaxpr) == names(part)
        and "mul" in names(part)
    )


def _equations() -> bool:
    def bind(x: Any) -> Any:
        known.append(compat.is_concrete(x))
        with compat.keep_source(eqn):
            return compat.bind_equation(eqn, [x])[0]

    known: list[bool] = []
    (eqn,) = jax.make_jaxpr(jax.named_scope("canary")(lambda x: compat.copy_p.bind(x)))(1.0).eqns
    (bound,) = jax.make_jaxpr(bind)(1.0).eqns
    scopes = compat.module_scope(eqn), compat.module_scope(bound)
    return (
        known == [False]
        and bound.primitive is compat.copy_p
        and scopes == ("canary", "canary")
        and "canary" in compat.user_line(bound)
    )


# ---- brainstate and torch2jax


def _states() -> bool:
    class Counter(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            one = jnp.asarray(np.ones(()))
            self.weight, self.count = brainstate.ParamState(one), brainstate.HiddenState(one)

        def __call__(self, x: Any) -> Any:
            self.count.value = self.count.value + self.weight.value * x
            return self.count.value

    counter = Counter()
    stateful = brainstate.transform.StatefulFunction(counter.__call__, return_only_write=False)
    stateful.make_jaxpr(1.0)
    closed, states = stateful.get_jaxpr(1.0), stateful.get_states(1.0)
    sizes = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    return (
        {id(s) for s in states} == {id(counter.weight), id(counter.count)}
        and sizes == (3, 3)
        and hasattr(counter.count, "stack_level")
    )


def _torch2jax_rules() -> bool:
    rule = torch2jax.HANDLED_FUNCTIONS[torch.tanh]
    names = [
        eqn.primitive.name
        for eqn in jax.make_jaxpr(lambda x: rule(torch2jax.Torchish(x)).value)(1.0).eqns
    ]
    return names == ["tanh"] and issubclass(
        torch2jax.TorchishMode, torch.overrides.TorchFunctionMode
    )


HOOKS = (
    Hook(
        "`torch.autograd.Function.apply`",
        "the gradients that Functions declare (surrogate gradients)",
        _functions,
    ),
    Hook("`torch.nn.Module.__call__`", "the states of inner modules", _module_calls),
    Hook(
        "`__torch_function__` of torch's modes and subclasses",
        "seeing every torch call of a model",
        _torch_calls,
    ),
    Hook(
        "`torch._C.DisableTorchFunctionSubclass`",
        "computing a torch call by its aten pieces",
        _aten_calls,
    ),
    Hook(
        "`torch._C.DisableTorchFunction`", "reading a tensor's memory while tracing", _plain_reads
    ),
    Hook(
        "the names of torch's functions and `torch.ops.aten`",
        "finding the JAX rule of a torch call",
        _op_names,
    ),
    Hook("`Tensor._backward_hooks` and its relatives", "hooks on gradients", _hook_tables),
    Hook(
        "`torch._C._current_graph_task_id`",
        "refusing steps that a backward pass runs again",
        _backward_passes,
    ),
    Hook("`Tensor._version` and `Module._buffers`", "finding the states of a model", _memory),
    Hook(
        "`jax._src.interpreters.partial_eval.dce_jaxpr` and `Jaxpr.replace`",
        "taking programs apart",
        _jaxprs,
    ),
    Hook(
        "`jax._src.source_info_util` and `JaxprEqn.ctx`",
        "running single equations of a program",
        _equations,
    ),
    Hook("`brainstate.transform.StatefulFunction`", "the program of a step", _states),
    Hook(
        "`torch2jax.HANDLED_FUNCTIONS`",
        "torch calls without a rule of the bridge",
        _torch2jax_rules,
    ),
)
