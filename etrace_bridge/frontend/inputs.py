"""The inputs of a model as one tree: the positional and keyword arguments of a call of `forward`.

The bridge works on a flat list of the tree's tensors, in the order of JAX's trees: positional
arguments first, then keyword arguments, the keys of a dict sorted. An `InputForm` puts them back
into a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from etrace_bridge._errors import InputError
from etrace_bridge.frontend.state_arguments import call_with_state

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class InputForm:
    """How a flat list of tensors fills a call of `forward`.

    Attributes:
        tree: The structure of `(args, kwargs)`; None if every tensor is an argument by position.
        names: Each tensor as code would write it: `x`, `batch['gate']`; empty without a tree.
    """

    tree: Any = None
    names: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputForm) or self.is_plain or other.is_plain:
            return isinstance(other, InputForm) and self.is_plain and other.is_plain
        return self.tree == other.tree  # which cannot be compared with None

    def __hash__(self) -> int:
        return hash(self.tree)

    @property
    def is_plain(self) -> bool:
        """Whether every tensor is a positional argument."""
        return self.tree is None

    def fill(self, tensors: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the positional and keyword arguments of a call."""
        return (tuple(tensors), {}) if self.tree is None else self.tree.unflatten(tensors)

    def call(
        self,
        model: nn.Module,
        tensors: Sequence[Any],
        names: Sequence[str] = (),
        states: Sequence[Any] = (),
    ) -> Any:
        """Call a model on an input's tensors, with values for its state arguments."""
        args, kwargs = self.fill(tensors)
        if not names:
            return model(*args, **kwargs)
        return call_with_state(model, names, args, kwargs, states, model.forward)

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Return whether this form takes as many tensors as there are."""
        return self.tree is None or self.tree.num_leaves == len(tensors)

    def __str__(self) -> str:
        return ", ".join(f"`{name}`" for name in self.names) or "tensors by position"


PLAIN = InputForm()


def read_call(forward: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, InputForm]:
    """Flatten the arguments of a call into tensors and their form.

    The first argument counts as positional, however it is passed.

    Args:
        forward: The function that is called.
        args: Arguments by position: tensors, arrays, or trees of them.
        kwargs: Arguments by keyword.
    """
    if not kwargs and all(map(_is_leaf, args)):
        return tuple(args), PLAIN
    kwargs, parameters = dict(kwargs), inspect.signature(forward).parameters
    first = next(iter(parameters), None)
    if not args and first in kwargs and parameters[first].kind in _BY_POSITION:
        args = (kwargs.pop(first),)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in kwargs:
            if name not in parameters or parameters[name].kind not in _NAMED:
                raise InputError(
                    f"`forward` has no argument `{name}` that can be given by keyword. It takes "
                    f"{', '.join(f'`{n}`' for n in parameters)}."
                )
    try:
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_leaf)
    except (TypeError, ValueError) as error:  # keys that cannot be sorted
        raise InputError(f"The keys of a dict among the inputs must be strings: {error}") from error
    positional = [n for n, p in parameters.items() if p.kind in _BY_POSITION]
    names = tuple(_name(path, positional) for path, _ in paths)
    for name, (_, leaf) in zip(names, paths, strict=True):
        if not _is_array(leaf) and not isinstance(leaf, (list, PackedSequence)):
            raise InputError(
                f"Input `{name}` is a `{type(leaf).__name__}`. Inputs are tensors or arrays, and "
                "dicts, tuples and lists of them. Leave it out, or make it a tensor `(batch, …)`."
            )
    leaves = tuple(leaf for _, leaf in paths)
    if not leaves:  # None, or nothing: reading the arrays refuses it
        return tuple(args), PLAIN
    is_plain = not kwargs and all(map(_is_leaf, args))
    return leaves, PLAIN if is_plain else InputForm(tree, names)


def read_input(forward: Callable, x: Any) -> tuple[tuple, InputForm]:
    """Flatten an input that is one value into tensors and their form.

    A tuple or list holds positional arguments. A dict whose keys are arguments of `forward` holds
    keyword arguments; any other dict is the only argument. Everything else is the only argument
    too.
    """
    if isinstance(x, dict):
        return read_call(forward, *(((), x) if _are_arguments(forward, x) else ((x,), {})))
    is_several = isinstance(x, (tuple, list)) and not _is_leaf(x)
    return read_call(forward, tuple(x) if is_several else (x,), {})


def map_input(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to every tensor of an input and keep its structure."""
    return jax.tree.map(function, x, is_leaf=_is_leaf)


def missing_keywords(forward: Callable, form: InputForm) -> list[str]:
    """Return the keyword-only arguments of `forward` that a call of this form lacks."""
    given = {} if form.tree is None else form.fill(range(form.tree.num_leaves))[1]
    return [
        name
        for name, p in inspect.signature(forward).parameters.items()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and name not in given
    ]


def _is_leaf(x: Any) -> bool:
    """Return whether something is one array rather than a tree of arrays; lists of numbers are
    arrays.
    """
    if isinstance(x, list):
        return not any(_is_array(item) or isinstance(item, (dict, tuple)) for item in x)
    return x is not None and (not isinstance(x, (dict, tuple)) or isinstance(x, PackedSequence))


def _is_array(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or hasattr(x, "shape")  # a nested tensor has no shape


def _are_arguments(forward: Callable, x: dict) -> bool:
    """Return whether the keys of a dict are arguments of a function, the first one among them."""
    parameters = inspect.signature(forward).parameters
    first = next(iter(parameters.values()), None)
    if first is None or not all(isinstance(key, str) for key in x):
        return False
    if first.kind is first.VAR_KEYWORD:
        return True
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return first.name in x and (takes_any or all(key in parameters for key in x))


def _name(path: Sequence[Any], positional: Sequence[str]) -> str:
    """Return a tensor's position in a call as code would write it."""
    which, first, *rest = path
    if which.idx == 0:
        known = first.idx < len(positional)
        name = str(positional[first.idx]) if known else f"argument {first.idx}"
    else:
        name = str(first.key)
    return name + jax.tree_util.keystr(tuple(rest))
