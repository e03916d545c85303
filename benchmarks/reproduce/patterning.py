"""Task D: trace patterning, a prediction problem of animal learning, by TD(λ) on a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import etrace_bridge as eb
from benchmarks.reproduce.programs import Stopwatch
from benchmarks.reproduce.tasks import NEED_LOSS, Outcome, Piece, Size, Task
from benchmarks.reproduce.training import Method, Readout, load_weights, squared_error

GAMMA, LAMBDA, RATE = 0.9, 0.99, 1e-3
STIMULI, DISTRACTORS = 6, 5


def make_stream(steps: int, seed: int) -> np.ndarray:
    """(steps, 12): 6 bits of the conditioned stimulus, the unconditioned stimulus, 5 distractors.

    A stimulus sets 3 of 6 bits; 10 of the 20 patterns announce the unconditioned stimulus, 24 to 36
    steps later. The next stimulus follows 80 to 120 steps after that.
    """
    generator = np.random.default_rng(seed)
    patterns = [p for p in np.ndindex(*(2,) * STIMULI) if sum(p) == 3]
    valid = set(generator.permutation(len(patterns))[: len(patterns) // 2].tolist())
    xs = np.zeros((steps, STIMULI + 1 + DISTRACTORS), np.float32)
    for i in range(DISTRACTORS):
        xs[:, STIMULI + 1 + i] = generator.uniform(size=steps) < 1 / (10 * (i + 1))
    at = 0
    while at < steps:
        which = int(generator.integers(len(patterns)))
        xs[at, :STIMULI] = patterns[which]
        answer = at + int(generator.integers(24, 37))
        if which in valid and answer < steps:
            xs[answer, STIMULI] = 1
        at = answer + int(generator.integers(80, 121))
    return xs


def returns_of(xs: np.ndarray) -> np.ndarray:
    """Discounted sum of the unconditioned stimulus from the next step on."""
    us, total, found = xs[:, STIMULI], 0.0, np.zeros(len(xs), np.float32)
    for t in range(len(xs) - 2, -1, -1):
        total = us[t + 1] + GAMMA * total
        found[t] = total
    return found


def value_and_grad(pure: eb.Functional, params: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    """The value of a step with what to carry on, and its gradient by the online rule."""

    def value(params: Any, carry: Any) -> tuple[Any, Any]:
        output, carry = pure.step(params, carry, x[None])
        return output[0, 0], carry

    return jax.value_and_grad(value, has_aux=True)(params, carry)


def td_step(pure: eb.Functional, optimizer: Any) -> Callable:
    """One step of TD(λ): the gradient of the value decays in an eligibility trace."""

    def one(state: Any, x: Any) -> tuple[Any, Any]:
        params, opt, carry, before, eligibility = state
        (now, carry), grads = value_and_grad(pure, params, carry, x)
        error = x[STIMULI] + GAMMA * now - before
        moved, opt = optimizer.update(jax.tree.map(lambda e: -error * e, eligibility), opt, params)
        params = optax.apply_updates(params, moved)
        eligibility = jax.tree.map(lambda e, g: GAMMA * LAMBDA * e + g, eligibility, grads)
        return (params, opt, carry, now, eligibility), now

    return one


def first_state(pure: eb.Functional, optimizer: Any) -> tuple:
    """What `td_step` carries, before the first step."""
    params = pure.params
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, optimizer.init(params), pure.init(params), jnp.float32(0), zeros


def run(setting: str, method: Method, seed: int, size: Size) -> Outcome:
    """Learn to predict; the score is the mean squared return error of the last tenth."""
    steps, block = size.steps(TASK.steps[setting], 2_000), size.pick(10_000, 500)
    xs = make_stream(steps, seed)
    wanted = returns_of(xs)
    torch.manual_seed(seed)
    model = Readout(setting.lower(), xs.shape[1], size.pick(20, 8), 1)
    pure = eb.functional(model, torch.zeros(1, xs.shape[1]), rule=method.rule)
    optimizer, curve, clock = optax.adam(RATE), [], Stopwatch()
    state, one = first_state(pure, optimizer), td_step(pure, optimizer)
    program = jax.jit(lambda state, xs: jax.lax.scan(one, state, xs))
    for start in range(0, steps, block):
        state, values = program(state, xs[start : start + block])
        curve.append(float(np.mean((np.asarray(values) - wanted[start : start + block]) ** 2)))
        clock.lap()
    load_weights(model, state[0])
    part = slice(-size.pick(1000, 200), None)
    data = xs[part, None], wanted[part, None, None]
    piece = Piece(model, *data, np.ones(len(data[0]), np.float32), squared_error)
    score = float(np.mean(curve[-max(len(curve) // 10, 1) :]))
    return Outcome(score, np.array(curve), steps, clock.seconds, piece)


TASK = Task(
    key="D",
    title="Trace patterning",
    measure="mean squared return error, last tenth of training",
    curve="squared return error",
    lower_is_better=True,
    steps={"GRU": 1_000_000, "LSTM": 1_000_000},
    unit="steps",
    source="columnar networks; the published curves have no numbers",
    published={},
    setup=(
        "12 inputs (6 stimulus bits, 3 of them on, 10 of 20 patterns valid; the unconditioned "
        "stimulus; 5 distractors with probability 1/(10 i)); intervals 24 to 36 and 80 to 120; γ "
        "= 0.9, TD(λ = 0.99), 1 million steps, 20 units, Adam 1e-3."
    ),
    run=run,
    notes=(
        "One seed. Credit that crosses products matters here: exact RTRL has a quarter of the error "
        "of the best rule with a trace. `low_rank 1` does not recover it and is behind `d_rtrl`; why "
        "was not looked into."
    ),
    without={"tbptt 25": "a gradient of one step at a time", "bptt": "a stream has no end"}
    | NEED_LOSS,
)
