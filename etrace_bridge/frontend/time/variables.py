"""Which local variable holds which value while a model is traced: the names of states that live in
local variables.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from torch import nn

from etrace_bridge.frontend import locate
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.tensor import TracedTensor

SEPARATOR = "\n"
_CONTAINERS = (tuple, list, dict)
_MOST = 16  # a longer list is a history, not a state


@contextlib.contextmanager
def noted_variables(model: nn.Module) -> Iterator[None]:
    """Write the names of local variables into the trace, as `name` equations on the values that
    they hold.

    A name is the module's path and the variable's name, joined by `SEPARATOR`s. The module is the
    function's first argument, which is usually called `self`.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[tuple[int, str]] = set()
    kept: list[Any] = []  # values stay alive, so that their ids stay theirs

    def note(frame: FrameType) -> None:
        local, self_name = frame.f_locals, frame.f_code.co_varnames[0]
        path = paths.get(id(local.get(self_name)))
        if path is None:
            return
        for name, value in list(local.items()):
            if (
                name == self_name
                or not isinstance(value, (TracedTensor, *_CONTAINERS))
                and not hasattr(value, "__dataclass_fields__")
            ):
                continue
            if isinstance(value, _CONTAINERS) and len(value) > _MOST:
                continue
            for keys, tensor in flatten_state(value)[0]:
                if not isinstance(tensor, TracedTensor) or len(keys) > 2:
                    continue
                array = tensor.value
                full = SEPARATOR.join([*path.split("."), name, *keys] if path else [name, *keys])
                if (id(array), full) not in seen:
                    seen.add((id(array), full))
                    kept.append(array)
                    checkpoint_name(array, full)

    def local_trace(frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "return"):
            note(frame)
        return local_trace

    def global_trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        return local_trace if code.co_argcount and locate.is_user_file(code.co_filename) else None

    outer = sys.gettrace()
    sys.settrace(global_trace)
    try:
        yield
    finally:
        sys.settrace(outer)
