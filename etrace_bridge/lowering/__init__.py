"""Everything that exists because of XLA or of one backend, behind one interface: `Tuning`, `jit`.

The base class `Tuning` is plain JAX, and what a GPU or TPU gets. `CPUTuning` lays the same programs
out for XLA's CPU compiler. No file outside this folder speaks of XLA, of a CPU or of barriers;
tests/test_house.py holds this.
"""

from etrace_bridge.lowering.compile import (
    as_call,
    compiler_options,
    jit,
    keep_programs,
    traced_once,
)
from etrace_bridge.lowering.cpu import CPUTuning
from etrace_bridge.lowering.notice import Program, announcing, hushed
from etrace_bridge.lowering.tuning import Bind, Tuning

__all__ = [
    "Bind",
    "CPUTuning",
    "Program",
    "Tuning",
    "announcing",
    "as_call",
    "compiler_options",
    "hushed",
    "jit",
    "keep_programs",
    "traced_once",
    "tuning_for",
]


def tuning_for(platform: str | None = None) -> Tuning:
    """Return the tuning for a kind of device (`"cpu"`, `"gpu"`, `"tpu"`); None: JAX's default."""
    import jax

    return CPUTuning() if (platform or jax.default_backend()) == "cpu" else Tuning()
