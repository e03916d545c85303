"""What the compiler decided, as data: one `CompilationRecord` per decision."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

Path = tuple[Any, ...]


class DiagnosticKind(str, enum.Enum):
    """One member for each kind of decision the compiler takes."""

    RELATION_INCLUDED = "relation_included"
    NON_TEMPORAL = "non_temporal"
    UPSTREAM = "upstream_of_another_weight"
    UNKNOWN_CONTACT = "unknown_contact"
    UNUSED_PARAMETER = "unused_parameter"
    CUT = "cut"
    COND_CONVERTED = "cond_converted"
    SCAN_UNROLLED = "scan_unrolled"
    SCAN_OPAQUE = "scan_opaque"
    WHILE_OPAQUE = "while_opaque"
    STATE_NOT_IN_JAXPR = "state_not_in_jaxpr"
    STATE_NOT_IN_MODULE = "state_not_in_module"
    STATE_UNUSED = "state_unused"
    STATE_ONLY_WRITTEN = "state_only_written"
    STATE_PACKED = "state_packed"
    LARGE_TRACE = "large_trace"


class DiagnosticLevel(str, enum.Enum):
    """How much a record matters to the user."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class CompilationRecord:
    """One decision of the compiler.

    Attributes:
        kind: what was decided.
        level: how much it matters.
        message: one sentence for people.
        primitive: the JAX primitive it concerns, if one.
        weight_path: the parameter it concerns, if one.
        hidden_paths: the hidden states it concerns.
        context: more facts: `line` (source), `module` (name scope), and others by kind.
    """

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: str | None = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"[{self.level.value}] {self.kind.value}: {self.message}"


def show_path(path: Path) -> str:
    """Return a path as people write it: `gru.weight_ih_l0`."""
    return ".".join(str(key) for key in path)
