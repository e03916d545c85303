"""Cases for the op table: torch's own samples (`op_db`), and the comparison of one rule with torch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core as opinfo_core

from etrace_bridge.frontend.ops import OpRule, lookup
from etrace_bridge.frontend.ops.dtypes import cast, to_jax_dtype
from quick_jit import quick_jit

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


class Call(NamedTuple):
    """One call of a torch function."""

    function: Callable
    args: tuple
    kwargs: dict


# ---- torch values and JAX values


def map_tensors(function: Callable, value: Any) -> Any:
    """Apply a function to every tensor in nested arguments."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: map_tensors(function, v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(map_tensors(function, v) for v in (value.start, value.stop, value.step)))
    return value


def to_array(tensor: torch.Tensor) -> Any:
    """Copy a tensor into a JAX array."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.float() if tensor.dtype == torch.bfloat16 else plain  # NumPy has no bfloat16
    # `astype` copies; nothing is compiled
    return jax.device_put(plain.numpy().astype(to_jax_dtype(tensor.dtype)))


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """List the tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in flat_tensors(item)]
    return []


def flat_arrays(result: Any) -> list[Any]:
    """List the arrays of a result, in order."""
    if isinstance(result, (list, tuple)):
        return [array for item in result for array in flat_arrays(item)]
    return [] if result is None else [result]


# ---- running a rule beside torch


