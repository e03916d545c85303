"""Every error a user can meet derives from `BridgeError`.

A message says what was given, why it cannot work, and what to do.
"""

from __future__ import annotations


class BridgeError(Exception):
    """Base of all errors raised on purpose by etrace_bridge."""


class NotSupportedError(BridgeError):
    """The model is valid, but this feature cannot handle it."""


class CompilationError(BridgeError):
    """The compiler cannot read the model into an `ETraceGraph`."""


class StateError(BridgeError):
    """A state is missing, not initialised, or of the wrong kind, shape or dtype."""


class InputError(BridgeError, ValueError):
    """An argument has the wrong type, shape, length or value."""


class CheckpointError(BridgeError):
    """A checkpoint cannot be written, or what is stored is damaged or incomplete."""


class UnsupportedOpError(BridgeError):
    """A torch operation has no JAX rule."""


class TracingError(BridgeError):
    """The torch module does something that cannot be traced into one fixed step."""


class NonFiniteError(BridgeError):
    """Training met NaN or infinity; the learner keeps its last finite state.

    Attributes:
        settled: The last finite state is already in place, with updates before the failure made;
            otherwise the call is undone.
    """

    settled: bool = False
