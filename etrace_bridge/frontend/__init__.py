"""From a torch module to a brainstate module: torch's own forward code, traced."""

from etrace_bridge.frontend.borders import to_jax, to_torch
from etrace_bridge.frontend.hooks import apply_parameter_hooks
from etrace_bridge.frontend.module import BridgedModule, BufferState, wrap
from etrace_bridge.frontend.ops import register_op
from etrace_bridge.frontend.reference import TorchRun, run_torch
from etrace_bridge.frontend.state import Adapter, register_adapter, supported_layers
from etrace_bridge.frontend.trace import trace_function
from etrace_bridge.frontend.verify import VerifyReport, verify

__all__ = [
    "Adapter",
    "BridgedModule",
    "BufferState",
    "TorchRun",
    "VerifyReport",
    "apply_parameter_hooks",
    "register_adapter",
    "register_op",
    "run_torch",
    "supported_layers",
    "to_jax",
    "to_torch",
    "trace_function",
    "verify",
    "wrap",
]
