"""Checks: online gradients compared with torch's BPTT, and which rule fits a budget."""

import etrace_bridge._precision  # noqa: F401 - before anything imports brainstate
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.gradients import assert_gradients_close, check_gradients
from etrace_bridge.check.recommend import recommend
from etrace_bridge.check.rule_comparison import RuleComparison

__all__ = [
    "GradientReport",
    "RuleComparison",
    "assert_gradients_close",
    "check_gradients",
    "recommend",
]
