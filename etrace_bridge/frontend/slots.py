"""Where the state of one step is put in and taken out: in arguments and attributes of modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge.frontend.adapter import Adapter
from etrace_bridge.frontend.names import Path
from etrace_bridge.frontend.state_values import count_tensors, flatten_state, unflatten_state


@dataclass
class StateLeaf:
    """One state tensor.

    Attributes:
        path: Its path in the bridged module: the torch module's path, then the state's own name.
        initial: Its value before the first step.
        hidden: It is recurrent (a `HiddenState`); otherwise it is carried only.
    """

    path: Path
    initial: torch.Tensor
    hidden: bool = True


@dataclass
class ArgumentSlot:
    """State that enters and leaves one call of a module by its arguments.

    Attributes:
        module: The torch module.
        call: Which call of the module in a step, from 0.
        adapter: Its adapter.
        skeletons: One per argument: the argument's value with holes for the tensors.
        leaves: The tensors of all arguments, in order.
        later: The skeletons in later steps, if Python values in them change.
    """

    module: nn.Module
    call: int
    adapter: Adapter
    skeletons: tuple[Any, ...]
    leaves: list[StateLeaf]
    later: tuple[tuple[Any, ...], ...] = ()

    def states(self, tensors: Sequence[Any], which: int = 0) -> tuple:
        """Put tensors into the structure of the arguments, the first one or one of the later ones."""
        states, position = [], 0
        for skeleton in _at(which, self.skeletons, *self.later):
            states.append(unflatten_state(skeleton, tensors[position:]))
            position += count_tensors(skeleton)
        return tuple(states)


@dataclass
class AttributeSlot:
    """State that a module keeps in an attribute or buffer.

    Attributes:
        module: The torch module.
        name: The attribute.
        path: The module's path.
        skeleton: The attribute's value after one step, with holes for the tensors.
        leaves: Its tensors.
        later: The skeletons of `PythonAttribute.values` but the first, if Python values in it change.
    """

    module: nn.Module
    name: str
    path: str
    skeleton: Any
    leaves: list[StateLeaf]
    later: tuple[Any, ...] = ()

    def put(self, tensors: Sequence[torch.Tensor], which: int = 0) -> None:
        """Set the attribute, without the checks of `nn.Module.__setattr__`; `which` as for
        `PythonAttribute.put`.
        """
        holder = self.module._buffers if self.name in self.module._buffers else self.module.__dict__
        holder[self.name] = unflatten_state(_at(which, self.skeleton, *self.later), tensors)

    def get(self) -> list[torch.Tensor]:
        """Read the attribute's tensors."""
        holder = self.module._buffers if self.name in self.module._buffers else self.module.__dict__
        return [tensor for _, tensor in flatten_state(holder[self.name])[0]]


@dataclass
class PythonAttribute:
    """A Python value that a module changes from step to step, such as a counter.

    Attributes:
        module: The torch module.
        name: The attribute.
        path: The module's path.
        values: What it is after one, after two and after very many steps, and before a late step
            that seems to be unlike the others, if there is one; with holes for tensors. A step
            must be the same for all of them.
        tensors: What fills the holes: parameters, constants.
        where: Paths inside the attribute of what changes; `()` is the attribute itself.
        whole: No slot sets this attribute.
    """

    module: nn.Module
    name: str
    path: str
    values: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...] = ()
    where: tuple[Path, ...] = ((),)
    whole: bool = True

    @property
    def label(self) -> str:
        """The full name of what changes."""
        full = f"{self.path}.{self.name}" if self.path else self.name
        return full + "".join(
            f"[{key}]" if key.isdigit() else f"[{key!r}]"
            for key in (self.where[0] if self.where else ())
        )

    @property
    def goes_on(self) -> bool:
        """Whether the second step changes it too, as a counter; a flag that the first step sets
        does not.
        """
        return repr(self.values[0]) != repr(self.values[1])

    def put(self, which: int) -> None:
        """Set the attribute to one of its `values`."""
        if self.whole:  # a fresh container each time: the step may change it in place
            self.module.__dict__[self.name] = unflatten_state(
                _at(which, *self.values), self.tensors
            )


def _at(which: int, *values: Any) -> Any:
    """Return one of some values, the last one if there are not so many."""
    return values[min(which, len(values) - 1)]
