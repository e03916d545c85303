"""The torch side of a gradient check: the model runs over the sequence, and torch differentiates."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.check.check_loss import CheckLoss
from etrace_bridge.frontend import map_input, run_torch, to_jax, to_torch
from etrace_bridge.frontend.reference import TorchRun
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state, unflatten_state

TORCH_BPTT = "torch BPTT"
JAX_GRAD = "jax.grad through time"


@dataclass(frozen=True)
class CheckData:
    """The data of a check, cast to its precision.

    Attributes:
        xs: inputs as the model takes them, `(T, B, …)` or `(B, T, …)`; a tensor or a tree of them.
        targets: targets, time where the inputs have it; a tensor or a tree of them.
        weights: (T,) factors of the steps' losses.
        batch_first: the second axis is time.
        per_sequence: there is one target for each sequence; targets have no time axis.
        factors: (T, B) factors of the batch elements within a step, whose mean is one, or zero
            where a step does not count; None: all count alike.
    """

    xs: Any
    targets: Any
    weights: np.ndarray
    batch_first: bool
    per_sequence: bool = False
    factors: np.ndarray | None = None

    @property
    def is_zero(self) -> bool:
        """Whether the inputs are zero at every step."""
        return not any(bool(x.any()) for x in jax.tree.leaves(self.xs))

    def target(self, step: int) -> Any:
        """Return the target of one step."""
        if self.per_sequence:
            return self.targets
        return map_tensors(
            self.targets, lambda t: t.select(1 if self.batch_first and t.dim() > 1 else 0, step)
        )


@dataclass(frozen=True)
class Reference:
    """The reference's results.

    Attributes:
        grads: gradient by parameter name; zeros where there is no path to the loss.
        outputs: the output of each step, as lists of arrays.
        loss: the loss of the sequence.
        reaches_output: the loss has a derivative by the model's outputs.
        reaches_parameter: some parameter has a path to the loss.
        responds_to_input: the outputs differ from those for an input of zeros.
        seconds: time of the forward and backward pass, without the loss.
    """

    grads: dict[str, np.ndarray]
    outputs: list[list[np.ndarray]]
    loss: float
    reaches_output: bool
    reaches_parameter: bool
    responds_to_input: bool
    seconds: float


def map_tensors(tree: Any, fun: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function to every tensor of a tree of tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return fun(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, fun) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fun) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(value, fun) for value in tree)
    return tree


def torch_reference(
    model: nn.Module,
    names: Sequence[str],
    data: CheckData,
    loss: CheckLoss,
    options: Mapping[str, Any],
) -> Reference:
    """Run torch BPTT.

    Args:
        model: the torch model, left as it was.
        names: the parameters to differentiate with respect to.
        data: the sequence.
        loss: its function is a torch or JAX callable.
        options: arguments of `run_torch`.
    """
    named = dict(model.named_parameters())
    parameters = [named[name] for name in names]
    run = _run(model, data, options)
    value, total, read = _losses(run, data, loss)
    begin = time.perf_counter()
    gradients = [None] * len(parameters)
    if total.requires_grad and parameters:
        gradients = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    seconds = run.seconds + time.perf_counter() - begin
    tensors = [t for output in read for _, t in flatten_state(output)[0] if t.requires_grad]
    by_output = ()
    if total.requires_grad and tensors:
        by_output = torch.autograd.grad(total, tensors, allow_unused=True)
    reaches_output = any(
        g is not None and g.numel() > 0 and bool(g.abs().max() > 0) for g in by_output
    )
    grads = {
        name: np.zeros(tuple(p.shape), np.dtype(str(p.dtype).removeprefix("torch.")))
        if g is None
        else g.detach().numpy(force=True)
        for name, p, g in zip(names, parameters, gradients, strict=True)
    }
    outputs = [[t.detach().numpy(force=True) for _, t in flatten_state(o)[0]] for o in run.outputs]
    return Reference(
        grads, outputs, value, reaches_output, any(g is not None for g in gradients),
        _responds_to_input(model, data, options, outputs), seconds,
    )  # fmt: skip


def _run(model: nn.Module, data: CheckData, options: Mapping[str, Any]) -> TorchRun:
    with torch.enable_grad():
        return run_torch(model, data.xs, **options)


def _losses(
    run: TorchRun, data: CheckData, loss: CheckLoss
) -> tuple[float, torch.Tensor, list[Any]]:
    """Return the sequence's loss as a number and as a tensor with a gradient, and the outputs read."""
    if len(run.outputs) != len(data.weights):
        raise InputError(
            f"The model made {len(run.outputs)} outputs from {len(data.weights)} steps; a check needs one "
            "output per step. Is `batch_first` right?"
        )
    if loss.reads_sequence:
        read, weights = [_of_sequence(run, data, loss)], [1.0]
    else:
        read, weights = run.outputs, data.weights.tolist()
    function = loss.function
    is_torch = _is_torch_loss(function, read[0], data.target(0))
    value, total = 0.0, torch.zeros((), dtype=torch.float64)
    for step, (output, weight) in enumerate(zip(read, weights, strict=True)):
        if weight == 0:
            continue
        call = functools.partial(_torch_loss if is_torch else _jax_loss, function)
        target = data.target(step)
        if data.factors is None:
            number, tensor = call(output, target)
        else:
            number, tensor = _masked_loss(call, output, target, data.factors[step])
        value += weight * number
        total = total + weight * tensor
    return value, total, read


