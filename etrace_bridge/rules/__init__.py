"""Learning rules: each a small frozen object with `init` and `chunk`."""

from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, make_rule, register_rule, rule_names
from etrace_bridge.rules.bptt import BPTT
from etrace_bridge.rules.d_rtrl import DRTRL
from etrace_bridge.rules.eprop import EProp
from etrace_bridge.rules.pp_prop import PPProp
from etrace_bridge.rules.rtrl import RTRL
from etrace_bridge.rules.snap1 import SnAp1

__all__ = [
    "BPTT",
    "DRTRL",
    "RTRL",
    "Carry",
    "Chunk",
    "ChunkResult",
    "EProp",
    "PPProp",
    "Rule",
    "SnAp1",
    "make_rule",
    "register_rule",
    "rule_names",
]
