"""Every rule of the op table against torch: values, dtypes, gradients, in-place forms, aten
signatures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from etrace_bridge.frontend.ops import OpRule, lookup, op_names, registry
from op_cases import (
    LEFT_OUT,
    RANDOM,
    REFUSED,
    TABLE_OPS,
    UNSET_MEMORY,
    Call,
    calls_of,
    compare,
    function_of,
    map_tensors,
    quietly,
    rule_of,
    with_other_numbers,
)
from op_hand_cases import HAND_CASES, KINKS
from share import FULL

# Equal entries may come in any order, so indices are not compared where entries can be equal.
ANY_ORDER = frozenset("topk kthvalue median sort".split())
# And how many samples of each, at least.
DTYPES = {
    torch.float64: 4 if FULL else 3,
    torch.float32: 2 if FULL else 1,
    torch.int64: 1,
    torch.bool: 1,
}
_heavy = ("pool", "conv", "norm")  # half of that for these


def _samples(op: Any) -> list[tuple[OpRule, Call]]:
    """Choose the calls for one entry of `op_db`: several dtypes, other numbers, and the in-place
    form.
    """
    rule = rule_of(op)
    keep = lambda c: not LEFT_OUT.get(rule.name, lambda _: False)(c)
    chosen = []
    for dtype, limit in DTYPES.items():
        if dtype not in op.dtypes:
            continue
        limit = max(limit // 2, 1) if any(word in op.name for word in _heavy) else limit
        calls = list(
            filter(
                keep,
                calls_of(
                    op, dtype, limit, with_grad=op.supports_autograd and dtype.is_floating_point
                ),
            )
        )
        chosen += [(rule, c) for c in calls]
        if dtype == torch.float64:  # a number rounded to float32 shows at the tolerance of float64
            others = [
                other
                for other in map(with_other_numbers, calls)
                if other is not None and keep(other)
            ]
            chosen += [(rule, c) for c in others[:2]]
        if op.inplace_variant is not None and lookup(op.inplace_variant) is not None:
            chosen += [(lookup(op.inplace_variant), c) for c in _inplace_calls(op, calls[:1])]
    return chosen


# torch finds out only in the backward pass that it has no derivative for the in-place form.
NO_INPLACE_DERIVATIVE = frozenset({"acosh", "asinh", "atanh"})


def _inplace_calls(op: Any, calls: list[Call]) -> list[Call]:
    """Keep the calls that torch accepts in place: same shape, a dtype that can hold the result, a
    derivative if need be.
    """
    accepted = []
    for c in calls:
        for prepare in (torch.clone, lambda t: t.detach().clone()):
            if prepare is torch.clone and op.name in NO_INPLACE_DERIVATIVE:
                continue
            args, kwargs = map_tensors(prepare, c.args), map_tensors(prepare, c.kwargs)
            try:
                quietly(op.inplace_variant, *args, **kwargs)
            except (RuntimeError, NotImplementedError):
                continue
            keep = c if prepare is torch.clone else map_tensors(torch.detach, c)
            accepted.append(Call(op.inplace_variant, keep.args, keep.kwargs))
            break
    return accepted


# ---- values, dtypes, gradients


@pytest.mark.parametrize("op", TABLE_OPS, ids=lambda op: op.formatted_name)
def test_rule_equals_torch(op: Any) -> None:
    calls = _samples(op)
    assert calls, f"no sample of {op.name} is left"
    skip = (1,) if rule_of(op).name in ANY_ORDER else ()
    compare(calls, with_grad=True, skip_outputs=skip)


@pytest.mark.parametrize("part", range(8))
def test_hand_made_cases_equal_torch(part: int) -> None:
    compare([(lookup(c.function), c) for c in HAND_CASES[part::8]], with_grad=True)


@pytest.mark.parametrize("part", range(6))
def test_derivatives_at_kinks_equal_torch(part: int) -> None:
    compare([(lookup(c.function), c) for c in KINKS[part::6]], with_grad=True)


class _AtenRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.calls.append(
            Call(func, map_tensors(torch.clone, args), map_tensors(torch.clone, kwargs or {}))
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("part", range(8))
def test_aten_signatures_equal_torch(part: int) -> None:
    """Below `torch.*`, the same ops arrive as aten overloads: record those that torch itself makes,
    and run the rules on them.
    """
    found: dict[Any, Call] = {}
    for op in TABLE_OPS[part::8]:
        for c in calls_of(op, torch.float32, 1) if torch.float32 in op.dtypes else ():
            if not LEFT_OUT.get(rule_of(op).name, lambda _: False)(c):
                with _AtenRecorder() as recorder:
                    quietly(c.function, *c.args, **c.kwargs)
                found.update((r.function, r) for r in recorder.calls)
    known = [(lookup(f), c) for f, c in found.items() if lookup(f) is not None]
    known = [
        (rule, c)
        for rule, c in known
        if rule.name not in RANDOM | UNSET_MEMORY | REFUSED and not _left_out(rule, c)
    ]
    assert len(known) >= 15
    compare(known, with_grad=False)


def _left_out(rule: OpRule, call: Call) -> bool:
    return "convolution" in rule.name and call.args[0].numel() == 0


# ---- no gap in the table


def _covered_names() -> set[str]:
    covered = {lookup(c.function).name for c in [*HAND_CASES, *KINKS]}
    for op in op_db:
        for function in (function_of(op), op.method_variant, op.inplace_variant):
            if function is not None and lookup(function) is not None:
                covered.add(lookup(function).name)
    return covered


# It takes no traced values, so it has a test of its own: test_op_table.py.
CONSTANTS_ONLY = frozenset({"aten::repeat_interleave.Tensor"})


def test_every_entry_has_a_case() -> None:
    """An entry is covered by its own case, or by one of another name for the same rule."""
    covered = _covered_names() | RANDOM | UNSET_MEMORY | REFUSED | CONSTANTS_ONLY
    # what other tests registered
    names = {name for name in op_names() if not name.startswith("etrace_bridge_tests::")}
    body = lambda name: registry._RULES[name].rule.__wrapped__
    bodies = {body(name) for name in covered & names}
    assert sorted(name for name in names - covered if body(name) not in bodies) == []


def test_table_covers_at_least_150_ops_of_op_db() -> None:
    names = {rule_of(op).name for op in TABLE_OPS}
    assert len(names) >= 300
    assert sum(op.supports_autograd for op in TABLE_OPS) >= 250
