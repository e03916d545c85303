"""Torch names and brainstate paths: `gru.weight_ih_l0` is `('gru', 'weight_ih_l0')`, tied tensors
have one path and many names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend.ops.dtypes import to_jax_dtype

Path = tuple[str, ...]


def to_path(name: str) -> Path:
    """Split a torch name at its dots."""
    return tuple(name.split("."))


def to_name(path: Path) -> str:
    """Join a path with dots."""
    return ".".join(path)


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of a model with all its names.

    Attributes:
        tensor: The torch tensor.
        names: Its names, the first one in `named_parameters()` order is its own.
        trained: It is a parameter that requires grad.
        parameter: It is a parameter.
        persistent: It appears in `state_dict()`.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    trained: bool
    parameter: bool
    persistent: bool = True

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


def versions_of(tensors: Iterable[NamedTensor]) -> dict[str, int]:
    """Return torch's count of writes into each tensor; those made in inference mode have none."""
    return {n.name: n.tensor._version for n in tensors if not n.tensor.is_inference()}


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """List a model's parameters, then its buffers, each once with all its names."""
    in_state_dict = set(model.state_dict(keep_vars=True))
    found: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, [], True))[1].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found.setdefault(id(buffer), (buffer, [], False))[1].append(name)
    return [
        NamedTensor(
            tensor,
            tuple(names),
            is_parameter and tensor.requires_grad,
            is_parameter,
            any(n in in_state_dict for n in names),
        )
        for tensor, names, is_parameter in found.values()
    ]


def step_tensors(model: nn.Module) -> list[NamedTensor]:
    """List the parameters and buffers that are inputs of a step; integer buffers are constants of
    its program.
    """
    return [
        n
        for n in named_tensors(model)
        if n.trained or n.tensor.is_floating_point() or n.tensor.is_complex()
    ]


def check_dtypes(model: nn.Module) -> None:
    """Raise if a parameter or buffer has no values yet, or a dtype that JAX would not preserve."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise NotSupportedError(
                f"`{name}` has no shape yet: a lazy layer takes its sizes from its first input. "
                "Run the model once (`model(x)`, with an input as `forward` takes it) before it "
                "is wrapped."
            )
        try:
            to_jax_dtype(tensor.dtype)
        except NotSupportedError as error:
            raise NotSupportedError(f"`{name}` is `{tensor.dtype}`. {error}") from None
