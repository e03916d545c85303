"""Learning rules: each a small frozen object that states an equation."""

from etrace_bridge.rules.base import (
    Carry,
    Chunk,
    ChunkResult,
    Promise,
    ReverseRule,
    Rule,
    make_rule,
    register_rule,
    rule_names,
    rule_text,
)
from etrace_bridge.rules.bptt import BPTT
from etrace_bridge.rules.d_rtrl import DRTRL
from etrace_bridge.rules.decolle import DECOLLE
from etrace_bridge.rules.dni import DNI
from etrace_bridge.rules.eprop import EProp
from etrace_bridge.rules.fptt import FPTT
from etrace_bridge.rules.immediate import Immediate
from etrace_bridge.rules.kf_rtrl import KFRTRL
from etrace_bridge.rules.low_rank import LowRankRTRL
from etrace_bridge.rules.ok_rtrl import OKRTRL
from etrace_bridge.rules.ostl import OSTL
from etrace_bridge.rules.otpe import OTPE
from etrace_bridge.rules.ottt import OTTT
from etrace_bridge.rules.pp_prop import PPProp
from etrace_bridge.rules.rflo import RFLO
from etrace_bridge.rules.rtrl import RTRL
from etrace_bridge.rules.snap1 import SnAp1
from etrace_bridge.rules.snap_n import SnApN
from etrace_bridge.rules.three_factor import ThreeFactor
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem
from etrace_bridge.rules.uoro import UORO

__all__ = [
    "BPTT",
    "DECOLLE",
    "DNI",
    "DRTRL",
    "FPTT",
    "KFRTRL",
    "OKRTRL",
    "OSTL",
    "OTPE",
    "OTTT",
    "RFLO",
    "RTRL",
    "UORO",
    "Carry",
    "Chunk",
    "ChunkResult",
    "EProp",
    "Immediate",
    "LowRankRTRL",
    "PPProp",
    "Promise",
    "ReverseRule",
    "Rule",
    "SnAp1",
    "SnApN",
    "ThreeFactor",
    "TraceRule",
    "TraceSystem",
    "make_rule",
    "register_rule",
    "rule_names",
    "rule_text",
]
