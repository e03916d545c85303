"""The loss as a JAX function, whichever library it was written for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import BridgeError, InputError
from etrace_bridge.frontend import to_torch, trace_function


def as_jax_loss(loss: Callable, output: Any, target: Any, prefer_torch: bool) -> Callable[[Any, Any], Any]:
    """A JAX callable `(output, target) -> scalar`.

    The loss is called once on torch tensors of the right shapes. If that works it is torch code and is traced like the model, with
    torch's meaning of every operation; if not, it must work on JAX arrays. A torch loss that fails gives torch's own message.

    Args:
        loss: torch function or module, or JAX callable.
        output: the model's output at one step, as shapes.
        target: a target of one step, as the user gave it.
        prefer_torch: the model is torch's, so that code that works for both libraries means torch's.
    """
    if not callable(loss):
        raise InputError(f"`loss` is a {type(loss).__name__}; it must be a callable `(output, target) -> scalar`.")
    surely_torch = isinstance(loss, torch.nn.Module) or (getattr(loss, "__module__", None) or "").startswith("torch")
    attempts = [_try_torch, _try_jax] if prefer_torch or surely_torch else [_try_jax, _try_torch]
    errors: dict[str, Exception] = {}
    for attempt in attempts[:1] if surely_torch else attempts:
        made, error = attempt(loss, output, target)
        if made is not None:
            return made
        errors["torch tensors" if attempt is _try_torch else "JAX arrays"] = error
    reasons = " ".join(f"On {kind}: {type(e).__name__}: {e}" for kind, e in errors.items())
    raise InputError(
        f"The loss `{_name(loss)}` does not work on the model's output {_show(output)} and the target {_show(target)}. {reasons} "
        "Check the target's shape and dtype (class labels are int64, as for torch)."
    ) from next(iter(errors.values()))


def _try_torch(loss: Callable, output: Any, target: Any) -> tuple[Callable | None, Any]:
    try:
        probe = jax.tree.map(lambda o: to_torch(np.full(o.shape, 0.5)).to(to_torch(np.zeros(0, o.dtype)).dtype), output)
        result = loss(probe, jax.tree.map(_as_label, target, is_leaf=_is_array))
    except BridgeError:
        raise
    except Warning:
        raise
    except Exception as error:  # user code may fail in any way
        return None, error
    if not isinstance(result, torch.Tensor):
        return None, TypeError(f"it returned a {type(result).__name__}, not a tensor")
    if result.dim() != 0:
        raise InputError(
            f"The loss `{_name(loss)}` must return a scalar for one step; it returned shape {tuple(result.shape)}. "
            "Take its mean or sum over the batch."
        )
    return trace_function(loss), None


def _try_jax(loss: Callable, output: Any, target: Any) -> tuple[Callable | None, Any]:
    shapes = jax.tree.map(lambda t: jax.ShapeDtypeStruct(np.shape(t), jax_dtype(t)), target, is_leaf=_is_array)
    try:
        result = jax.eval_shape(loss, output, shapes)
        shape = result.shape
    except Exception as error:  # user code may fail in any way
        return None, error
    if shape != ():
        raise InputError(
            f"The loss `{_name(loss)}` must return a scalar for one step; it returned shape {shape}. Take its mean or sum over the batch."
        )
    return loss, None


def jax_dtype(x: Any) -> np.dtype:
    """The dtype that JAX gives an array of any library in the current precision mode."""
    if isinstance(x, torch.Tensor):
        name = str(x.dtype).removeprefix("torch.")
        return jax.dtypes.canonicalize_dtype(jnp.dtype(name))
    return jax.dtypes.canonicalize_dtype(jnp.result_type(x))


def _as_label(x: Any) -> torch.Tensor:
    """A torch tensor; whole numbers from other libraries count as torch's int64."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu()
    tensor = to_torch(x if isinstance(x, jax.Array) else np.asarray(x))
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


def _is_array(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, np.ndarray, jax.Array))


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _show(tree: Any) -> str:
    leaves = jax.tree.leaves(tree, is_leaf=_is_array)
    return ", ".join(f"{str(getattr(x, 'dtype', type(x).__name__)).removeprefix('torch.')}{tuple(np.shape(x))}" for x in leaves)