def quietly(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call torch with its own warnings (deprecations, sizes that differ) ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def run_torch(call: Call, with_grad: bool) -> tuple[list[torch.Tensor], list[Any], list[Any]]:
    """Give torch's results, their cotangents, and the gradients of the floating inputs, None where
    torch has none.
    """
    inputs: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        if tensor.is_floating_point():
            inputs.append(copy.requires_grad_(with_grad and tensor.requires_grad))
        return copy

    args, kwargs = map_tensors(leaf, call.args), map_tensors(leaf, call.kwargs)
    # in-place functions refuse leaves
    copied = map_tensors(lambda x: x.clone(), args) if with_grad else args
    result = quietly(call.function, *copied, **kwargs)
    results = flat_tensors(copied[0] if result is None else result)  # `__setitem__` returns nothing
    cotangents = [_cotangent(r, k) if r.requires_grad else None for k, r in enumerate(results)]
    outputs = [r for r in results if r.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not outputs or not wanted:
        return [r.detach() for r in results], [], []
    found = iter(
        torch.autograd.grad(
            outputs, wanted, [c for c in cotangents if c is not None], allow_unused=True
        )
    )
    grads = [next(found) if x.requires_grad else None for x in inputs]
    grads = [
        torch.zeros_like(x) if g is None and x.requires_grad else g
        for x, g in zip(inputs, grads, strict=True)
    ]
    return [r.detach() for r in results], cotangents, grads


def _cotangent(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).uniform(0.5, 1.5, tuple(tensor.shape)) * np.where(
        np.arange(tensor.numel()) % 3, 1, -1
    ).reshape(tuple(tensor.shape))
    return torch.tensor(values, dtype=tensor.dtype)


def jax_function(rule: OpRule, call: Call) -> tuple[Callable, list[Any]]:
    """Give the rule as a function of the call's floating inputs, and those inputs as arrays; the
    rest is constant.
    """
    inputs: list[Any] = []

    def place(tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point():
            return to_array(tensor)
        inputs.append(to_array(tensor))
        return _Slot(len(inputs) - 1)

    args, kwargs = map_tensors(place, call.args), map_tensors(place, call.kwargs)

    def function(*values: Any) -> list[Any]:
        result = rule.rule(*_fill(args, values), **_fill(kwargs, values))
        if rule.writes_input(call.args, call.kwargs):  # torch keeps the dtype of what it writes to
            return [cast(result, call.args[0].dtype)]
        return flat_arrays(result[0] if rule.writes else result)

    return function, inputs


class _Slot(int):
    """Stands for the n-th floating input."""


def _fill(value: Any, values: tuple) -> Any:
    if isinstance(value, _Slot):
        return values[int(value)]
    if isinstance(value, (list, tuple)):
        items = [_fill(v, values) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: _fill(v, values) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_fill(v, values) for v in (value.start, value.stop, value.step)))
    return value


class Expected(NamedTuple):
    """Torch's answer to a call: results, their cotangents, gradients of the inputs."""

    results: list[torch.Tensor]
    cotangents: list[torch.Tensor | None]
    grads: list[torch.Tensor | None]


COARSE = {"logcumsumexp": 1e-11}  # torch's gradient is a difference of large numbers


def compare(
    calls: list[tuple[OpRule, Call]], *, with_grad: bool, skip_outputs: tuple[int, ...] = ()
) -> None:
    """Run rules on calls, all in one compiled program, and demand torch's values, dtypes and
    gradients.
    """
    expected, programs, inputs = [], [], []
    for rule, call in calls:
        expected.append(Expected(*run_torch(call, with_grad)))
        program, arrays = jax_function(rule, call)
        programs.append(program)
        inputs.append(arrays)

    def everything(inputs: list[list[Any]]) -> list[tuple[list[Any], list[Any]]]:
        answers = []
        for program, arrays, (_, cotangents, _) in zip(programs, inputs, expected, strict=True):
            if not cotangents:
                answers.append((program(*arrays), []))
                continue
            values, pull = jax.vjp(program, *arrays)
            seeds = [_seed(v, c) for v, c in zip(values, cotangents, strict=True)]
            answers.append((values, list(pull(seeds))))
        return answers

    answers = quick_jit(everything)(inputs)
    for (values, grads), (results, cotangents, torch_grads), (rule, call) in zip(
        answers, expected, calls, strict=True
    ):
        what, tolerance = f"{rule.name}, {describe(call)}", COARSE.get(rule.name, 0.0)
        assert len(values) == len(results), (
            f"{what}: {len(values)} results, torch has {len(results)}"
        )
        for k, (value, result) in enumerate(zip(values, results, strict=True)):
            assert value.dtype == to_jax_dtype(result.dtype), (
                f"{what}: result {k} has {value.dtype}, torch {result.dtype}"
            )
            assert not value.weak_type, f"{what}: result {k} is weakly typed"
            if k not in skip_outputs:
                _close(value, result, f"{what}: result {k}", tolerance)
        if cotangents:
            for k, (grad, torch_grad) in enumerate(zip(grads, torch_grads, strict=True)):
                if torch_grad is not None:
                    _close(grad, torch_grad, f"{what}: gradient of floating input {k}", tolerance)


def _seed(value: Any, cotangent: torch.Tensor | None) -> Any:
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return np.zeros(value.shape, jax.dtypes.float0)
    return jax.numpy.zeros_like(value) if cotangent is None else to_array(cotangent)


def _close(value: Any, tensor: torch.Tensor, what: str, tolerance: float) -> None:
    """Compare relative to the largest entry, which is what sums of many terms can be held to."""
    limit = max(TOLERANCE.get(tensor.dtype, 0.0), tolerance)
    expected = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
    found = np.asarray(value).astype(expected.dtype)
    scale = (
        max(
            1.0,
            np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max(
                initial=0
            ),
        )
        if limit
        else 1.0
    )
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, torch {expected.shape}"
    np.testing.assert_allclose(
        found, expected, rtol=limit, atol=limit * scale, equal_nan=True, err_msg=what
    )


def describe(call: Call) -> str:
    """Write a call's arguments, tensors as dtype and shape."""
    short = lambda x: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    return f"{map_tensors(short, call.args)} {map_tensors(short, call.kwargs)}"


# ---- torch's samples


class _Recorder(TorchFunctionMode):
    """Records the calls that reach torch's public functions and methods, those of the table only."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if lookup(func) is not None:
            self.calls.append(Call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(function: Callable, args: tuple, kwargs: dict) -> list[Call]:
    """Run a function and give the calls it makes of functions in the table."""
    with _Recorder() as recorder:
        quietly(function, *args, **kwargs)
    return recorder.calls


def _public(op: Any) -> Callable | None:
    """Give the public function that an `op_db` entry is about, where the entry holds a wrapper."""
    owner: Any = torch
    for part in op.name.split("."):
        owner = getattr(owner, part, None)
    return getattr(torch.Tensor, op.name, None) if owner is None else owner


def function_of(op: Any) -> Callable | None:
    """Give the function of the table that an `op_db` entry tests, or None."""
    for function in (op.op, _public(op)):
        if function is not None and lookup(function) is not None:
            return function
    return None


def table_ops() -> list[Any]:
    """List the entries of `op_db` whose function the table knows."""
    return [op for op in op_db if function_of(op) is not None]


_CALLS: dict[tuple, list[Call]] = {}
_SAMPLES: dict[tuple, list[Call]] = {}


def calls_of(op: Any, dtype: torch.dtype, limit: int, with_grad: bool = False) -> list[Call]:
    """Choose samples of one entry, spread over torch's list, with broadcasting and scalar operands
    among them.
    """
    key = (op.formatted_name, dtype, limit, with_grad)
    if key not in _CALLS:
        _CALLS[key] = _choose_calls(op, dtype, limit, with_grad)
    return _CALLS[key]


def _choose_calls(op: Any, dtype: torch.dtype, limit: int, with_grad: bool) -> list[Call]:
    calls = _samples(op, dtype, with_grad, 100 if limit > 2 else 12)
    if len(calls) > limit:
        chosen = [calls[round(i * (len(calls) - 1) / max(limit - 1, 1))] for i in range(limit)]
        for wanted in (_has_number, _broadcasts):
            if not any(map(wanted, chosen)):
                chosen += [c for c in calls if wanted(c)][:1]
        calls = chosen
    if lookup(op.op) is None:  # a wrapper: take the calls that it makes
        calls = [
            inner
            for c in calls
            for inner in recorded(*c)
            if lookup(inner.function) == lookup(function_of(op))
        ]
    return calls


def _samples(op: Any, dtype: torch.dtype, with_grad: bool, most: int) -> list[Call]:
    """The first of torch's samples of one entry; making them is what tests of all ops cost."""
    key = (op.formatted_name, dtype, with_grad, most)
    if key not in _SAMPLES:
        torch.manual_seed(0)
        # torch looks through the stack for its own test class and reads every frame's source
        with (
            mock.patch.object(common_utils, "extract_test_fn", lambda: None),
            mock.patch.object(opinfo_core, "extract_test_fn", lambda: None),
        ):
            samples = quietly(
                lambda: list(
                    itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=with_grad), most)
                )
            )
        calls = (Call(op.op, (s.input, *s.args), s.kwargs) for s in samples)
        _SAMPLES[key] = [c for c in calls if _fits(c)]
    return _SAMPLES[key]


