"""The loss as a JAX function, whether it was written for torch or for JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import BridgeError, InputError, StateError
from etrace_bridge._jax_compat import ClosedJaxpr, outputs_of
from etrace_bridge.frontend import (
    InputRange,
    to_host,
    to_torch,
    trace_function,
    trace_with_ranges,
)
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.element_loss import (
    ElementLoss,
    class_weights,
    ignored_value,
    without_empty_steps,
)
from etrace_bridge.learning.inputs import is_array
from etrace_bridge.learning.loss_settings import LossSettings
from etrace_bridge.learning.processes import own_part
from etrace_bridge.lowering import announcing


@dataclass(frozen=True, eq=False)
class JaxLoss:
    """A loss `(output, target) -> scalar` on JAX arrays, for outputs and targets of one shape.

    Attributes:
        function: the loss.
        ranges: what it demands of the target's arrays that are indices.
        shapes: output and target of one step, as shapes.
        given: the loss as the user gave it.
        traced: the program of its derivative, constants and all.
        reads: positions of the outputs by which it has a derivative; of all, for rules that do not
            use derivatives.
    """

    function: Callable[[Any, Any], Any]
    ranges: list[InputRange]
    shapes: tuple[Any, Any]
    given: Callable
    traced: ClosedJaxpr
    reads: frozenset[int]

    @property
    def by_element(self) -> ElementLoss:
        """The loss of single batch elements; raises if the batch's loss is not their mean or sum."""
        if isinstance(self._by_element, str):
            raise InputError(self._by_element)
        return self._by_element

    @cached_property
    def _by_element(self) -> ElementLoss | str:
        """The loss of single batch elements, or the error that explains why there is none.

        Cached, because finding it takes time and `fit` needs it for every batch.
        """
        name, weights = _name(self.given), class_weights(self.given)
        try:
            return ElementLoss(self.function, *self.shapes, self.ranges, weights, name, self.reads)
        except InputError as error:
            return str(error)

    def ignores(self, targets: Any) -> bool:
        """Return whether some labels of a sequence are ignored, so that `by_element` must weigh the
        others.
        """
        ignored = ignored_value(self.ranges)
        if ignored is None:
            return False
        labels = own_part(jax.tree.leaves(targets)[ignored[0]])
        return bool(np.any(np.asarray(labels) == ignored[1]))

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of one step."""
        return self.function(output, target)


class LossTable:
    """A learner's losses, one for each kind of output and target so far.

    Args:
        loss: what the user gave; None if there is none.
        prefer_torch: as for `as_jax_loss`.
        needs_slope: as for `as_jax_loss`.
    """

    def __init__(self, loss: Any, prefer_torch: bool, needs_slope: bool = True) -> None:
        self.loss, self._prefer_torch, self._needs_slope = loss, prefer_torch, needs_slope
        self._losses: dict[Any, JaxLoss] = {}
        self._tried: set[Any] = set()
        self._settings = LossSettings(loss)

    @property
    def settings_hold(self) -> bool:
        """Return whether everything else that the loss reads is as it was when the loss was traced."""
        return self._settings.hold()

    @property
    def ignored(self) -> tuple[int, int] | None:
        """Return which target has labels that the losses so far ignore, and the label."""
        found = (ignored_value(loss.ranges) for loss in self._losses.values())
        return next((pair for pair in found if pair is not None), None)

    def find(
        self,
        compiled: CompiledStep,
        target: Any,
        length: int | None = None,
        batch_first: bool = False,
    ) -> JaxLoss:
        """Return the loss for a step's output and a target of this kind, as the user gave it.

        Args:
            compiled: the step.
            target: the target.
            length: number of steps, for a loss of all outputs.
            batch_first: whether those are (batch, time, …).
        """
        if self.loss is None:
            raise InputError(
                "This learner has no loss. Give one: `OnlineLearner(model, "
                "loss=torch.nn.functional.mse_loss)`."
            )
        leaves, tree = jax.tree.flatten(target)
        where = (compiled.signature, tree, length)
        given = (where, tuple((tuple(np.shape(t)), str(t.dtype)) for t in leaves))
        key = (where, tuple((tuple(np.shape(t)), str(jax_dtype(t))) for t in leaves))
        is_new, holds = given not in self._tried, not self._losses or self.settings_hold
        if is_new or not holds:
            program = compiled.program
            lead = () if length is None else (length,)
            shapes = [
                jax.ShapeDtypeStruct((*lead, *v.aval.shape), v.aval.dtype) for v in program.out_vars
            ]
            if batch_first:
                shapes = [
                    jax.ShapeDtypeStruct((s.shape[1], s.shape[0], *s.shape[2:]), s.dtype)
                    for s in shapes
                ]
            output = program.output_tree(shapes)
            make = lambda: as_jax_loss(
                self.loss, output, target, self._prefer_torch, self._needs_slope
            )
            self._check_same(self._losses.setdefault(key, make()), make, again=not holds)
            self._tried.add(given)
        return self._losses[key]

    def _check_same(self, known: JaxLoss, make: Callable[[], JaxLoss], again: bool) -> None:
        """Raise if what the loss reads has changed since it was traced, with another result."""
        changes = self._settings.differences()
        if (again or changes) and not _is_same(known, make()):
            raise StateError(
                f"The loss `{_name(self.loss)}` is not what it was when the learner compiled it: "
                f"{'; '.join(changes) or 'what it reads has changed'}. Pass what changes as a part "
                "of the target, `(target, weight)`, or make a new learner; call "
                "`learner.sync_to_torch()` before, and the new one goes on with these weights."
            )
        self._settings = LossSettings(self.loss)

    def last(self, compiled: CompiledStep) -> tuple[Any, JaxLoss] | None:
        """Return the shapes of the last new kind of target of a step, and the loss for it; None
        before the first target.
        """
        known = [key for key in self._losses if key[0][0] == compiled.signature]
        if not known:
            return None
        (_, tree, _), shapes = known[-1]
        target = jax.tree.unflatten(
            tree, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
        )
        return target, self._losses[known[-1]]


@announcing()
def as_jax_loss(
    loss: Callable, output: Any, target: Any, prefer_torch: bool, needs_slope: bool
) -> JaxLoss:
    """Return a loss as a JAX callable `(output, target) -> scalar`, checked.

    The loss is called once on torch tensors of the right shapes. If that works, it is torch code
    and is traced like the model, with torch's meaning of every operation. If not, it must work on
    JAX arrays. A torch loss that fails keeps torch's error message.

    Args:
        loss: torch function or module, or JAX callable.
        output: the model's output at one step, as shapes.
        target: a target of one step, as the user gave it.
        prefer_torch: the model is torch's, so that code that works for both libraries means
            torch's.
        needs_slope: the loss must have a derivative by the output.
    """
    if not callable(loss):
        raise InputError(
            f"`loss` is a {type(loss).__name__}; it must be a callable `(output, target) -> "
            "scalar`."
        )
    surely_torch = isinstance(loss, torch.nn.Module) or (
        getattr(loss, "__module__", None) or ""
    ).startswith("torch")
    attempts = [_try_torch, _try_jax] if prefer_torch or surely_torch else [_try_jax, _try_torch]
    errors: dict[str, Exception] = {}
    for attempt in attempts[:1] if surely_torch else attempts:
        function, error = attempt(loss, output, target)
        if function is not None:
            return _checked(function, loss, output, target, needs_slope)
        errors["torch tensors" if attempt is _try_torch else "JAX arrays"] = error
    reasons = " ".join(f"On {kind}: {type(e).__name__}: {e}" for kind, e in errors.items())
    raise InputError(
        f"The loss `{_name(loss)}` does not work on the model's output {_show(output)} and the "
        f"target {_show(target)}. {reasons} Check the target's shape and dtype (class labels are "
        "int64, as for torch)."
    ) from next(iter(errors.values()))


def _try_torch(loss: Callable, output: Any, target: Any) -> tuple[Callable | None, Any]:
    try:
        probe = jax.tree.map(
            lambda o: to_torch(np.full(o.shape, 0.5)).to(to_torch(np.zeros(0, o.dtype)).dtype),
            output,
        )
        result = loss(probe, jax.tree.map(_as_label, target, is_leaf=is_array))
    except BridgeError:
        raise
    except Warning:
        raise
    except Exception as error:  # user code may fail in any way
        return None, error
    if not isinstance(result, torch.Tensor):
        return None, TypeError(f"it returned a {type(result).__name__}, not a tensor")
    return trace_function(loss), None


def _try_jax(loss: Callable, output: Any, target: Any) -> tuple[Callable | None, Any]:
    try:
        jax.eval_shape(loss, output, _shapes(target))
    except Exception as error:  # user code may fail in any way
        return None, error
    return loss, None


def _checked(
    function: Callable, loss: Callable, output: Any, target: Any, needs_slope: bool
) -> JaxLoss:
    """Return the loss if it is a real scalar that, where needed, depends on the output."""
    target = _shapes(target)
    result = jax.eval_shape(function, output, target)
    if getattr(result, "shape", None) == (1,):  # as torch's `backward` takes it
        inner = function
        function = lambda output, target: inner(output, target)[0]
        result = jax.eval_shape(function, output, target)
    if not hasattr(result, "shape") or result.shape != ():
        found = (
            f"shape {result.shape}" if hasattr(result, "shape") else f"a {type(result).__name__}"
        )
        raise InputError(
            f"The loss `{_name(loss)}` must return a scalar for one step; it returned {found}. "
            "Take its mean or sum over the batch."
        )
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise InputError(
            f"The loss `{_name(loss)}` returned a scalar of {result.dtype}; it must be a real "
            "floating-point number, or there is no gradient."
        )
    outputs, tree = jax.tree.flatten(output)
    targets, target_tree = jax.tree.flatten(target)

    def slopes(cotangent: Any, *flat: Any) -> list[Any]:
        """Return the loss's derivative with respect to the output, times a number."""
        wanted = jax.tree.unflatten(target_tree, flat[len(outputs) :])
        _, back = jax.vjp(
            lambda *o: function(jax.tree.unflatten(tree, o), wanted), *flat[: len(outputs)]
        )
        return [g for g in back(cotangent) if g.dtype != jax.dtypes.float0]

    closed, ranges = trace_with_ranges(slopes, result, *outputs, *targets)
    smooth = [n for n, o in enumerate(outputs) if jnp.issubdtype(o.dtype, jnp.inexact)]
    reads = [smooth[n] for n in outputs_of(closed.jaxpr, closed.jaxpr.invars[0])]
    if needs_slope and not reads:
        raise InputError(
            f"The loss `{_name(loss)}` has no derivative by the model's output: it is constant, or "
            "the output was detached or rounded on the way. Nothing could be learned from it."
        )
    first = 1 + len(outputs)
    ranges = [
        dataclasses.replace(r, position=r.position - first) for r in ranges if r.position >= first
    ]
    return JaxLoss(
        without_empty_steps(function, ignored_value(ranges)),
        ranges,
        (output, target),
        loss,
        closed,
        frozenset(reads if needs_slope else range(len(outputs))),
    )


