"""How close rules are to exact RTRL along a run of trace patterning (D): `python -m
benchmarks.reproduce.along [--train "low_rank 1"] [--skip 500000] [--steps 50000]`.

One rule trains, as in the task. After `--skip` steps state and memory begin anew, and other rules
run beside it: on the same weights, states and inputs, each with its own memory. Prints the cosine
of their gradients of the value to that of `rtrl` and the ratio of the norms, of the recurrent
weights, as means over pieces of the run. Nothing is written.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import etrace_bridge as eb
from benchmarks.reproduce.methods import all_methods
from benchmarks.reproduce.patterning import (
    RATE,
    TASK,
    first_state,
    make_stream,
    td_step,
    value_and_grad,
)
from benchmarks.reproduce.tasks import Size
from benchmarks.reproduce.training import Readout

PIECE = 5_000


def recurrent(grads: Any) -> jax.Array:
    """The gradients of the recurrent layer as one vector."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return jnp.concatenate([g.ravel() for path, g in leaves if "recurrent" in str(path)])


def measure(train: str, beside: list[str], seed: int, skip: int, steps: int) -> None:
    """Train, and print a row for each piece."""
    xs = make_stream(Size().steps(TASK.steps["GRU"], 0), seed)
    torch.manual_seed(seed)
    model, methods = Readout("gru", xs.shape[1], 20, 1), all_methods()
    names = list(dict.fromkeys(["rtrl", train, *beside]))
    rules = {
        n: eb.functional(model, torch.zeros(1, xs.shape[1]), rule=methods[n].rule) for n in names
    }
    optimizer = optax.adam(RATE)
    alone = td_step(rules[train], optimizer)

    def all_rules(state: Any, x: Any) -> tuple[Any, Any]:
        learning, carries = state
        found, new = {}, {}
        for name, pure in rules.items():
            (_, new[name]), grads = value_and_grad(pure, learning[0], carries[name], x)
            found[name] = recurrent(grads)
        exact = found.pop("rtrl")
        size = jnp.linalg.norm(exact)
        close = {n: _compare(g, exact, size) for n, g in found.items()}
        return (alone(learning, x)[0], new), (close, size)

    learning, _ = jax.jit(lambda s, xs: jax.lax.scan(alone, s, xs))(
        first_state(rules[train], optimizer), xs[:skip]
    )
    learning = (*learning[:2], rules[train].init(learning[0]), *learning[3:])
    state = learning, {n: pure.init(learning[0]) for n, pure in rules.items()}
    program = jax.jit(lambda s, xs: jax.lax.scan(all_rules, s, xs))
    for start in range(skip, skip + steps, PIECE):
        state, (close, size) = program(state, xs[start : start + PIECE])
        shown = "   ".join(
            f"{n} {np.mean(c):.3f} {np.mean(ratio):.2f}" for n, (c, ratio) in close.items()
        )
        print(f"{start:9,}  norm {np.mean(size):.3g}  {shown}", flush=True)


def _compare(grads: jax.Array, exact: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and ratio of the norms."""
    tiny, norm = jnp.finfo(size.dtype).tiny, jnp.linalg.norm(grads)
    return grads @ exact / jnp.maximum(norm * size, tiny), norm / jnp.maximum(size, tiny)


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--train", default="low_rank 1", help="the rule that trains")
    parser.add_argument(
        "--beside", nargs="*", default=["low_rank 1", "low_rank 2", "low_rank 4", "d_rtrl", "snap1"]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="steps before measuring")
    parser.add_argument("--steps", type=int, default=50_000, help="measured steps")
    options = parser.parse_args()
    measure(options.train, options.beside, options.seed, options.skip, options.steps)


if __name__ == "__main__":
    main()
