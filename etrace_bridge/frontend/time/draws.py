"""Random numbers of plain torch code: letting it draw those that the bridge would draw, so that
both can be compared; and seeing what it draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from etrace_bridge.frontend.borders import to_jax, to_torch
from etrace_bridge.frontend.ops import random, registry
from etrace_bridge.frontend.tracer import map_tensors


class _SameDraws(TorchFunctionMode):
    """Runs torch's random functions by the bridge's own rules."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _random_rule(func)
        if rule is None:
            return func(*args, **kwargs)
        result = to_torch(rule.rule(*map_tensors(to_jax, args), **map_tensors(to_jax, kwargs)))
        return args[0].copy_(result) if rule.writes_input(args, kwargs) else result


class SeenDraws(TorchFunctionMode):
    """Notes the shape of everything that torch's random functions draw.

    Attributes:
        shapes: One for each call that drew numbers, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run a torch function."""
        if _random_rule(func) is None:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            self.shapes.append(tuple(result.shape))
        return result


def _random_rule(func: Callable) -> Any:
    rule = registry.lookup(func)
    return rule if rule is not None and rule.rule.__module__ == random.__name__ else None


@contextlib.contextmanager
def same_draws(make_key: Callable[[], Any]) -> Iterator[None]:
    """Within this, plain torch code draws random numbers from the bridge's generator, with these
    keys.
    """
    with registry.key_source(make_key), _SameDraws():
        yield
