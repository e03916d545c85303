"""Train a torch model on a stream, one update per step, as one compiled program per episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import etrace_bridge as eb
from benchmarks.reproduce.programs import Stopwatch, kept


@dataclass(frozen=True)
class Method:
    """A learning rule, and after how many steps it updates.

    Attributes:
        rule: the rule's name or object.
        window: steps per update; the rule sees them as one chunk.
        whole: a window is a whole episode: with `bptt` that is full backpropagation through time.
    """

    rule: Any
    window: int = 1
    whole: bool = False


@dataclass(frozen=True)
class Episode:
    """Steps between two resets of state and trace.

    Attributes:
        xs: inputs, (steps, batch, …).
        ys: targets, (steps, batch, …).
        weights: (steps,) factors of the losses.
    """

    xs: np.ndarray
    ys: np.ndarray
    weights: np.ndarray


Loss = Callable[[jax.Array, jax.Array], jax.Array]


def train_on_stream(
    model: torch.nn.Module,
    method: Method,
    episodes: Iterable[Episode],
    loss: Loss,
    rate: float,
    clock: Stopwatch,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Train with Adam; yield each episode's losses (steps,) and outputs, made while learning.

    The model has its weights from the end of training when all episodes are done.

    Args:
        model: maps a sequence to a sequence; its weights are where training starts.
        method: the rule and its window.
        episodes: all of one shape; states and traces start anew with each.
        loss: `(outputs, targets) -> (batch,)` of one step.
        rate: Adam's learning rate.
        clock: has a lap for each episode.
    """
    params, optimizer = numpy_weights(model), optax.adam(rate)
    opt, rest = optimizer.init(params), iter(episodes)
    first = next(rest)

    def compiled() -> Callable[..., tuple]:
        pure = eb.functional(model, torch.from_numpy(first.xs[0]), rule=method.rule)
        return jax.jit(_episode_program(pure, optimizer, loss, method))

    run = kept(f"stream {model} {first.xs.shape} {loss.__name__} {rate} {method}", compiled)
    for episode in chain([first], rest):
        params, opt, losses, outputs = run(params, opt, episode.xs, episode.ys, episode.weights)
        losses, outputs = np.asarray(losses), np.asarray(outputs)
        clock.lap()
        yield losses, outputs
    load_weights(model, params)


def numpy_weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """A model's parameters by name, as the package stores them: complex ones as pairs of real."""
    return {n: as_real(p.detach()).copy() for n, p in model.named_parameters()}


def load_weights(model: torch.nn.Module, params: Mapping[str, Any]) -> None:
    """Give the model the weights that training ended with."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(np.array(params[name]))
            parameter.copy_(torch.view_as_complex(value) if parameter.is_complex() else value)


def as_real(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements, complex ones as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).numpy()


def _episode_program(
    pure: eb.Functional, optimizer: Any, loss: Loss, method: Method
) -> Callable[..., tuple]:
    def program(params: Any, opt: Any, xs: Any, ys: Any, weights: Any) -> tuple:
        window = len(xs) if method.whole else min(method.window, len(xs))
        count = len(xs) // window
        fold = lambda a: a[: count * window].reshape(count, window, *a.shape[1:])

        def objective(params: Any, carry: Any, part: Any) -> tuple[Any, Any]:
            outputs, carry = pure.chunk(params, carry, part[0])
            losses = jnp.mean(jax.vmap(loss)(outputs, part[1]), axis=1)
            total = jnp.sum(losses * part[2]) / jnp.maximum(jnp.sum(part[2]), 1)
            return total, (losses, outputs, carry)

        def update(state: Any, part: Any) -> tuple[Any, Any]:
            params, opt, carry = state
            grads, (losses, outputs, carry) = jax.grad(objective, has_aux=True)(params, carry, part)
            moved, opt_new = optimizer.update(grads, opt, params)
            # without a loss there is no update, of Adam's averages either
            learns = jnp.sum(part[2]) > 0
            params, opt = jax.tree.map(
                lambda new, old: jnp.where(learns, new, old),
                (optax.apply_updates(params, moved), opt_new),
                (params, opt),
            )
            return (params, opt, carry), (losses, outputs)

        parts = (fold(xs), fold(ys), fold(weights))
        (params, opt, _), (losses, outputs) = jax.lax.scan(
            update, (params, opt, pure.init(params)), parts
        )
        unfold = lambda a: a.reshape(count * window, *a.shape[2:])
        return params, opt, unfold(losses), unfold(outputs)

    return program


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error of each batch element."""
    return jnp.mean((outputs - targets) ** 2, axis=-1)


def cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy of each batch element."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)


class Readout(torch.nn.Module):
    """A recurrent layer and a linear readout.

    Args:
        kind: `"rnn"`, `"gru"` or `"lstm"`.
        inputs: number of inputs.
        hidden: number of units.
        outputs: number of outputs.
        layers: number of recurrent layers.
    """

    def __init__(self, kind: str, inputs: int, hidden: int, outputs: int, layers: int = 1) -> None:
        super().__init__()
        layer = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind]
        self.recurrent = layer(inputs, hidden, layers)
        self.out = torch.nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of a sequence."""
        return self.out(self.recurrent(x)[0])
