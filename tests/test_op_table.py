"""The op table beside its values: promotion, views and writes, the jaxpr that rules leave, random
ops, errors, extension.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from etrace_bridge import InputError, NotSupportedError, TracingError, register_op
from etrace_bridge.frontend.call_kinds import NOT_HANDED_ON
from etrace_bridge.frontend.ops import key_source, lookup, next_key, registry
from etrace_bridge.frontend.ops.dtypes import TORCH_TO_JAX, result_type, to_jax_dtype
from etrace_bridge.frontend.trace import trace_function
from op_cases import (
    LEFT_OUT,
    REFUSED,
    TABLE_OPS,
    Call,
    calls_of,
    describe,
    flat_tensors,
    jax_function,
    map_tensors,
    quietly,
    rule_of,
    to_array,
)

# ---- promotion

_ALL_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
_OPERANDS = [
    True,
    2,
    1.5,
    *(torch.ones(shape, dtype=d) for d in _ALL_DTYPES for shape in ((), (2,))),
]


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_result_type_is_torchs(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for a, b in itertools.product(_OPERANDS, repeat=2):
            arrays = [to_array(v) if isinstance(v, torch.Tensor) else v for v in (a, b)]
            assert result_type(*arrays) == torch.result_type(a, b), (a, b)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "function",
    [
        torch.add,
        torch.sub,
        torch.mul,
        torch.div,
        torch.true_divide,
        torch.maximum,
        torch.eq,
        torch.where,
        torch.pow,
        torch.atan2,
        torch.lerp,
    ],
    ids=lambda f: f.__name__,
)
def test_mixed_operands_promote_as_in_torch(function: Callable) -> None:
    """Result dtypes of a binary op for every pair of tensor, 0-dim tensor and Python number that
    torch accepts.
    """
    condition = (torch.tensor([True, False]),) if function is torch.where else ()
    extra = (torch.tensor([0.5, 0.5]),) if function is torch.lerp else ()
    accepted = 0
    for a, b in itertools.product(_OPERANDS, repeat=2):
        call = Call(function, (*condition, a, b, *extra), {})
        try:
            expected = function(*call.args).dtype
        except (RuntimeError, TypeError):
            continue
        accepted += 1
        program, inputs = jax_function(lookup(function), call)
        (found,) = jax.eval_shape(program, *inputs)
        assert (found.dtype, found.weak_type) == (to_jax_dtype(expected), False), describe(call)
    assert accepted >= (4 if function is torch.lerp else 200)


@pytest.mark.x32
def test_64_bit_dtypes_without_x64() -> None:
    x = jnp.ones(3)
    assert lookup(torch.argmax).rule(x).dtype == jnp.int32
    assert lookup(torch.Tensor.long).rule(x).dtype == jnp.int32
    with pytest.raises(NotSupportedError, match="jax_enable_x64"):
        lookup(torch.Tensor.double).rule(x)


def test_dtypes_map_one_to_one() -> None:
    assert len(set(TORCH_TO_JAX.values())) == len(TORCH_TO_JAX)


# ---- views and writes


def test_view_flags_are_torchs() -> None:
    """Where torch's result shares memory with its input, the rule says so; where the rule says
    view, torch shares memory.
    """
    for op in TABLE_OPS:
        rule = rule_of(op)
        shared = (
            [_shares_memory(c) for c in calls_of(op, torch.float32, 2)]
            if torch.float32 in op.dtypes
            else []
        )
        if any(shared) and not rule.inplace:
            assert rule.view or rule.may_return_input or rule.name in _RETURNS_INPUT_AT_TIMES, (
                op.name
            )
        elif shared and not any(shared) and rule.view:
            assert rule.name in _COPIES_HERE, op.name


# `cat` of one tensor and the like return a copy; these return their input itself for some
# arguments.
_RETURNS_INPUT_AT_TIMES = frozenset("nan_to_num".split())
_COPIES_HERE = frozenset("getitem".split())


def _shares_memory(call: Call) -> bool:
    inputs = [t for t in flat_tensors(list(call.args)) if t.numel()]
    results = flat_tensors(quietly(call.function, *call.args, **call.kwargs))
    places = {t.untyped_storage().data_ptr() for t in inputs}
    return any(r.untyped_storage().data_ptr() in places for r in results if r.numel())


def test_views_run_on_index_arrays() -> None:
    """The tracer finds out where a view's entries lie by running its rule on the integers 0, 1, 2,
    ...
    """
    checked = set()
    for op in TABLE_OPS:
        rule = rule_of(op)
        if (
            not rule.view
            or rule.name == "meshgrid"
            or not isinstance(getattr(op, "op", None), Callable)
        ):
            # `meshgrid` takes several tensors of one dtype: none of them alone can be replaced by
            # its places
            continue
        if rule.name == "view_as_complex":
            # Torch has no complex integers; tests/test_complex.py writes through such views
            continue
        for c in calls_of(op, torch.float32, 2):
            if not isinstance(c.args[0], torch.Tensor) or any(
                isinstance(a, torch.Tensor) and a.ndim for a in c.args[2:]
            ):
                continue
            places = torch.arange(c.args[0].numel()).reshape(c.args[0].shape)
            expected = flat_tensors(c.function(places, *c.args[1:], **c.kwargs))
            values = map_tensors(to_array, (places, *c.args[1:]))
            found = rule.rule(*values, **map_tensors(to_array, c.kwargs))
            found = found if isinstance(found, (tuple, list)) else [found]
            assert all(
                np.array_equal(f, e.numpy()) for f, e in zip(found, expected, strict=True)
            ), describe(c)
            checked.add(rule.name)
    assert len(checked) >= 25


@pytest.mark.parametrize(
    "function",
    [F.relu, F.elu, F.hardtanh, F.leaky_relu, F.silu, F.dropout, F.threshold],
    ids=lambda f: f.__name__,
)
def test_inplace_flag_is_seen(function: Callable) -> None:
    rule = lookup(function)
    assert not rule.writes_input((0,), {})
    assert rule.writes_input((0,), {"inplace": True})


def test_inplace_flag_is_seen_by_position() -> None:
    assert lookup(F.relu).writes_input((0, True), {})
    assert not lookup(F.relu).writes_input((0, False), {})
    assert lookup(torch.Tensor.add_).writes_input((0, 1), {})


@pytest.mark.parametrize(
    "function, running",
    [(F.batch_norm, (1, 2)), (torch.batch_norm, (3, 4)), (F.instance_norm, (1, 2))],
)
def test_running_statistics_are_torchs(function: Callable, running: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, mean, var = torch.randn(4, 3, 5).double(), torch.randn(3).double(), torch.rand(3).double()
    tail = {3: (True, 0.3, 1e-5, False), 1: (None, None, True, 0.3)}[running[0]]
    head = (x, None, None) if running[0] == 3 else (x,)
    args = (*head, mean, var, *tail)
    rule = lookup(function)
    assert rule.written(args, {}) == [mean, var]
    _, *new = rule.rule(*map_tensors(to_array, args))
    function(*args)
    for found, expected in zip(new, (mean, var), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


# ---- the jaxpr that a rule leaves

# A derivative of its own (custom_jvp), JAX's random generator, or a routine of JAX with loops of
# its own; `max` and `min` along an axis are one call for the search of folds over time, which the
# finished step does not have.
_NESTED = {
    "max", "min",
    "F.binary_cross_entropy", "matrix_exp", "linalg_householder_product", "linalg_solve", "linalg_solve_ex", "cholesky",
    "linalg_cholesky", "linalg_cholesky_ex", "linalg_inv", "linalg_inv_ex", "inverse", "linalg_solve_triangular",
    "quantile", "nanquantile", "ndtri", "log_ndtr",
}  # fmt: skip


def test_rules_leave_bare_primitives() -> None:
    """The compiler reads the jaxpr: no rule hides its primitives in a call."""
    for op in TABLE_OPS:
        rule = rule_of(op)
        for c in calls_of(op, torch.float32, 1) if torch.float32 in op.dtypes else ():
            if LEFT_OUT.get(rule.name, lambda _: False)(c):
                continue
            program, inputs = jax_function(rule, c)
            names = {eqn.primitive.name for eqn in jax.make_jaxpr(program)(*inputs).eqns}
            calls = names & {
                "jit",
                "pjit",
                "custom_jvp_call",
                "custom_vjp_call",
                "while",
                "cond",
                "scan",
            }
            assert not calls or rule.name in _NESTED, (rule.name, calls, describe(c))


def test_linear_is_one_dot_general() -> None:
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 3), (4, 3), (4,))]
    jaxpr = jax.make_jaxpr(lookup(F.linear).rule)(*shapes)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["dot_general", "broadcast_in_dim", "add"]


@pytest.mark.parametrize(
    "function, expected",
    [(torch.add, ["add"]), (torch.relu, ["le", "broadcast_in_dim", "select_n"])],
)
def test_element_wise_ops_add_nothing(function: Callable, expected: list[str]) -> None:
    args = (
        (jnp.ones((2, 3), jnp.float32), 2)
        if function is torch.add
        else (jnp.ones((2, 3), jnp.float32),)
    )
    jaxpr = (
        jax.make_jaxpr(lambda *a: lookup(function).rule(*a))(*args[:1]) if len(args) == 1 else None
    )
    jaxpr = jaxpr or jax.make_jaxpr(lambda x: lookup(function).rule(x, 2))(args[0])
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == expected


# ---- random ops


def _with_keys(function: Callable, seed: int = 0) -> Any:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    with key_source(lambda: next(keys)):
        return function()


def _draw(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return _with_keys(lambda: lookup(function).rule(*args, **kwargs))


N = 20_000
_ones = np.ones(N)
# Each sample's mean and deviation, which hold within five standard errors.
DISTRIBUTIONS = [
    (torch.rand, (N,), 0.5, 12**-0.5), (torch.randn, (N,), 0, 1), (torch.rand_like, (_ones,), 0.5, 12**-0.5),
    (torch.randn_like, (_ones,), 0, 1), (torch.randint, (3, 13, (N,)), 7.5, (99 / 12) ** 0.5),
    (torch.randint, (10, (N,)), 4.5, (99 / 12) ** 0.5),
    (torch.randint_like, (_ones, 10), 4.5, (99 / 12) ** 0.5), (torch.bernoulli, (_ones * 0.3,), 0.3, 0.21**0.5),
    (torch.Tensor.bernoulli_, (_ones, 0.3), 0.3, 0.21**0.5), (torch.Tensor.normal_, (_ones, 2.0, 3.0), 2, 3),
    (torch.Tensor.uniform_, (_ones, -1, 3), 1, 4 * 12**-0.5), (torch.Tensor.exponential_, (_ones, 2.0), 0.5, 0.5),
    (torch.Tensor.random_, (_ones, 10), 4.5, (99 / 12) ** 0.5), (torch.normal, (_ones, 2.0), 1, 2), (torch.normal, (1.0, 2.0, (N,)), 1, 2),
    (torch.poisson, (_ones * 4,), 4, 2), (torch.multinomial, (np.array([0.2, 0.0, 0.8]), N, True), 1.6, 0.8),
    (F.dropout, (_ones, 0.25), 1, 3**-0.5), (F.dropout1d, (_ones.reshape(-1, 2, 1), 0.25), 1, 3**-0.5),
    (F.dropout2d, (_ones.reshape(-1, 2, 1, 1), 0.25), 1, 3**-0.5), (F.dropout3d, (_ones.reshape(-1, 2, 1, 1, 1), 0.25), 1, 3**-0.5),
    (torch.feature_dropout, (_ones.reshape(-1, 2), 0.25, True), 1, 3**-0.5),
]  # fmt: skip


@pytest.mark.parametrize(
    "function, args, mean, deviation", DISTRIBUTIONS, ids=lambda v: getattr(v, "__name__", "")
)
def test_random_ops_have_torchs_distribution(
    function: Callable, args: tuple, mean: float, deviation: float
) -> None:
    arrays = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    sample = np.asarray(_draw(function, *arrays), np.float64)
    assert sample.size == N
    assert abs(sample.mean() - mean) < 5 * deviation / N**0.5
    assert abs(sample.std() - deviation) < 0.05 * deviation
    torch_args = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in args]
    assert to_jax_dtype(function(*torch_args).dtype) == _draw(function, *arrays).dtype


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(function: Callable) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((N // 2, 2)))
    dropped = np.asarray(_draw(function, x, 0.4, True))
    assert abs(dropped.mean()) < 0.05 and abs(dropped.std() - 1) < 0.05
    assert np.unique(np.round(dropped, 9), return_counts=True)[1].max() > N * 0.3


def test_native_dropout_gives_its_mask() -> None:
    dropped, keep = _draw(torch.native_dropout, jnp.ones(N), 0.25, True)
    np.testing.assert_allclose(dropped, np.where(keep, 1 / 0.75, 0.0))


def test_permutations_and_draws_without_replacement() -> None:
    order = np.asarray(_draw(torch.randperm, 50))
    assert sorted(order) == list(range(50)) and list(order) != sorted(order)
    assert sorted(np.asarray(_draw(torch.multinomial, jnp.ones(5), 5))) == list(range(5))


def test_dropout_in_evaluation_or_with_probability_0_and_1() -> None:
    x = jnp.ones(5)
    assert lookup(F.dropout).rule(x, 0.5, False) is x
    assert lookup(torch.dropout).rule(x, 0.5, train=False) is x
    np.testing.assert_array_equal(_draw(F.dropout, x, 1.0), np.zeros(5))


def test_unset_memory_has_torchs_shape_and_dtype() -> None:
    x = torch.ones(2, 3, dtype=torch.int32)
    cases = [(torch.empty, (2, 3)), (torch.empty_like, (x,)), (torch.Tensor.new_empty, (x, (4,))),
             (torch.empty_strided, ((2, 3), (3, 1))), (torch.Tensor.new_empty_strided, (x, (2, 3), (3, 1)))]  # fmt: skip
    for function, args in cases:
        expected, found = function(*args), lookup(function).rule(*map_tensors(to_array, args))
        assert (tuple(expected.shape), to_jax_dtype(expected.dtype)) == (found.shape, found.dtype)


# ---- errors and extension


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_results_of_unknown_size_are_refused(name: str) -> None:
    with pytest.raises(TracingError, match=r"size depends on the values .* Use .* instead"):
        registry._RULES[name].rule(jnp.ones(3))


def test_mask_index_of_unknown_size_is_refused() -> None:
    with pytest.raises(TracingError, match=r"x\[mask\].*torch.where"):
        jax.jit(lambda x: lookup(torch.Tensor.__getitem__).rule(x, x > 0))(jnp.ones(3))
    with pytest.raises(TracingError, match="one_hot"):
        jax.jit(lambda x: lookup(F.one_hot).rule(x))(jnp.arange(3))
    with pytest.raises(TracingError, match="torch.where"):
        lookup(torch.where).rule(jnp.ones(3))


@pytest.mark.parametrize(
    "message, function, args",
    [
        ("max_norm", F.embedding, (jnp.arange(2), jnp.ones((3, 2)), None, 1.0)),
        ("scale_grad_by_freq", torch.embedding, (jnp.ones((3, 2)), jnp.arange(2), -1, True)),
        ("singular values", torch.linalg.matrix_norm, (jnp.ones((2, 2)), 2)),
        ("rrelu", F.rrelu, (jnp.ones(2), 0.1, 0.3, True)),
        ("antialias", F.interpolate, (jnp.ones((1, 1, 4)), 2, None, "linear", None, None, True)),
    ],
)
def test_unsupported_arguments_are_named(message: str, function: Callable, args: tuple) -> None:
    with pytest.raises(NotSupportedError, match=message):
        lookup(function).rule(*args)


def test_random_op_without_key_says_so() -> None:
    with pytest.raises(TracingError, match="no random key"):
        next_key()


def test_functions_that_only_share_a_name_are_not_found() -> None:
    def relu(x: Any) -> Any:
        return x

    assert lookup(relu) is None
    assert lookup(torch.masked.sum) is None
    assert lookup(torch.nn.init.normal_) is None
    assert lookup(len) is None
    assert lookup(F.unfold) != lookup(torch.Tensor.unfold)


@pytest.fixture
def table() -> Any:
    """Restore the table after a test that changes it."""
    rules, functions = dict(registry._RULES), dict(registry._BY_FUNCTION)
    yield
    for current, saved in ((registry._RULES, rules), (registry._BY_FUNCTION, functions)):
        current.clear()
        current.update(saved)
    registry._LOOKUP_CACHE.clear()


def test_register_op_serves_all_forms_of_the_op(table: None) -> None:
    assert lookup(torch.special.i0) is None
    register_op(torch.special.i0, lambda input: jax.scipy.special.i0(input))
    for function in (
        torch.special.i0,
        torch.i0,
        torch.Tensor.i0,
        torch.Tensor.i0_,
        torch.ops.aten.i0.default,
        torch.ops.aten.i0,
    ):
        x = torch.tensor([0.5, 1.0], dtype=torch.float64)
        np.testing.assert_allclose(lookup(function).rule(to_array(x)), torch.i0(x), rtol=1e-12)
    assert lookup(torch.Tensor.i0_).inplace and not lookup(torch.i0).inplace


def test_register_op_by_name_and_as_decorator(table: None) -> None:
    @register_op("mylib::decay")
    def decay(v: Any, tau: float) -> Any:
        return v * jnp.exp(-1 / tau)

    library = torch.library.Library("mylib", "DEF")
    library.define("decay(Tensor v, float tau) -> Tensor")
    assert lookup(torch.ops.mylib.decay.default).rule.__wrapped__ is decay
    assert lookup(torch.ops.mylib.decay).rule.__wrapped__ is decay


def test_register_op_for_a_functional_leaves_the_torch_function(table: None) -> None:
    before = lookup(torch.embedding)
    register_op(F.embedding, lambda input, weight: weight[input])
    assert lookup(torch.embedding) is before and lookup(F.embedding).name == "embedding"


def test_register_op_checks_its_arguments(table: None) -> None:
    with pytest.raises(InputError, match="must be a function on JAX arrays"):
        register_op(torch.special.i0, 3)
    with pytest.raises(InputError, match="must be a torch function"):
        register_op(3, lambda x: x)


def test_repeated_indices_of_constants() -> None:
    repeats = torch.tensor([2, 0, 3])
    found = lookup(torch.ops.aten.repeat_interleave.Tensor).rule(repeats.numpy())
    assert np.array_equal(found, torch.repeat_interleave(repeats).numpy())


# ---- arguments that torch loses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_weight_of_l1_loss_is_used(reduction: str) -> None:
    """torch's own `l1_loss` calls itself without `weight` where a mode or tensor type listens."""
    a, b, weight = (torch.rand(3, 4, dtype=torch.float64) for _ in range(3))
    a.requires_grad_()

    def loss(a: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(a, b, reduction=reduction, weight=weight).square().sum()

    loss(a).backward()
    found = jax.grad(trace_function(loss))(jnp.asarray(a.detach().numpy()))
    np.testing.assert_allclose(found, a.grad, rtol=1e-12)


def test_torch_loses_no_argument_that_the_bridge_does_not_know_of() -> None:
    """Reads every Python function of torch that passes itself on to modes and tensor types."""
    lost = {}
    for module in (torch.nn.functional, torch.functional):
        for code in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(code, ast.FunctionDef):
                continue
            names = {
                a.arg for a in (*code.args.posonlyargs, *code.args.args, *code.args.kwonlyargs)
            }
            for call in ast.walk(code):
                if isinstance(call, ast.Call) and "handle_torch_function" in ast.unparse(call.func):
                    handed_on = [*call.args[2:], *(keyword.value for keyword in call.keywords)]
                    used = {n.id for a in handed_on for n in ast.walk(a) if isinstance(n, ast.Name)}
                    if names - used:
                        lost[getattr(module, code.name)] = tuple(sorted(names - used))
    lost.pop(torch.chain_matmul, None)  # `out`, which the bridge does not take
    assert lost.items() <= NOT_HANDED_ON.items()
