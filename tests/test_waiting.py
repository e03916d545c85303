"""Nothing waits for the device unless a number is read.

The optimizer takes half a second on the device, so that a result which is not ready yet shows that
nobody has waited for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import etrace_bridge as eb
from learner_models import make_data, make_net


def slow_sgd() -> optax.GradientTransformation:
    """SGD with a long computation beside it."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        start = jnp.full((500, 500), 1e-3) + sum(jnp.sum(g) for g in jax.tree.leaves(grads))
        end = jax.lax.fori_loop(0, 60, lambda n, x: jnp.tanh(x @ x), start)
        nothing = jnp.where(jnp.isfinite(jnp.sum(end)), 0.0, 1.0)
        return jax.tree.map(lambda g: -0.1 * g + nothing.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: (), update)


def make_learner() -> eb.OnlineLearner:
    return eb.OnlineLearner(make_net(), loss=mse_loss, optimizer=slow_sgd(), chunk=3)


def is_computing(learner: eb.OnlineLearner) -> bool:
    return not learner.runtime.store.state.theta[0].is_ready()


def test_a_step_waits_for_nothing_until_a_number_is_read() -> None:
    learner, (xs, ys) = make_learner(), make_data()
    learner.step(xs[0], ys[0])
    jax.block_until_ready(learner.runtime.store.state.theta)
    assert not is_computing(learner)
    infos = [learner.step(xs[n], ys[n]) for n in range(3)]
    assert is_computing(learner) and not infos[0].raw_loss.is_ready()
    assert infos[-1].loss > 0 and all(info.raw_loss.is_ready() for info in infos)


class Batches(Dataset):
    """Batches, and whether the learner was computing when each of them was read."""

    def __init__(self, learner: eb.OnlineLearner) -> None:
        self.learner, self.computing = learner, []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        if n:
            self.computing.append(is_computing(self.learner))
        return make_data(seed=n)


def test_fit_reads_the_next_batch_while_it_computes() -> None:
    learner = make_learner()
    data = Batches(learner)
    history = learner.fit(DataLoader(data, batch_size=None), max_batches=3, progress=False)
    assert data.computing == [True, True], "and not one batch more than was asked for"
    again = make_learner()
    assert history.batch_losses == [again.update(*make_data(seed=n)).loss for n in range(3)]


def test_what_is_not_read_ahead() -> None:
    """A stream, which an interruption would cut short, and a generator, which may ask the learner."""
    learner = eb.OnlineLearner(make_net(), loss=mse_loss, optimizer=optax.sgd(0.1), chunk=3)
    seen = []

    def generate() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for n in range(3):
            seen.append(learner.updates)
            yield make_data(seed=n)

    learner.fit(generate, progress=False)
    learner.fit(generate(), progress=False)
    assert seen == [0, 1, 2, 3, 4, 5]
    stream = iter([make_data(seed=n) for n in range(5)])
    learner.fit(stream, max_batches=2, epochs=2, progress=False)
    assert len(list(stream)) == 1