def _is_same(a: JaxLoss, b: JaxLoss) -> bool:
    """Return whether two losses compute the same."""
    pairs = list(zip(a.traced.consts, b.traced.consts, strict=False))
    return (
        str(a.traced.jaxpr) == str(b.traced.jaxpr)
        and len(a.traced.consts) == len(b.traced.consts)
        and all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)
    )


def _shapes(target: Any) -> Any:
    return jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(np.shape(t), jax_dtype(t)), target, is_leaf=is_array
    )


def jax_dtype(x: Any) -> np.dtype:
    """Return the dtype that JAX gives an array of any library in the current precision mode."""
    if isinstance(x, torch.Tensor):
        name = str(x.dtype).removeprefix("torch.")
        return jax.dtypes.canonicalize_dtype(jnp.dtype(name))
    if isinstance(x, np.ndarray):
        return jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("="))
    return jax.dtypes.canonicalize_dtype(jnp.result_type(x))


def _as_label(x: Any) -> torch.Tensor:
    """Return a torch tensor like a target.

    Integers are zeros, which every loss accepts, and int64 if they come from another library.
    """
    tensor = (
        x.detach().cpu()
        if isinstance(x, torch.Tensor)
        else to_torch(x if isinstance(x, jax.Array) else to_host(x))
    )
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return tensor
    return torch.zeros(
        tensor.shape, dtype=tensor.dtype if isinstance(x, torch.Tensor) else torch.int64
    )


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _show(tree: Any) -> str:
    leaves = jax.tree.leaves(tree, is_leaf=is_array)
    return ", ".join(
        f"{str(getattr(x, 'dtype', type(x).__name__)).removeprefix('torch.')}{tuple(np.shape(x))}"
        for x in leaves
    )