THIRD = 0.1 / 3  # neither it nor a sum with it is a float32


def with_other_numbers(call: Call) -> Call | None:
    """Give a call with its floats replaced by numbers that float32 cannot hold; None if it has
    none, or torch refuses them.
    """
    if not _has_float((call.args, call.kwargs)):
        return None
    for by in (THIRD, -THIRD):
        other = Call(call.function, _shifted(call.args, by), _shifted(call.kwargs, by))
        try:
            quietly(
                other.function,
                *map_tensors(torch.clone, other.args),
                **map_tensors(torch.clone, other.kwargs),
            )
        except (RuntimeError, ValueError, TypeError):  # out of the argument's range
            continue
        return other
    return None


def _shifted(value: Any, by: float) -> Any:
    if isinstance(value, float):
        return value + by
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([_shifted(v, by) for v in value])
    return (
        {name: _shifted(v, by) for name, v in value.items()} if isinstance(value, dict) else value
    )


def _has_float(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return (
        any(map(_has_float, value))
        if isinstance(value, (list, tuple))
        else isinstance(value, float)
    )


def _fits(call: Call) -> bool:
    tensors = flat_tensors([call.args, list(call.kwargs.values())])
    return all(
        t.layout == torch.strided and not t.is_complex() and t.numel() <= 8_000 for t in tensors
    )


def _has_number(call: Call) -> bool:
    return any(isinstance(a, (int, float)) for a in call.args[1:])


def _broadcasts(call: Call) -> bool:
    return len({tuple(t.shape) for t in flat_tensors(call.args)}) > 1


# ---- what is compared otherwise, or not at all

RANDOM = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform_ "
    "exponential_ random_ bernoulli bernoulli_ poisson multinomial dropout dropout1d dropout2d "
    "dropout3d feature_dropout alpha_dropout feature_alpha_dropout "
    "native_dropout".split()
)
UNSET_MEMORY = frozenset("empty empty_like new_empty empty_strided new_empty_strided".split())
REFUSED = frozenset(
    "masked_select nonzero argwhere unique unique_consecutive _unique2 bincount".split()
)

# Samples that the rule refuses with a clear error, or that have no single right answer.
LEFT_OUT: dict[str, Callable[[Call], bool]] = {
    "scaled_dot_product_attention": lambda c: c.kwargs.get("dropout_p", 0) > 0,  # random
    "rrelu": lambda c: c.kwargs.get("training", False),  # random
    "F.embedding": lambda c: (
        c.kwargs.get("max_norm") is not None or c.kwargs.get("scale_grad_by_freq", False)
    ),  # refused
    "norm": lambda c: "nuc" in (*c.args[1:2], c.kwargs.get("p")),  # needs singular values: refused
    # the same
    "linalg_norm": lambda c: any(a in ("nuc", 2, -2) for a in (*c.args[1:2], c.kwargs.get("ord"))),
    "linalg_matrix_norm": lambda c: any(
        a in ("nuc", 2, -2) for a in (*c.args[1:2], c.kwargs.get("ord"))
    ),  # the same
    # fixed-point arithmetic on bytes: refused
    "interpolate": lambda c: not c.args[0].is_floating_point(),
    "F.batch_norm": lambda c: c.args[0].ndim < 2,  # an empty vector, which has no channels
    # torch's gradient is off by 2e-3 there, ours by 2e-7
    "logcumsumexp": lambda c: c.args[0].dtype == torch.float32,
    # torch's order of equal entries is not stable then
    "argsort": lambda c: c.args[0].numel() > 1000,
    # torch rounds the step to an integer
    "logspace": lambda c: not c.kwargs.get("dtype", torch.float64).is_floating_point,
}
# Variants of which no sample is left: complex numbers, CUDA, singular values, indices of equal
# entries.
NO_SAMPLES = frozenset(
    (
        "view_as_real",
        "imag",
        "nn_functional_silu_complex",
        "nn_functional_batch_norm_without_cudnn",
        "norm_nuc",
    )
)


def rule_of(op: Any) -> OpRule:
    """Give the rule that an `op_db` entry tests."""
    return lookup(function_of(op))


TABLE_OPS = [
    op
    for op in table_ops()
    if rule_of(op).name not in RANDOM | UNSET_MEMORY | REFUSED
    and op.formatted_name not in NO_SAMPLES
]
