"""Online learning for recurrent and spiking models written in PyTorch."""

import jax as _jax

_x64 = _jax.config.jax_enable_x64
import brainstate as _brainstate

if _x64 and not _jax.config.jax_enable_x64:  # importing brainstate turns x64 off, also where the user had turned it on
    _brainstate.environ.set(precision=64)

from etrace_bridge import rules
from etrace_bridge._errors import (
    BridgeError,
    CompilationError,
    InputError,
    NonFiniteError,
    NotSupportedError,
    StateError,
    TracingError,
    UnsupportedOpError,
)
from etrace_bridge.check import assert_gradients_close, check_gradients
from etrace_bridge.check_comparison import RuleComparison
from etrace_bridge.check_report import GradientReport
from etrace_bridge.compiler import (
    CompilationRecord,
    ContactForm,
    Cut,
    DiagnosticKind,
    DiagnosticLevel,
    Drop,
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    HiddenPerturbation,
    ModuleInfo,
    ParameterCertificate,
    WeightView,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
    compile_etrace_graph,
    extract_module_info,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
    register_contact,
    register_elementwise,
)
from etrace_bridge.fit import EarlyStopping, History
from etrace_bridge.frontend import (
    Adapter,
    BridgedModule,
    BufferState,
    register_adapter,
    register_op,
    run_torch,
    supported_layers,
    to_jax,
    to_torch,
    trace_function,
    verify,
    wrap,
)
from etrace_bridge.learner import OnlineLearner
from etrace_bridge.plot import plot_graph
from etrace_bridge.recommend import recommend
from etrace_bridge.results import GradientResult, SequenceResult, StepInfo

__all__ = [
    "plot_graph",
    "GradientReport",
    "RuleComparison",
    "assert_gradients_close",
    "check_gradients",
    "recommend",
    "EarlyStopping",
    "GradientResult",
    "History",
    "NonFiniteError",
    "OnlineLearner",
    "SequenceResult",
    "StepInfo",
    "rules",
    "Adapter",
    "BridgedModule",
    "BridgeError",
    "BufferState",
    "CompilationError",
    "InputError",
    "NotSupportedError",
    "StateError",
    "TracingError",
    "UnsupportedOpError",
    "register_adapter",
    "register_op",
    "run_torch",
    "supported_layers",
    "to_jax",
    "to_torch",
    "trace_function",
    "verify",
    "wrap",
    "CompilationRecord",
    "ContactForm",
    "Cut",
    "DiagnosticKind",
    "DiagnosticLevel",
    "Drop",
    "ETraceGraph",
    "HiddenGroup",
    "HiddenParamOpRelation",
    "HiddenPerturbation",
    "ModuleInfo",
    "ParameterCertificate",
    "WeightView",
    "add_hidden_perturbation_from_minfo",
    "add_hidden_perturbation_in_module",
    "compile_etrace_graph",
    "extract_module_info",
    "find_hidden_groups_from_minfo",
    "find_hidden_groups_from_module",
    "find_hidden_param_op_relations_from_minfo",
    "find_hidden_param_op_relations_from_module",
    "register_contact",
    "register_elementwise",
]
