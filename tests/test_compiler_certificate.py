"""The certificate tells the truth: where it says exact, brute-force D-RTRL equals BPTT; where not,
it does not.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import models
from oracle_compiler import Unrolled, compute

STEPS = 6


def inputs_of(args, rng):
    """A sequence of inputs like the example: integers are drawn anew, floats from a normal
    distribution.
    """

    def one(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 5, x.shape), x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape), x.dtype)

    return [tuple(one(x) for x in args) for _ in range(STEPS)]


@pytest.fixture(scope="module", params=list(models.ZOO))
def gradients(request):
    graph, (_, args) = models.graph_of(request.param), models.build(request.param)
    unrolled = Unrolled(graph, inputs_of(args, np.random.default_rng(2)))
    bptt, online = compute(lambda: (unrolled.bptt(), unrolled.d_rtrl()))
    by_path: dict = {}
    for n, v in enumerate(graph.module_info.weight_invars):
        found = by_path.setdefault(graph.module_info.invar_to_weight_path[v], ([], [], []))
        for where, values in zip(found, (bptt, online["step"], online["core"]), strict=True):
            where.append(values[n].ravel())
    return (
        request.param,
        graph,
        {p: tuple(map(np.concatenate, found)) for p, found in by_path.items()},
    )


def agrees(a, b):
    return np.linalg.norm(a - b) <= 1e-9 * np.linalg.norm(b)


def test_exact_means_equal_to_bptt(gradients):
    name, graph, by_path = gradients
    for path, certificate in graph.certificate().items():
        bptt, step, core = by_path[path]
        if certificate.kind == "unused":
            np.testing.assert_array_equal(bptt, 0)
            np.testing.assert_array_equal(step, 0)
            continue
        assert np.linalg.norm(bptt) > 1e-3, f"{name} {path}: a zero gradient shows nothing"
        if certificate.exact:
            assert agrees(step, bptt), f"{name} {path}: certified exact, {step} is not {bptt}"
            assert agrees(core, bptt), (
                f"{name} {path}: certified exact, with credit='core' {core} is not {bptt}"
            )


def test_approximate_means_different_from_bptt(gradients):
    name, graph, by_path = gradients
    for path, certificate in graph.certificate().items():
        bptt, step, _ = by_path[path]
        if certificate.kind != "unused" and not certificate.exact:
            assert not agrees(step, bptt), f"{name} {path}: certified approximate, but it is exact"
            assert certificate.drops
