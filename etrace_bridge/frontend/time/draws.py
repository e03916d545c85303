"""Letting plain torch code draw the numbers that the bridge would draw, so that both can be
compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

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
        rule = registry.lookup(func)
        if rule is None or rule.rule.__module__ != random.__name__:
            return func(*args, **kwargs)
        result = to_torch(rule.rule(*map_tensors(to_jax, args), **map_tensors(to_jax, kwargs)))
        return args[0].copy_(result) if rule.writes_input(args, kwargs) else result


@contextlib.contextmanager
def same_draws(make_key: Callable[[], Any]) -> Iterator[None]:
    """Within this, plain torch code draws random numbers from the bridge's generator, with these
    keys.
    """
    with registry.key_source(make_key), _SameDraws():
        yield
