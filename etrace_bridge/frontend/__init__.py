"""From a torch module to a brainstate module: torch's own forward code, traced."""

import etrace_bridge._precision  # noqa: F401 - before anything imports brainstate
from etrace_bridge.frontend.adapter import Adapter, register_adapter, supported_layers
from etrace_bridge.frontend.borders import (
    held_shape,
    living,
    to_host,
    to_jax,
    to_real_jax,
    to_torch,
)
from etrace_bridge.frontend.held import BufferState
from etrace_bridge.frontend.hooks import apply_parameter_hooks, is_in_backward
from etrace_bridge.frontend.inputs import InputForm, map_input, read_call
from etrace_bridge.frontend.inside import PLAIN, names_of
from etrace_bridge.frontend.module import BridgedModule
from etrace_bridge.frontend.ops import register_op
from etrace_bridge.frontend.ops.ranges import (
    IndexRange,
    InputRange,
    check_ranges,
    input_name,
    trace_with_ranges,
)
from etrace_bridge.frontend.outer import unwrapped
from etrace_bridge.frontend.reference import TorchRun, run_torch
from etrace_bridge.frontend.settings import Settings
from etrace_bridge.frontend.steady import SteadyStep
from etrace_bridge.frontend.trace import trace_function
from etrace_bridge.frontend.verify import VerifyReport, verify
from etrace_bridge.frontend.wrapping import wrap

__all__ = [
    "PLAIN",
    "Adapter",
    "BridgedModule",
    "BufferState",
    "IndexRange",
    "InputForm",
    "InputRange",
    "Settings",
    "SteadyStep",
    "TorchRun",
    "VerifyReport",
    "apply_parameter_hooks",
    "check_ranges",
    "held_shape",
    "input_name",
    "is_in_backward",
    "living",
    "map_input",
    "names_of",
    "read_call",
    "register_adapter",
    "register_op",
    "run_torch",
    "supported_layers",
    "to_host",
    "to_jax",
    "to_real_jax",
    "to_torch",
    "trace_function",
    "trace_with_ranges",
    "unwrapped",
    "verify",
    "wrap",
]
