"""How many of torch's own op samples give torch's values and gradients through the bridge.

    python benchmarks/op_coverage.py                    # every relevant entry of torch's `op_db`, float64
    python benchmarks/op_coverage.py --complex          # the entries that take complex numbers, complex128
    python benchmarks/op_coverage.py add matmul -v      # some of them, each failure with its reason

An entry passes if its first samples, run as a model would run them (the torch function on traced
tensors), give torch's values, and torch's gradients for a random cotangent. Left out are entries
that no recurrent step can use: random ops (tested by distribution elsewhere), results whose shape
depends on values, sparse, nested and quantised layouts, memory without a value, and code for GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from etrace_bridge._errors import BridgeError
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.trace import trace_function

TOLERANCE = 1e-8
RANDOM = """
    bernoulli cauchy exponential geometric log_normal normal multinomial rand randn randint randperm random uniform poisson dropout
    alpha_dropout feature_alpha_dropout native_dropout rrelu fractional_max_pool2d fractional_max_pool3d svd_lowrank pca_lowrank
""".split()
VALUE_SHAPES = "nonzero_static masked_select nonzero argwhere unique unique_consecutive bincount histc histogram histogramdd combinations".split()
NO_VALUE = "empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ resize_as_ item equal allclose".split()
LAYOUTS = "chalf jiterator hash_tensor sparse to_sparse jagged nested quantize _foreach _efficient_attention _flash_attention ops.aten._ torch.ops".split()
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def is_relevant(op: Any) -> bool:
    """Return whether a recurrent step may use an op."""
    name = op.name.removeprefix("nn.functional.")
    words = re.split(r"[._]", name)
    if (
        name in VALUE_SHAPES
        or name in NO_VALUE
        or any(name.startswith(p) or f".{p}" in op.name for p in LAYOUTS)
    ):
        return False
    return not (
        name in RANDOM
        or name.removesuffix("_like") in RANDOM
        or "dropout" in name
        or "signal" in words
    )


def samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple]:
    """Return the first small dense samples of an op."""
    torch.manual_seed(0)
    chosen = 0
    for sample in itertools.islice(
        op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), 60
    ):
        tensors = _tensors((sample.input, sample.args, sample.kwargs))
        if tensors and all(t.layout == torch.strided and 0 < t.numel() <= 2000 for t in tensors):
            yield (sample.input, *sample.args), sample.kwargs
            chosen += 1
        if chosen == count:
            return


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _replaced(value: Any, waiting: Iterator) -> Any:
    if isinstance(value, torch.Tensor):
        return next(waiting)
    if isinstance(value, dict):
        return {k: _replaced(v, waiting) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_replaced(v, waiting) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def check_sample(op: Any, args: tuple, kwargs: dict) -> None:
    """Raise if the bridge's values or gradients are not torch's."""
    given = _tensors((args, kwargs))
    floats = [n for n, t in enumerate(given) if t.requires_grad]

    def call(values: list[Any]) -> list[Any]:
        new_args, new_kwargs = _replaced((args, kwargs), iter(values))
        return _tensors(op.op(*new_args, **new_kwargs))

    own = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    # A leaf that requires grad cannot be written in place.
    wanted = call([t.clone() for t in own])
    weights = [torch.randn(w.shape, dtype=w.dtype) if w.requires_grad else None for w in wanted]
    total = sum(
        ((w.conj() * v).sum().real for w, v in zip(weights, wanted, strict=True) if w is not None),
        torch.zeros(()),
    )
    grads = (
        torch.autograd.grad(total, [own[n] for n in floats], allow_unused=True)
        if total.requires_grad
        else [None] * len(floats)
    )

    arrays = [to_jax(t) for t in given]
    traced = trace_function(lambda values: tuple(call(values)))

    def run(some: list[Any]) -> tuple[Any, Any]:
        full = list(arrays)
        for n, x in zip(floats, some, strict=True):
            full[n] = x
        outputs = traced(full)
        parts = [
            (jax.numpy.conj(to_jax(w)) * o).sum().real
            for w, o in zip(weights, outputs, strict=True)
            if w is not None
        ]
        return sum(parts, jax.numpy.zeros(())), outputs

    if total.requires_grad:
        step = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=QUICK)
        (_, outputs), found = step([arrays[n] for n in floats])
    else:
        outputs = jax.jit(lambda some: run(some)[1], compiler_options=QUICK)(
            [arrays[n] for n in floats]
        )
        found = []
    for n, (a, b) in enumerate(zip(outputs, wanted, strict=True)):
        _compare(f"output {n}", np.asarray(a), b.detach())
    for n, (a, b) in enumerate(zip(found, grads, strict=False)):
        if b is not None:
            _compare(f"gradient {n}", np.conj(np.asarray(a)), b)


def _compare(what: str, found: np.ndarray, wanted: torch.Tensor) -> None:
    wanted = wanted.float() if wanted.dtype == torch.bfloat16 else wanted  # NumPy has no bfloat16
    found = found.astype(np.float32) if found.dtype == jax.numpy.bfloat16 else found
    expected = wanted.resolve_conj().resolve_neg().numpy(force=True)
    if found.shape != expected.shape or found.dtype.kind != expected.dtype.kind:
        raise AssertionError(
            f"{what}: {found.dtype}{found.shape}, torch {expected.dtype}{expected.shape}"
        )
    if not np.allclose(
        found,
        expected,
        rtol=TOLERANCE,
        atol=TOLERANCE * max(1.0, np.abs(expected).max(initial=0)),
        equal_nan=True,
    ):
        raise AssertionError(f"{what} differs by {np.nanmax(np.abs(found - expected)):.2g}")


def check_op(op: Any, dtype: torch.dtype, count: int) -> str | None:
    """Return None if an op passes, its reason if not, and "no sample" if there is nothing to try."""
    tried = 0
    try:
        for args, kwargs in samples(op, dtype, count):
            try:
                check_sample(op, args, kwargs)
            except BridgeError as error:
                return f"refused: {str(error).splitlines()[0][:150]}"
            tried += 1
    except AssertionError as error:
        return f"WRONG: {error}"
    except Exception as error:  # of torch, of JAX, of the harness: the report says which
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return None if tried else "no sample"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="entries of op_db; all if there are none")
    parser.add_argument("--complex", action="store_true", help="complex128 in place of float64")
    parser.add_argument("--samples", type=int, default=2, help="samples of each entry")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show each failure as it happens"
    )
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    warnings.filterwarnings("ignore")
    from torch.testing._internal.common_methods_invocations import op_db  # slow to import

    dtype = torch.complex128 if options.complex else torch.float64
    chosen = [
        op
        for op in op_db
        if is_relevant(op)
        and dtype in op.dtypes
        and (not options.names or op.name in options.names)
    ]
    results: dict[str, str | None] = {}
    for op in chosen:
        results[op.formatted_name] = check_op(op, dtype, options.samples)
        if options.verbose and results[op.formatted_name] is not None:
            print(f"  {op.formatted_name}: {results[op.formatted_name]}", flush=True)
    tried = {name: reason for name, reason in results.items() if reason != "no sample"}
    failed = {name: reason for name, reason in tried.items() if reason is not None}
    wrong = [name for name, reason in failed.items() if reason and reason.startswith("WRONG")]
    print(
        f"{dtype}: {len(tried) - len(failed)} of {len(tried)} relevant entries of op_db pass; "
        f"{len(failed)} fail, {len(wrong)} of them wrong"
    )
    if not options.verbose:
        for name, reason in failed.items():
            print(f"  {name}: {reason}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
