"""The program of a whole sequence as a graph of single-step values, shared between traces of
different lengths.

A `Node` is one array. Its *level* is the latest input step that it depends on, 0 if it depends on
none. Equal computations are one node, so the first steps of a long and of a short sequence are the
same nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, keep_source

_SMALL = 4096  # the bytes of constants up to this size are kept, of larger ones a digest


@dataclass(eq=False)
class Node:
    """One array of the program.

    Attributes:
        kind: `"input"`, `"tensor"`, `"key"`, `"constant"` or the name of a primitive.
        operands: What it is computed from.
        shape: Its shape.
        dtype: Its dtype.
        level: The latest input step that it depends on; 0 if none.
        eqn: The equation it stands for, for source line and module.
        params: The equation's parameters, fitted to the node's shape.
        key: What makes it the same as another node, besides its operands.
        output: Which output of the equation it is.
        value: The value of a constant; the number of an input or tensor.
        trained: It depends on a trained parameter.
    """

    kind: str
    operands: tuple[Node, ...]
    shape: tuple[int, ...]
    dtype: Any
    level: int
    eqn: JaxprEqn | None = None
    params: dict[str, Any] = field(default_factory=dict)
    key: Any = None
    output: int = 0
    value: Any = None
    trained: bool = False
    number: int = 0
    group: Any = None  # the outputs of one equation share it

    @property
    def equation(self) -> JaxprEqn:
        """The equation that computes it; an input or a constant has none."""
        if self.eqn is None:
            raise KeyError(f"no equation computes an {self.kind}")
        return self.eqn

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def like(self, other: Node) -> bool:
        """Return whether both do the same to their operands."""
        return (self.kind, self.key, self.output, self.shape, self.dtype) == (
            other.kind, other.key, other.output, other.shape, other.dtype
        ) and len(self.operands) == len(other.operands)  # fmt: skip


class Graph:
    """Makes nodes, each only once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._constants: dict[int, tuple[Node, Any]] = {}  # by the value's id
        self._keys: dict[int, tuple[Any, Any]] = {}
        self._count = 0

    def _node(self, *args: Any, **kwargs: Any) -> Node:
        self._count += 1
        return Node(*args, **kwargs, number=self._count)

    def input(self, index: int, step: int, shape: Sequence[int], dtype: Any) -> Node:
        """Return one time step of an input."""
        key = ("input", index, step, tuple(shape))
        if key not in self._known:
            self._known[key] = self._node(
                "input", (), tuple(shape), dtype, step, value=(index, step)
            )
        return self._known[key]

    def tensor(self, index: int, shape: Sequence[int], dtype: Any, trained: bool) -> Node:
        """Return a parameter or buffer."""
        key = ("tensor", index)
        if key not in self._known:
            self._known[key] = self._node(
                "tensor", (), tuple(shape), dtype, 0, value=index, trained=trained
            )
        return self._known[key]

    def random_key(self, label: Any) -> Node:
        """Return a fresh random key."""
        known = ("key", label)
        if known not in self._known:
            self._known[known] = self._node("key", (), (2,), np.dtype(np.uint32), 0)
        return self._known[known]

    def constant(self, value: Any) -> Node:
        """Return a constant; equal ones are one node."""
        if (seen := self._constants.get(id(value))) is not None:
            return seen[0]
        array = np.asarray(value)
        content = array.tobytes()
        if array.size > _SMALL:
            content = hashlib.blake2b(content).digest()
        key = ("constant", array.shape, str(array.dtype), content)
        if key not in self._known:
            self._known[key] = self._node("constant", (), array.shape, array.dtype, 0, value=array)
        self._constants[id(value)] = self._known[key], value  # alive, so that its id stays its own
        return self._known[key]

    def apply(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Node],
        shapes: Sequence[tuple] | None = None,
        params: dict | None = None,
    ) -> list[Node]:
        """Return the outputs of an equation on other operands, with other output shapes and
        parameters where they differ.
        """
        own = eqn.params if params is None else params
        key = (eqn.primitive.name, self._key(eqn, params), tuple(id(o) for o in operands))
        shapes = [v.aval.shape for v in eqn.outvars] if shapes is None else shapes
        key = (*key, tuple(shapes))
        if key not in self._known:
            level = max((o.level for o in operands), default=0)
            trained = any(o.trained for o in operands)
            group = object()
            self._known[key] = [
                self._node(
                    eqn.primitive.name, tuple(operands), tuple(shape), v.aval.dtype, level, eqn, own, key[1], i, trained=trained, group=group
                )
                for i, (shape, v) in enumerate(zip(shapes, eqn.outvars, strict=True))
            ]  # fmt: skip
        return self._known[key]

    def reapply(self, node: Node, operands: Sequence[Node]) -> Node:
        """Return what a node computes from other operands of the same shapes."""
        eqn = node.eqn
        if eqn is None or all(a is b for a, b in zip(node.operands, operands, strict=True)):
            return node
        if len(eqn.outvars) > 1:
            return self.apply(eqn, operands)[node.output]
        params = None if node.params is eqn.params else node.params
        return self.apply(eqn, operands, [node.shape], params)[0]

    def make(self, function: Callable, *operands: Node, source: JaxprEqn | None = None) -> Node:
        """Return what a JAX function computes, if all its equations have one result."""
        closed = jax.make_jaxpr(function)(
            *[jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]
        )
        known = dict(zip(closed.jaxpr.invars, operands, strict=True))
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            known[variable] = self.constant(value)
        result = operands[0]
        for eqn in closed.jaxpr.eqns:
            if source is not None:
                eqn = eqn.replace(source_info=source.source_info)
            values = [
                known[v] if not hasattr(v, "val") else self.constant(v.val) for v in eqn.invars
            ]
            (result,) = self.apply(eqn, values)
            known[eqn.outvars[0]] = result
        return result

    def text_of(self, eqn: JaxprEqn) -> str:
        """Return a text that is the same for equations that compute the same, with the same
        derivative.
        """
        return repr((eqn.primitive.name, self._key(eqn, None)))

    def _key(self, eqn: JaxprEqn, params: dict | None) -> Any:
        """What identifies an equation's parameters; functions are compared by the programs beside
        them.
        """
        if params is not None:
            return _params_key(params)
        known = self._keys.get(id(eqn))
        if known is None:
            key = (_params_key(eqn.params), _derivative_key(eqn))
            known = self._keys[id(eqn)] = (eqn, key)
        return known[1]


