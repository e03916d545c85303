"""Where ncps stores the state of its liquid networks: in the argument `hx`, returned as the second
result.
"""

from __future__ import annotations

from typing import Any

import ncps.torch as ncps
import torch
from torch import nn

from etrace_bridge.frontend.adapter import Adapter, register_adapter
from etrace_bridge.frontend.names import Path

# The states under the names that torch's RNNs use.
_STATE_NAMES: dict[Path, Path] = {
    ("hx",): ("h",),
    ("states",): ("h",),
    ("hx", "0"): ("h",),
    ("hx", "1"): ("c",),
}


class NetworkAdapter(Adapter):
    """`CfC` and `LTC`, which take sequences; with `mixed_memory` the state is a pair `(h, c)`."""

    library = "ncps"
    layers = (ncps.CfC, ncps.LTC)

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("hx",)

    def sequence(self, module: nn.Module) -> str | None:
        return "batch_first" if module.batch_first else "time_major"

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        x = inputs[0]
        h = torch.zeros(x.shape[0 if module.batch_first else 1], module.state_size, dtype=x.dtype)
        return ((h, torch.zeros_like(h)),) if module.use_mixed else (h,)

    def state_path(self, module: nn.Module, path: Path) -> Path:
        return _STATE_NAMES.get(path, path)


class CellAdapter(Adapter):
    """The cells, which take one step `(x, h, elapsed time)`."""

    library = "ncps"
    layers = (ncps.CfCCell, ncps.WiredCfCCell, ncps.LTCCell)

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("states",) if isinstance(module, ncps.LTCCell) else ("hx",)

    def initial(self, module: Any, inputs: tuple) -> tuple | None:
        x = inputs[0]
        size = module.hidden_size if isinstance(module, ncps.CfCCell) else module.state_size
        return (torch.zeros(x.shape[0], size, dtype=x.dtype),)

    def state_path(self, module: nn.Module, path: Path) -> Path:
        return _STATE_NAMES.get(path, path)


register_adapter(NetworkAdapter())
register_adapter(CellAdapter())
