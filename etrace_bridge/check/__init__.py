"""Checks: online gradients compared with torch's BPTT, and which rule fits a budget."""

import etrace_bridge._precision  # noqa: F401 - before anything imports brainstate
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.gradients import assert_gradients_close, check_gradients
from etrace_bridge.check.parameter_report import ParameterReport
from etrace_bridge.check.recommend import Candidate, Recommendation, recommend
from etrace_bridge.check.rule_comparison import RuleComparison
from etrace_bridge.check.stepwise import StepCheck

__all__ = [
    "Candidate",
    "GradientReport",
    "ParameterReport",
    "Recommendation",
    "RuleComparison",
    "StepCheck",
    "assert_gradients_close",
    "check_gradients",
    "recommend",
]
