"""A model from a Python file, and sequences made for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import brainstate
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.cli.arguments import UsageError, existing_file
from etrace_bridge.frontend import run_torch, wrap
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.inputs import as_array

LOSSES: dict[str, Callable] = {
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "cross_entropy": nn.functional.cross_entropy,
    "nll": nn.functional.nll_loss,
    "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
}


def load_object(reference: str) -> Any:
    """Return the object that `path/to/file.py:name` names."""
    file, colon, name = reference.rpartition(":")
    if not colon or not file or not name:
        raise InputError(
            f"`{reference}` is not of the form `path/to/file.py:name`, where `name` is a torch "
            "or brainstate module, or a class or function that makes one."
        )
    path = existing_file(file)
    # Never the name of a module that is there already
    name_in_python = f"_from_command_line_{path.stem}"
    spec = importlib.util.spec_from_file_location(name_in_python, path)
    if spec is None or spec.loader is None:
        raise InputError(f"`{file}` is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_in_python] = module  # classes find their own module
    sys.path.insert(0, str(path.resolve().parent))  # so that the file can import its neighbours
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        fix = f"Install it for {sys.executable}, or run the command with the Python that has it."
        raise InputError(
            f"`{file}` cannot be imported, because it imports `{error.name}`, which is not "
            f"installed. {fix}"
        ) from error
    except Exception as error:
        raise InputError(f"`{file}` cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        known = sorted(
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        )
        raise InputError(f"`{file}` has no `{name}`. It defines: {', '.join(known) or 'nothing'}.")
    return getattr(module, name)


def load_model(reference: str, seed: int = 0) -> nn.Module:
    """Return the torch module that `path/to/file.py:name` names: a module, or what a function or
    class makes.
    """
    found = load_any_model(reference, seed)
    if not isinstance(found, nn.Module):
        raise InputError(
            f"`{reference}` is a brainstate module; this command compares with torch and needs a "
            "torch module."
        )
    return found


def load_any_model(reference: str, seed: int = 0) -> nn.Module | brainstate.nn.Module:
    """Return the torch or brainstate module that `path/to/file.py:name` names: a module, or what a
    function or class makes.
    """
    found = load_object(reference)
    torch.manual_seed(seed)
    brainstate.random.seed(seed)
    kinds = (nn.Module, brainstate.nn.Module)
    if not isinstance(found, kinds):
        if not callable(found):
            raise InputError(
                f"`{reference}` is a {type(found).__name__}; it must be a torch module, a "
                "brainstate module, or a function that makes one."
            )
        try:
            found = found()
        except Exception as error:
            raise InputError(
                f"`{reference}()` failed: {type(error).__name__}: {error}. It is called without "
                "arguments."
            ) from error
    if not isinstance(found, kinds):
        raise InputError(
            f"`{reference}()` returned a {type(found).__name__}, not a torch or brainstate module."
        )
    return found


def load_net(reference: str, state: str | None = None, seed: int = 0) -> brainstate.nn.Module:
    """Return the module that `path/to/file.py:name` names, wrapped if it is torch's.

    Args:
        reference: of a torch or brainstate module, or of what makes one.
        state: the `state=` of `wrap`, as `path/to/file.py:name`; for torch modules.
        seed: of weights and random ops.
    """
    found = load_any_model(reference, seed)
    if isinstance(found, nn.Module):
        return wrap(found, load_state(state), seed=seed)
    if state is not None:
        raise UsageError(
            f"--state is for torch modules; `{reference}` is a brainstate module, which makes its "
            "states in `init_state`."
        )
    return found


def make_module_data(
    net: brainstate.nn.Module,
    shape: tuple[int, ...],
    steps: int,
    classes: int | None,
    loss: str,
    seed: int,
) -> tuple[Any, Callable, Any]:
    """Return random inputs for a brainstate module, a loss by name, and random targets of the kind
    that it takes.
    """
    xs = make_inputs(nn.Identity(), shape, steps, classes, seed)
    outputs = [v.aval for v in CompiledStep(net, [as_array(xs[0])]).program.out_vars]
    like = next(
        (torch.zeros(o.shape) for o in outputs if np.issubdtype(o.dtype, np.floating)), None
    )
    if like is None or len(outputs) > 1:
        raise InputError(
            "The command line makes targets for a module with one floating output only. Use "
            "`check_gradients` in Python."
        )
    return (
        xs,
        load_loss(loss),
        make_targets(loss, like, steps, torch.Generator().manual_seed(seed + 1)),
    )


def load_loss(name: str) -> Callable:
    """Return a loss by name, or from `path/to/file.py:name`."""
    if ":" in name:
        return load_object(name)
    if name not in LOSSES:
        raise InputError(
            f"There is no loss `{name}`. Known: {', '.join(LOSSES)}; or name one of your own: "
            "path/to/file.py:name."
        )
    return LOSSES[name]


def load_state(reference: str | None) -> Any:
    """Return the `state=` of `wrap`, from `path/to/file.py:name`."""
    return None if reference is None else load_object(reference)


def parse_shape(text: str) -> tuple[int, ...]:
    """Return sizes from text such as `8,32`."""
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(
            f"`--input {text}` is not a shape; write the sizes of one time step, batch first, such as "
            "`8,32`."
        )
    return sizes


def make_inputs(
    model: nn.Module, shape: tuple[int, ...], steps: int, classes: int | None, seed: int
) -> torch.Tensor:
    """Return a random sequence `(T, *shape)`: normal numbers, or integers below `classes` for an
    embedding.
    """
    generator = torch.Generator().manual_seed(seed)
    if classes is None:
        first = next((m for m in model.modules() if not list(m.children())), None)
        classes = first.num_embeddings if isinstance(first, nn.Embedding) else None
    if classes is not None:
        return torch.randint(0, classes, (steps, *shape), generator=generator)
    return torch.randn(steps, *shape, generator=generator)


def in_layout(sequence: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return a time-major sequence as the model takes it."""
    return sequence.transpose(0, 1).contiguous() if batch_first and sequence.dim() > 1 else sequence


