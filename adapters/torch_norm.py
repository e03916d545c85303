"""The adapter of batch and instance norm, whose running statistics are carried but not hidden
states.
"""

from __future__ import annotations

from torch import nn

from etrace_bridge.frontend.adapter import Adapter, register_adapter
from etrace_bridge.frontend.names import Path


class NormAdapter(Adapter):
    """`running_mean`, `running_var` and `num_batches_tracked` are statistics."""

    library = "torch"
    layers = (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
    )

    def is_hidden(self, module: nn.Module, path: Path) -> bool:
        """Return False: no gradient flows through statistics."""
        return False


register_adapter(NormAdapter())
