"""The source location of an equation, in the user's code."""

from __future__ import annotations

from etrace_bridge._jax_compat import JaxprEqn, module_scope, user_line


def source_line(eqn: JaxprEqn) -> str:
    """Return the user's line that an equation comes from, without frames of frameworks."""
    return user_line(
        eqn,
        skip=(
            "/brainevent/",
            "/brainstate/",
            "/braintrace/",
            "/saiunit/",
            "/torch/",
            "/torch2jax/",
            "/etrace_bridge/",
            "/adapters/",
            "/jax/",
        ),
    )


def source_location(eqn: JaxprEqn) -> str:
    """Return the user's line, or else the module, that an equation comes from."""
    return source_line(eqn) or module_scope(eqn) or "source line unknown"
