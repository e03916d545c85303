"""What a loop over time inside `forward` costs: its step next to that of `nn.GRU`, and `wrap`.

    python benchmarks/loop_cost.py [--clock cpu]

Targets: the gradients of a GRU written as a loop take at most 1.1 times as long as those of
`nn.GRU`, in either layout, for a sequence in one chunk and in two; and wrapping a loop of about 200
equations a step takes at most 3 s. Times are the least of several, taken turn by turn. On a machine
that others use, `OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/loop_cost.py --clock cpu` still
gives fair numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import torch
from torch import Tensor, nn

import etrace_bridge as eb

STEPS, BATCH, INPUTS, HIDDEN = 100, 32, 64, 256
LAYERS = 9  # of the loop that is wrapped
RATIO, SECONDS = 1.1, 3.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# the loop's parameters, and those of `nn.GRU`
NAMES = {
    "inp.weight": "gru.weight_ih_l0",
    "inp.bias": "gru.bias_ih_l0",
    "rec.weight": "gru.weight_hh_l0",
    "rec.bias": "gru.bias_hh_l0",
}


class Loop(nn.Module):
    """A GRU layer as people write it: gates in a loop over time, the state in a variable."""

    def __init__(self, inputs: int, hidden: int, batch_first: bool) -> None:
        super().__init__()
        self.hidden, self.batch_first = hidden, batch_first
        self.inp, self.rec = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state at every step."""
        time = 1 if self.batch_first else 0
        h, outputs = x.new_zeros(x.shape[1 - time], self.hidden), []
        for t in range(x.shape[time]):
            i_r, i_z, i_n = self.inp(x[:, t] if self.batch_first else x[t]).chunk(3, 1)
            h_r, h_z, h_n = self.rec(h).chunk(3, 1)
            r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
            n = torch.tanh(i_n + r * h_n)
            h = n + z * (h - n)
            outputs.append(h)
        return torch.stack(outputs, time)


class Layer(nn.Module):
    """The same in `nn.GRU`'s own form."""

    def __init__(self, inputs: int, hidden: int, batch_first: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state at every step."""
        return self.gru(x)[0]


def same_models(batch_first: bool) -> tuple[nn.Module, nn.Module]:
    """Make both forms, with the same weights."""
    loop, layer = (kind(INPUTS, HIDDEN, batch_first) for kind in (Loop, Layer))
    weights = loop.state_dict()
    layer.load_state_dict({theirs: weights[mine] for mine, theirs in NAMES.items()})
    return loop, layer


def gradient_seconds(
    batch_first: bool, chunk: int, repeats: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the seconds for the gradients of one sequence: the loop's, and those of `nn.GRU`."""
    shape = (BATCH, STEPS) if batch_first else (STEPS, BATCH)
    x, target = torch.randn(*shape, INPUTS), torch.randn(*shape, HIDDEN)
    learners = [
        eb.OnlineLearner(
            eb.wrap(model, batch_first=batch_first), "d_rtrl", nn.functional.mse_loss, chunk=chunk
        )
        for model in same_models(batch_first)
    ]

    def run(learner: eb.OnlineLearner) -> dict[str, np.ndarray]:
        return {name: g.numpy() for name, g in learner.gradients(x, target).grads.items()}

    loop, layer = map(run, learners)
    for mine, theirs in NAMES.items():
        limit = 1e-4 * np.abs(layer[theirs]).max()
        np.testing.assert_allclose(loop[mine], layer[theirs], rtol=0, atol=limit)
    best = [float("inf")] * 2
    for _ in range(repeats):
        for i, learner in enumerate(learners):
            begin = clock()
            run(learner)
            best[i] = min(best[i], clock() - begin)
    return best[0], best[1]


def wrap_seconds(layers: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Return the equations of one step, and the seconds to wrap it: to find it, compare it with
    torch, trace it.
    """
    model = nn.Sequential(*(Loop(16, 16, batch_first=True) for _ in range(layers)))
    x = torch.randn(4, 16)
    begin = clock()
    net = eb.wrap(model, example_input=x)
    net.init_state(batch_size=4)
    step = net.traced_step(eb.to_jax(x))
    return len(step.jaxpr.jaxpr.eqns), clock() - begin


def main() -> int:
    """Print the rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Cost of a loop over time.")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time")
    clock, missed = CLOCKS[parser.parse_args().clock], False
    for batch_first in (True, False):
        for chunks in (1, 2):
            loop, layer = gradient_seconds(batch_first, STEPS // chunks, 15, clock)
            missed |= loop > RATIO * layer
            print(
                f"gradients, {'batch-first' if batch_first else 'time-major '}, {chunks} chunk"
                f"{'s' if chunks > 1 else ' '}   loop / nn.GRU  {1e3 * loop:6.1f} / "
                f"{1e3 * layer:.1f} ms = {loop / layer:.2f}   (at most {RATIO})",
                flush=True,
            )
    wrap_seconds(1, clock)
    equations, seconds = min(wrap_seconds(LAYERS, clock) for _ in range(2))
    missed |= seconds > SECONDS
    print(f"wrap a loop of {equations} equations a step  {seconds:.2f} s   (at most {SECONDS:.0f})")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