def _params_key(params: dict) -> tuple:
    return tuple((name, _param_key(value)) for name, value in sorted(params.items()))


def _derivative_key(eqn: JaxprEqn) -> Any:
    """What identifies the derivative of a call that declares its own: two surrogates have the same
    values and other gradients.
    """
    if not eqn.primitive.name.startswith("custom_"):
        return None
    inexact = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    some = [i for i, v in enumerate(eqn.invars) if inexact(v)]
    outputs = [v for v in eqn.outvars if inexact(v)]

    def backward(operands: list, cotangents: list) -> Any:
        def call(*chosen: Any) -> list:
            full = list(operands)
            for i, value in zip(some, chosen, strict=True):
                full[i] = value
            results = _bind(eqn, eqn.params, full)
            return [y for y, v in zip(results, eqn.outvars, strict=True) if inexact(v)]

        return jax.vjp(call, *[operands[i] for i in some])[1](cotangents)

    shapes = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        for variables in (eqn.invars, outputs)
    ]
    return _param_key(jax.make_jaxpr(backward)(*shapes))


def _param_key(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return str(value.jaxpr), tuple(_param_key(np.asarray(c)) for c in value.consts)
    if isinstance(value, Jaxpr):
        return str(value)
    if isinstance(value, np.ndarray):  # its text is rounded and shortened
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, (int, float, bool, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(v) for v in value)
    if isinstance(value, np.dtype) or not callable(value):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def keys_of(nodes: Sequence[Node]) -> list[Node]:
    """Return the random keys that nodes depend on, each once."""
    found: dict[int, Node] = {}
    seen: set[int] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind == "key":
            found[id(node)] = node
        stack.extend(node.operands)
    return sorted(found.values(), key=lambda node: node.number)


def evaluate(nodes: Sequence[Node], known: dict[int, Any]) -> list[Any]:
    """Compute nodes, given the values of some by `id`; inside a JAX trace this writes their
    equations.
    """
    values: dict[Any, Any] = dict(known)
    stack = list(reversed(nodes))
    while stack:
        node = stack[-1]
        if id(node) in values:
            stack.pop()
            continue
        waiting = [o for o in node.operands if id(o) not in values]
        if waiting:
            stack.extend(reversed(waiting))
            continue
        stack.pop()
        if node.kind == "constant":
            values[id(node)] = node.value if node.value.ndim else node.value[()]
            continue
        shared = ("outputs", id(node.group))
        if shared not in values:
            values[shared] = _bind(
                node.equation, node.params, [values[id(o)] for o in node.operands]
            )
        values[id(node)] = values[shared][node.output]
    return [values[id(node)] for node in nodes]


def _bind(eqn: JaxprEqn, params: dict, operands: Sequence[Any]) -> list[Any]:
    bound = eqn.primitive.get_bind_params(params)
    with keep_source(eqn), eqn.ctx.manager:
        result = eqn.primitive.bind(*operands, **bound)
    return list(result) if eqn.primitive.multiple_results else [result]
