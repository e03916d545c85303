"""The compiler: one step of a model, read from its plain jaxpr into an `ETraceGraph`."""

import etrace_bridge._precision  # noqa: F401 - before anything imports brainstate
from etrace_bridge.compiler.certificate import Cut, Drop, ParameterCertificate
from etrace_bridge.compiler.contacts import ContactForm, register_contact
from etrace_bridge.compiler.core_equations import Core
from etrace_bridge.compiler.diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.graph import ETraceGraph, StepStructure, compile_etrace_graph
from etrace_bridge.compiler.hidden_group import (
    HiddenGroup,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
)
from etrace_bridge.compiler.hidden_leaves import HiddenLeaf
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.perturbation import (
    HiddenPerturbation,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
)
from etrace_bridge.compiler.primitives import register_elementwise
from etrace_bridge.compiler.relation import (
    HiddenParamOpRelation,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from etrace_bridge.compiler.weight_views import WeightView

__all__ = [
    "CompilationRecord",
    "ContactForm",
    "Core",
    "Cut",
    "DiagnosticKind",
    "DiagnosticLevel",
    "Drop",
    "ETraceGraph",
    "HiddenGroup",
    "HiddenLeaf",
    "HiddenParamOpRelation",
    "HiddenPerturbation",
    "ModuleInfo",
    "ParameterCertificate",
    "StepStructure",
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
