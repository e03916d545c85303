"""The methods that tasks are run with: every rule of the package, and backpropagation as baseline
and ceiling.
"""

from __future__ import annotations

from benchmarks.reproduce.tasks import Task
from benchmarks.reproduce.training import Method
from etrace_bridge.rules import LowRankRTRL, rule_names

BASELINES = {
    "tbptt 1": Method("bptt"),
    "tbptt 25": Method("bptt", window=25),
    "bptt": Method("bptt", whole=True),
}
RANKS = {f"low_rank {r}": Method(LowRankRTRL(rank=r)) for r in (1, 2, 4)}


def all_methods() -> dict[str, Method]:
    """Every method by name, the baselines first."""
    rules = {n: Method(n) for n in rule_names() if n not in ("bptt", "low_rank")}
    return BASELINES | rules | RANKS


def methods_for(task: Task, names: list[str] | None = None) -> dict[str, Method]:
    """The methods of a task, or those of them that are asked for."""
    methods = {n: m for n, m in (all_methods() | dict(task.extra)).items() if n not in task.without}
    if names is None:
        return methods
    unknown = sorted(set(names) - set(methods))
    if unknown:
        raise SystemExit(
            f"Task {task.key} has no method {', '.join(unknown)}; it has {', '.join(methods)}."
        )
    return {n: methods[n] for n in names}
