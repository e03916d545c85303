"""Where a torch module keeps its recurrent state: the adapters, and state values as flat, named
tensors.

A recurrent tensor lives in one of three places:

* in an **argument** that the module returns again (`h = cell(x, h)`, `z, s = lif(x, s)`): an
  `Adapter` names the arguments;
* in an **attribute** or buffer that `forward` reads and rebinds or writes in place: found by
  running one step and comparing, an `Adapter` is needed only to give nicer names;
* inside a **fused kernel** (`nn.GRU` on a sequence): an `Adapter` with its own `forward` gives the
  one-step form.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import InputError

ENTRY_POINT_GROUP = "etrace_bridge.adapters"
Path = tuple[str, ...]


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


# ---- the registry of adapters

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


# ---- state values: any nesting of tuple, list, dict, NamedTuple and dataclass over tensors


def flatten_state(value: Any) -> tuple[list[tuple[Path, torch.Tensor]], Any]:
    """Flatten a state value into its tensors with their paths, and a skeleton for
    `unflatten_state`.

    A path is made of field names, dict keys and positions; a bare tensor has the path `()`.
    Everything that is not a tensor (None, numbers, strings) stays in the skeleton.
    """
    leaves: list[tuple[Path, torch.Tensor]] = []

    def visit(node: Any, path: Path) -> Any:
        if isinstance(node, torch.Tensor):
            leaves.append((path, node))
            return _Hole(len(leaves) - 1)
        items = children(node)
        if items is None:
            return node
        return rebuild(node, [visit(child, (*path, key)) for key, child in items])

    skeleton = visit(value, ())
    return leaves, skeleton


def unflatten_state(skeleton: Any, tensors: Sequence[Any]) -> Any:
    """Fill the skeleton of `flatten_state` with tensors or other values."""
    if isinstance(skeleton, _Hole):
        return tensors[skeleton.index]
    items = children(skeleton)
    if items is None:
        return skeleton
    return rebuild(skeleton, [unflatten_state(child, tensors) for _, child in items])


def count_tensors(skeleton: Any) -> int:
    """Count the holes of a skeleton."""
    if isinstance(skeleton, _Hole):
        return 1
    return sum(count_tensors(child) for _, child in children(skeleton) or ())


@dataclasses.dataclass(frozen=True)
class _Hole:
    index: int


def is_hole(node: Any) -> bool:
    """Return whether a node of a skeleton stands for a tensor."""
    return isinstance(node, _Hole)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """List the named children of a container, or None for anything else."""
    if isinstance(node, _Hole):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (tuple, list)):
        return [(str(i), child) for i, child in enumerate(node)]
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    return None


def rebuild(node: Any, values: list[Any]) -> Any:
    """Make a container like `node` with other children, in the order of `children(node)`."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)._make(values)  # not the constructor, which may check its arguments
    if isinstance(node, (tuple, list)):
        return type(node)(values)
    if isinstance(node, dict):
        try:
            return type(node)(zip(node, values, strict=True))
        except TypeError:  # a dict subclass with its own constructor, such as defaultdict
            return dict(zip(node, values, strict=True))
    # a dataclass may compute or check in __init__: copy the fields as they are
    fresh = object.__new__(type(node))
    fresh.__dict__.update(getattr(node, "__dict__", {}))
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(fresh, field.name, value)
    return fresh


def state_names(argument: str, paths: Sequence[Path]) -> list[Path]:
    """Name the tensors of one state argument: by field or key where there are any, else by argument
    and position.
    """
    if list(paths) == [()]:
        return [(argument,)]
    positions_only = all(key.isdigit() for path in paths for key in path)
    return [(argument, *path) if positions_only else path for path in paths]


# ---- calling forward


def bind_state_arguments(
    forward: Callable, names: Sequence[str], args: tuple, kwargs: dict
) -> tuple[tuple, dict, tuple[Any, ...]]:
    """Separate the state arguments of a call from the rest: other positional, other keyword, state
    values (None: not given).
    """
    parameters = list(_parameters(forward))
    rest, kept, states = [], dict(kwargs), dict.fromkeys(names)
    for position, value in enumerate(args):
        name = parameters[position] if position < len(parameters) else None
        if name in states:
            states[name] = value
        else:
            rest.append(value)
    for name in names:
        if name in kept:
            states[name] = kept.pop(name)
    return tuple(rest), kept, tuple(states[name] for name in names)


def call_with_state(
    function: Callable,
    names: Sequence[str],
    rest: tuple,
    kept: dict,
    states: Sequence[Any],
    signature: Callable | None = None,
) -> Any:
    """Call a function with state arguments where its signature has them, among other positional
    arguments.
    """
    given = dict(zip(names, states, strict=True))
    waiting = iter(rest)
    args = []
    for name in _parameters(signature or function):
        if name in given:
            args.append(given.pop(name))
            continue
        value = next(waiting, _MISSING)
        if value is _MISSING:
            break
        args.append(value)
    return function(*args, *waiting, **kept, **given)


def missing_arguments(forward: Callable, args: tuple, kwargs: dict) -> list[str]:
    """Name the required arguments that some arguments by position and by keyword leave out."""
    required = [
        name
        for name, p in inspect.signature(forward).parameters.items()
        if p.default is p.empty and p.kind in _POSITIONAL
    ]
    return [name for name in required[len(args) :] if name not in kwargs]


def fill_missing(
    forward: Callable, args: tuple, kwargs: dict, start: Any = None
) -> tuple[tuple, dict]:
    """Give a start for the required arguments beyond those given, or None: a model's code often
    takes None for "no state yet".
    """
    missing = missing_arguments(forward, args, kwargs)
    values: tuple = (None,) * len(missing)
    if start is not None and len(missing) == 1:
        values = (start,)
    elif isinstance(start, (tuple, list)) and len(start) == len(missing):
        values = tuple(start)
    if kwargs:
        return args, {**kwargs, **dict(zip(missing, values, strict=True))}
    return (*args, *values), kwargs


_MISSING = object()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(forward: Callable) -> Iterator[str]:
    return (
        name for name, p in inspect.signature(forward).parameters.items() if p.kind in _POSITIONAL
    )