def _masked_loss(
    call: Callable, output: Any, target: Any, factors: np.ndarray
) -> tuple[float, torch.Tensor]:
    """Return the loss of a step in which batch elements count by their factors: the loss of each
    alone.
    """
    pick = lambda tree, rows: map_tensors(tree, lambda t: t[rows] if t.dim() else t)
    of_rows = lambda rows: call(pick(output, rows), pick(target, rows))
    rows = np.flatnonzero(factors).tolist()
    found = [of_rows([row]) for row in rows]
    alone = np.array([number for number, _ in found])
    together, twice = of_rows(rows)[0], of_rows([rows[0]] * 2)[0]
    same = functools.partial(np.isclose, rtol=1e-4, atol=1e-9)
    is_mean = same(twice, alone[0])
    if not same(together, alone.mean() if is_mean else alone.sum()):
        raise InputError(
            "The loss is neither a mean nor a sum over the batch, so single sequences cannot be "
            "left out. Give a loss that is, or a `mask` (T,) for all sequences."
        )
    scale = factors[rows] / (len(factors) if is_mean else 1)
    tensors = [float(f) * tensor for f, (_, tensor) in zip(scale, found, strict=True)]
    return float(scale @ alone), torch.stack(tensors).sum()


def _of_sequence(run: TorchRun, data: CheckData, loss: CheckLoss) -> Any:
    """Return what a loss of a whole sequence reads.

    That is what the model returned, or the outputs of all steps in the model's own layout.
    """
    if not loss.over_time:
        return run.returned
    leaves, skeleton = flatten_state(run.stacked())
    laid_out = [t.transpose(0, 1) if data.batch_first and t.dim() > 1 else t for _, t in leaves]
    return unflatten_state(skeleton, laid_out)


def _torch_loss(loss: Callable, output: Any, target: Any) -> tuple[float, torch.Tensor]:
    value = loss(output, target)
    if value.dim() != 0:
        raise InputError(
            f"The loss must return a scalar; it returned shape {tuple(value.shape)}. Reduce it, for "
            "example with `.mean()`."
        )
    return float(value.detach()), value


def _jax_loss(loss: Callable, output: Any, target: Any) -> tuple[float, torch.Tensor]:
    """Evaluate a loss written in JAX: JAX differentiates it by the outputs, torch does the rest."""
    leaves, skeleton = flatten_state(output)
    tensors = [t for _, t in leaves]
    arrays = [to_jax(t.detach()) for t in tensors]
    floats = [n for n, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    wanted = map_tensors(target, lambda t: to_jax(t))

    def of_floats(some: list[Any]) -> Any:
        full = list(arrays)
        for n, x in zip(floats, some, strict=True):
            full[n] = x
        return loss(unflatten_state(skeleton, full), wanted)

    value, grads = jax.value_and_grad(of_floats)([arrays[n] for n in floats])
    # JAX's gradient g by a complex value changes the loss by Re(g dz).
    terms = [(to_torch(g) * tensors[n]).sum().real for n, g in zip(floats, grads, strict=True)]
    return float(value), torch.stack([t.double() for t in terms]).sum()


def _is_torch_loss(loss: Callable, output: Any, target: Any) -> bool:
    """Return whether a loss works on torch tensors.

    torch's own losses always do: if one of them fails, the user gets its error.
    """
    if isinstance(loss, nn.Module) or (getattr(loss, "__module__", None) or "").startswith("torch"):
        return True
    try:
        return isinstance(loss(map_tensors(output, torch.Tensor.detach), target), torch.Tensor)
    except Exception:  # user code may fail in any way on arrays of the other library
        return False


def _responds_to_input(
    model: nn.Module, data: CheckData, options: Mapping[str, Any], outputs: list[list[np.ndarray]]
) -> bool:
    """Return whether the outputs differ from those for an input of zeros."""
    if data.is_zero:
        return False
    with torch.no_grad(), restored(model):
        run = run_torch(model, map_input(torch.zeros_like, data.xs), **options)
    silent = [[t.detach().numpy(force=True) for _, t in flatten_state(o)[0]] for o in run.outputs]
    return any(
        not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        for here, there in zip(outputs, silent, strict=True)
        for a, b in zip(here, there, strict=True)
    )