def make_loss_and_targets(
    model: nn.Module, xs: torch.Tensor, loss: str, batch_first: bool, seed: int, options: dict
) -> tuple[Callable, Any]:
    """Return a loss by name, and random targets of the kind that it takes, for the model's output."""
    with torch.no_grad():
        run = run_torch(model, xs, **options)
    leaves = [t for _, t in flatten_state(run.outputs[0])[0]]
    floats = [t for t in leaves if t.is_floating_point()]
    if not floats:
        raise InputError(
            "The model's output has no floating tensor, so no loss can be made for it."
        )
    generator = torch.Generator().manual_seed(seed + 1)
    length = len(run.outputs)
    if ":" in loss:
        call = load_object(loss)
        return call, in_layout(
            torch.randn(length, *floats[0].shape, generator=generator), batch_first
        )
    if loss not in LOSSES:
        raise InputError(
            f"There is no loss `{loss}`. Known: {', '.join(LOSSES)}; or name one of your own: "
            "path/to/file.py:name."
        )
    call, targets = LOSSES[loss], make_targets(loss, floats[0], length, generator)
    if len(leaves) == 1:
        return call, in_layout(targets, batch_first)
    return _on_first_float(call), in_layout(targets, batch_first)


def make_targets(
    loss: str, like: torch.Tensor, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return random targets of the kind that a loss takes for outputs like this one, for every
    step.
    """
    if loss in ("cross_entropy", "nll"):
        return torch.randint(
            0, like.shape[1], (length, like.shape[0], *like.shape[2:]), generator=generator
        )
    if loss == "bce_with_logits":
        return torch.randint(0, 2, (length, *like.shape), generator=generator).to(like.dtype)
    return torch.randn(length, *like.shape, generator=generator).to(like.dtype)


def _on_first_float(loss: Callable) -> Callable:
    """Return the loss of the first floating-point tensor of an output that has several tensors."""

    def first(output: Any, target: Any) -> Any:
        return loss(next(t for _, t in flatten_state(output)[0] if t.is_floating_point()), target)

    return first
