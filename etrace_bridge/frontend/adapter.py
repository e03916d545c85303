"""Adapters: where a torch module keeps its recurrent state.

A recurrent tensor lives in one of three places:

* in an **argument** that the module returns again (`h = cell(x, h)`, `z, s = lif(x, s)`): an
  `Adapter` names the arguments;
* in an **attribute** or buffer that `forward` reads and rebinds or writes in place: found by
  running one step and comparing, an `Adapter` is needed only to give nicer names;
* inside a **fused kernel** (`nn.GRU` on a sequence): an `Adapter` with its own `forward` gives the
  one-step form.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.frontend.names import Path

ENTRY_POINT_GROUP = "etrace_bridge.adapters"


class Adapter:
    """How one or more torch classes keep their recurrent state; subclass it and override what
    differs.

    Most recurrent modules need one or two of these. A spiking layer `spk, mem = Leaky(...)(x,
    mem)`, for example::

        class LeakyAdapter(eb.Adapter):
            library, layers = "snntorch", (snntorch.Leaky,)

            def arguments(self, module):
                return () if module.init_hidden else ("mem",)

        eb.register_adapter(LeakyAdapter())

    The module's own `forward` runs either way: an adapter only says where the state is. All tensors
    an adapter sees are torch tensors (traced ones while the model is traced).

    Attributes:
        library: Name of the library, for `supported_layers()`.
        layers: The torch classes this adapter is for; subclasses follow unless they have their own
            adapter.
        refused: Why no module of these classes can run online; empty if they can.
        limit: Which modules of these classes cannot run online, in a few words; empty if all can.
        forward: None, or a method `forward(module, inputs, states) -> (return value, new states)`
            that replaces the module's `forward` while tracing. Only for fused kernels, whose code
            cannot be traced. `inputs` are the call's other positional arguments, `states` and `new
            states` are tuples in the order of `arguments(module)`.
    """

    library: str = "user"
    layers: tuple[type[nn.Module], ...] = ()
    refused: str = ""
    limit: str = ""
    forward: Callable[[nn.Module, tuple, tuple], tuple[Any, tuple]] | None = None

    def check(self, module: nn.Module, path: str) -> None:
        """Raise `NotSupportedError` if this module can never run one step at a time (a
        bidirectional RNN).
        """

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        """Return the parameters of `module.forward` that are states; none if the state is in
        attributes.
        """
        return ()

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        """Split `forward`'s return value into the output and the new values of `arguments(module)`,
        in that order.

        The default reads `(output, *states)`.
        """
        return returned[0], tuple(returned[1:])

    def initial(self, module: nn.Module, inputs: tuple) -> tuple | None:
        """Make the state before the first step, one value per argument, in torch tensors or
        containers of them.

        `inputs` are the other positional arguments of a call, with a real batch size and shape.
        Return None (the default) if the module accepts `None` for its state: the bridge then finds
        the structure by a call, and tries zeros.
        """
        return None

    def adopt(self, module: nn.Module, given: tuple) -> tuple:
        """Convert state values that a model passes itself to the form of `initial`.

        Only adapters with `forward` override it.
        """
        return given

    def pack(self, module: nn.Module, states: tuple) -> tuple:
        """Convert states in the form of `initial` to what the module's own `forward` takes; the
        inverse of `adopt`.
        """
        return states

    def reset(self, module: nn.Module) -> None:
        """Reset state that an earlier run left in the module's attributes to the library's initial
        state.
        """

    def constants(self, module: nn.Module) -> tuple[torch.Tensor, ...]:
        """Name tensors that are constants although they require grad; any other such tensor is
        refused.
        """
        return ()

    def sequence(self, module: nn.Module) -> str | None:
        """Return what `forward` consumes: None for one time step, `"time_major"` for `(T, B, ...)`,
        `"batch_first"`.
        """
        return None

    def state_path(self, module: nn.Module, path: Path) -> Path:
        """Rename a state: `path` starts at the attribute or argument, e.g. `("_memories", "v")`,
        and may become `("v",)`.
        """
        return path

    def is_hidden(self, module: nn.Module, path: Path) -> bool:
        """Return whether a (renamed) state is recurrent; False for statistics that are carried and
        not trained through.
        """
        return True


_ADAPTERS: dict[type, Adapter] = {}


_loaded = False


_BUILT_IN = ("torch_cells", "torch_rnn", "torch_norm", "snntorch", "norse", "spikingjelly", "ncps")


def register_adapter(adapter: Adapter) -> Adapter:
    """Teach the bridge where modules of some classes keep their state.

    A package can do this without being imported by the user: it declares an entry point in the
    group ``etrace_bridge.adapters`` that points to a module (registered on import) or to a function
    without arguments.

    Args:
        adapter: An instance of a subclass of `Adapter` with `layers` set. A later registration
            replaces an earlier one.

    Returns:
        The adapter.
    """
    if not isinstance(adapter, Adapter):
        raise InputError(
            f"`register_adapter` got {adapter!r}. It takes an instance of a subclass of "
            "`eb.Adapter`."
        )
    if not adapter.layers:
        raise InputError(
            f"`{type(adapter).__name__}.layers` is empty. Name the torch classes that the adapter "
            "is for."
        )
    for layer in adapter.layers:
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise InputError(
                f"`{type(adapter).__name__}.layers` holds {layer!r}, which is not a subclass of "
                "`torch.nn.Module`."
            )
        _ADAPTERS[layer] = adapter
    return adapter


def find_adapter(module: nn.Module) -> Adapter | None:
    """Return the adapter of a module's class or of its nearest base class that has one."""
    load_adapters()
    return next((_ADAPTERS[cls] for cls in type(module).__mro__ if cls in _ADAPTERS), None)


def supported_layers(limits: bool = False) -> dict[str, tuple[str, ...]]:
    """List the layers that adapters know, by library.

    Every other module is traced as well; an adapter is needed only where state lives in a place
    that cannot be found by running the module, or in a fused kernel. A layer that can never run one
    step at a time is listed with the reason: `"StateLeaky (refused: computes a whole sequence at
    once)"`.

    Args:
        limits: Also say which forms of a layer are refused: `"GRU (not bidirectional)"`.
    """
    load_adapters()
    found: dict[str, set[str]] = {}
    for layer, adapter in _ADAPTERS.items():
        note = f"refused: {adapter.refused}" if adapter.refused else adapter.limit if limits else ""
        found.setdefault(adapter.library, set()).add(
            f"{layer.__name__} ({note})" if note else layer.__name__
        )
    return {library: tuple(sorted(found[library])) for library in sorted(found)}


def load_adapters() -> None:
    """Import the built-in adapters whose library is installed, then those of the entry-point group;
    once.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True
    for name in _BUILT_IN:
        full_name = f"etrace_bridge.adapters.{name}"
        try:
            importlib.import_module(full_name)
        except ModuleNotFoundError as error:
            if (
                error.name is None
                or error.name.split(".")[0] == "etrace_bridge"
                and error.name != full_name
            ):
                raise
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        found = entry.load()
        if callable(found):
            found()
