"""What a rule's gradient is worth at the end of a run, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import etrace_bridge as eb
from benchmarks.reproduce.programs import kept
from benchmarks.reproduce.tasks import Piece
from benchmarks.reproduce.training import Loss, Method, as_real, numpy_weights
from etrace_bridge.rules import make_rule


def compare(piece: Piece, method: Method) -> tuple[float, int] | None:
    """The cosine of the method's gradient to torch's BPTT, and the bytes of its program.

    The weights do not change along the piece. The program goes over it window by window, one step
    at a time for online rules; its bytes are those of arguments, results and temporary buffers,
    the piece's own aside. None for rules that need the loss itself.
    """
    if make_rule(method.rule).needs_loss:
        return None
    exact = bptt_gradient(piece)
    # buffers have their values in the program, and differ from seed to seed where they are drawn
    fixed = [float(b.double().sum()) for b in piece.model.buffers()]
    key = f"gradient {piece.model} {piece.loss.__name__} {piece.xs.shape} {fixed} {method}"
    names, call, memory = kept(key, lambda: _compile(piece, method))
    params = numpy_weights(piece.model)
    grads = call({n: params[n] for n in names}, piece.xs, piece.ys, piece.weights)
    found = np.concatenate([np.asarray(grads[n], np.float64).ravel() for n in names])
    true = np.concatenate([exact[n].astype(np.float64).ravel() for n in names])
    norms = np.linalg.norm(found) * np.linalg.norm(true)
    return float(found @ true / norms) if norms else float("nan"), memory


def bptt_gradient(piece: Piece) -> dict[str, np.ndarray]:
    """torch's gradient through the whole piece, by name."""
    outputs = piece.model(torch.from_numpy(piece.xs))
    leaves, tree = jax.tree.flatten(outputs)
    total = lambda found: _total(piece.loss, found, piece.ys, piece.weights)
    wanted = jax.grad(total)(tree.unflatten([jnp.asarray(o.detach().numpy()) for o in leaves]))
    cotangents = [torch.from_numpy(np.array(c)) for c in jax.tree.leaves(wanted)]
    named = dict(piece.model.named_parameters())
    grads = torch.autograd.grad(
        leaves, list(named.values()), cotangents, allow_unused=True, materialize_grads=True
    )
    return {n: as_real(g) for n, g in zip(named, grads, strict=True)}


def _total(loss: Loss, outputs: Any, targets: Any, weights: Any) -> jax.Array:
    losses = jax.vmap(loss)(outputs, targets)
    return jnp.sum(losses.mean(1) * weights)


def _compile(piece: Piece, method: Method) -> tuple[list[str], Callable, int]:
    net = eb.wrap(piece.model, sequence=True)
    pure = eb.functional(net, torch.from_numpy(piece.xs[0]), rule=method.rule)
    steps = len(piece.xs)
    window = steps if method.whole else min(method.window, steps)

    def objective(params: Any, carry: Any, part: Any) -> tuple[jax.Array, Any]:
        outputs, carry = pure.chunk(params, carry, part[0])
        return _total(piece.loss, outputs, *part[1:]), carry

    def gradient(params: Any, *data: Any) -> Any:
        def add(state: Any, part: Any) -> tuple[Any, None]:
            total, carry = state
            grads, carry = jax.grad(objective, has_aux=True)(params, carry, part)
            return (jax.tree.map(jnp.add, total, grads), carry), None

        count = steps // window
        fold = lambda a: a[: count * window].reshape(count, window, *a.shape[1:])
        start = jax.tree.map(jnp.zeros_like, params), pure.init(params)
        (total, carry), _ = jax.lax.scan(add, start, jax.tree.map(fold, data))
        if count * window < steps:
            total, _ = add((total, carry), jax.tree.map(lambda a: a[count * window :], data))[0]
        return total

    data = (piece.xs, piece.ys, piece.weights)
    program = jax.jit(gradient).lower(pure.params, *data).compile()
    found: Any = program.memory_analysis()
    total = (
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    ) - found.alias_size_in_bytes
    return list(pure.params), program, int(total) - sum(a.nbytes for a in jax.tree.leaves(data))
