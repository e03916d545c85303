"""The test process: CPU only, float64 on, one thread a process, every warning an error (see
pyproject.toml), programs compiled quickly and once for all processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

# Before anything imports JAX or torch; subprocesses of tests inherit these. One thread to run
# programs on, so that two pytest workers share two cores. NPROC is XLA's: it sizes its thread pool
# (compiling still uses several threads).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Compiling is most of what tests cost. LLVM's optimisation is left out (a third of a learner's
# first call), save in files that use `users_compiler`; `make test-full` has it everywhere.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if not os.environ.get("FULL_TESTS"):
    os.environ.setdefault("XLA_FLAGS", _QUICK)
# A program that one test has compiled the next one reads, in whichever process it runs. The first
# process makes the folder and removes it, see `pytest_unconfigure`.
_MADE_FOLDER = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _MADE_FOLDER:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="etrace-bridge-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import gc
from collections.abc import Iterator
from typing import Any

import brainstate
import hypothesis
import jax
import numpy as np
import pytest
import torch

from etrace_bridge.lowering.compile import OPTIONS
from fuzz_record import record
from strict import promotion, run_tests_strictly

# brainstate turns JAX's x64 off when it is imported and keeps a default dtype of its own, so the
# switch is thrown through it. Not through the environment: a command line started by a test runs as
# it does for a user.
brainstate.environ.set(precision=64)
run_tests_strictly()

# The quick profile tries the same programs every time; `make fuzz` looks for new ones. Compiling a
# program takes seconds, so time limits would only report how busy the machine is.
_anyspeed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
_programs = int(os.environ.get("FUZZ_PROGRAMS", "2000"))
hypothesis.settings.register_profile(
    "quick", max_examples=36, derandomize=True, database=None, **_anyspeed
)
hypothesis.settings.register_profile("fuzz", max_examples=_programs, print_blob=True, **_anyspeed)
hypothesis.settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _programs_to_try(request: pytest.FixtureRequest) -> None:
    """Load the profile again for fuzz tests: torch's own test helpers, once imported, put a profile
    of theirs in its place.
    """
    if request.node.get_closest_marker("fuzz") is not None:
        hypothesis.settings.load_profile(
            request.config.getoption("--hypothesis-profile", None) or "quick"
        )


@pytest.fixture(autouse=True)
def _precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests marked `x32` in JAX's default 32-bit mode."""
    if request.node.get_closest_marker("x32") is None:
        yield
    else:
        with brainstate.environ.context(precision=32):
            yield


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let JAX promote dtypes and ranks in tests marked `implicit_promotion`, as it does for
    users.
    """
    marker = request.node.get_closest_marker("implicit_promotion")
    with promotion(implicit=True) if marker else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _seed(_precision: None) -> None:
    """Start every test from the same random state, whatever ran before it in this process."""
    np.random.seed(0)
    torch.manual_seed(0)
    brainstate.random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    report = yield
    if report.failed and item.get_closest_marker("fuzz") is not None:
        record(item.originalname, "faults")
    return report


def pytest_unconfigure() -> None:
    if _MADE_FOLDER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def users_compiler() -> Iterator[None]:
    """Compile with the options that users get: for files about what the compiler makes of a
    program, and one of each kind that runs learners as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "xla_backend_optimization_level", 3)
        patch.setitem(OPTIONS, "xla_llvm_disable_expensive_passes", False)
        yield


@pytest.fixture
def without_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the single steps of `check_gradients`, which have tests of their own:
    test_check_steps.py.

    Wrapping and compiling for them is nearly half of its time.
    """
    monkeypatch.setattr(
        "etrace_bridge.check.torch_check.TorchCheck.with_single_steps",
        lambda self, reports: reports,
    )


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
    """Drop compiled programs after each file: thousands of them exhaust the memory maps of one
    process.
    """
    yield
    gc.collect()
    jax.clear_caches()
