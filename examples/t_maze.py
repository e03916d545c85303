"""Reinforcement learning on a stream: an actor-critic finds its way through a T-maze by a cue that
it saw only at the start.

The agent sees a cue in the first cell, walks down a corridor of equal cells and must turn to the
cue's side at the junction. The policy is a GRU, trained one step at a time through `OnlineModule`:
the loss of a step comes when its return is known, `HORIZON` steps later or at the end of the
episode, and uses the λ-weighted TD errors in between. Nothing is ever replayed or unrolled. The
same loop with `rule="bptt"` is truncated BPTT over one step: it gives no credit to what was seen
before, and stays at the chance of one in two. In the shorter corridor it can find the way after
all, in 12,000 steps, by reading what an untrained GRU happens to remember; two seeds of three do.

    python examples/t_maze.py --corridors 10 --steps 4000    # three seeds; writes t_maze.png
    python examples/t_maze.py --corridors 20                 # the same for 12,000 steps
    python examples/t_maze.py                                # corridors of 10 and 20, 12,000 steps
    python examples/t_maze.py --small
"""

from __future__ import annotations

import argparse
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

import etrace_bridge as eb

FORWARD, UP, DOWN = range(3)
GAMMA, LAMBDA, HORIZON, ENTROPY = 0.98, 0.9, 12, 0.01


class TMaze:
    """Several mazes side by side: the cue, a corridor, the junction."""

    def __init__(self, corridor: int, batch: int, generator: torch.Generator) -> None:
        self.corridor, self.generator = corridor, generator
        self.place = torch.zeros(batch, dtype=torch.long)
        self.age = torch.zeros(batch, dtype=torch.long)
        self.cue = self._draw(batch)

    def _draw(self, batch: int) -> Tensor:
        return torch.randint(UP, DOWN + 1, (batch,), generator=self.generator)

    def observe(self) -> Tensor:
        """(batch, 4): the cue's side in the first cell; whether this is a corridor cell; whether it
        is the junction.
        """
        start = self.place == 0
        flags = [
            start & (self.cue == UP),
            start & (self.cue == DOWN),
            ~start & (self.place < self.corridor),
            self.place == self.corridor,
        ]
        return torch.stack(flags, 1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards, which episodes have ended, and which of them at the right side; those start
        anew.
        """
        turned = (self.place == self.corridor) & (action != FORWARD)
        right = turned & (action == self.cue)
        self.place += ((self.place < self.corridor) & (action == FORWARD)).long()
        self.age += 1
        reward = torch.where(turned, torch.where(right, 1.0, -1.0), torch.tensor(-0.01))
        done = turned | (self.age >= 6 * self.corridor)
        self.place[done], self.age[done] = 0, 0
        self.cue = torch.where(done, self._draw(len(self.cue)), self.cue)
        return reward, done, right


class ActorCritic(nn.Module):
    """A GRU whose readout is three action preferences and a value."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(4, hidden)
        self.out = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0])


class Moment(NamedTuple):
    """A step that waits for its return; `output` has a graph, so its trace is kept until the loss
    comes.
    """

    output: Tensor
    action: Tensor
    reward: Tensor
    going_on: Tensor  # 0 where the episode ended with this step


def delayed_loss(moments: deque[Moment], last_value: Tensor) -> Tensor:
    """The loss of the oldest step: policy gradient and value error by its λ-weighted TD errors."""
    values = [m.output[:, 3].detach() for m in moments] + [last_value]
    advantage, weight = torch.zeros_like(last_value), torch.ones_like(last_value)
    for n, m in enumerate(moments):
        advantage += weight * (m.reward + GAMMA * m.going_on * values[n + 1] - values[n])
        weight = weight * GAMMA * LAMBDA * m.going_on
    oldest = moments[0]
    log_policy = oldest.output[:, :3].log_softmax(1)
    chosen = log_policy.gather(1, oldest.action[:, None])[:, 0]
    entropy = -(log_policy.exp() * log_policy).sum(1)
    error = oldest.output[:, 3] - (values[0] + advantage)
    return (-chosen * advantage + 0.5 * error**2 - ENTROPY * entropy).mean()


def run(
    corridor: int,
    rule: str,
    seed: int,
    steps: int,
    batch: int = 32,
    hidden: int = 24,
    every: int = 250,
) -> list[float]:
    """Trains on a stream; the share of right turns among the episodes that ended in each `every`
    steps.
    """
    torch.manual_seed(seed)
    model = ActorCritic(hidden)
    online = eb.OnlineModule(model, rule=rule)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    maze = TMaze(corridor, batch, torch.Generator().manual_seed(seed))
    waiting: deque[Moment] = deque()
    curve, ended, right = [], 0, 0
    for n in range(1, steps + 1):
        output = online(maze.observe())
        if len(waiting) == HORIZON:
            optimizer.zero_grad()
            delayed_loss(waiting, output[:, 3].detach()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            waiting.popleft()
        action = torch.multinomial(output[:, :3].detach().softmax(1), 1)[:, 0]
        reward, done, good = maze.step(action)
        waiting.append(Moment(output, action, reward, (~done).float()))
        if done.any():
            online.reset(done)
        ended, right = ended + int(done.sum()), right + int(good.sum())
        if n % every == 0:
            curve.append(right / max(ended, 1))
            ended = right = 0
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    parser.add_argument("--steps", type=int, default=12_000, help="steps of each of the 32 mazes")
    parser.add_argument(
        "--corridors", type=int, nargs="+", default=[10, 20], help="numbers of cells (10 20)"
    )
    options = parser.parse_args()
    corridors, seeds, steps = (
        ([3], (0,), 500) if options.small else (options.corridors, (0, 1, 2), options.steps)
    )
    curves: dict[tuple[int, str], list[list[float]]] = {}
    for corridor in corridors:
        for rule, name in (("d_rtrl", "D-RTRL"), ("bptt", "TBPTT(1)")):
            found = curves[corridor, name] = []
            for seed in seeds:
                found.append(run(corridor, rule, seed, steps))
                print(
                    f"corridor {corridor:>2}, {name:<8}, seed {seed}: "
                    f"{found[-1][-1]:.0%} right turns at the end",
                    flush=True,
                )
    if not options.small:
        draw(curves, steps)


def draw(curves: dict[tuple[int, str], list[list[float]]], steps: int) -> None:
    """Writes the curves as `t_maze.png`."""
    import matplotlib.pyplot as plt

    corridors = sorted({c for c, _ in curves})
    figure, grid = plt.subplots(
        1, len(corridors), figsize=(4.5 * len(corridors), 3.2), sharey=True, squeeze=False
    )
    axes = grid[0]
    for axis, corridor in zip(axes, corridors, strict=True):
        for colour, name in (("C0", "D-RTRL"), ("C1", "TBPTT(1)")):
            for n, curve in enumerate(curves[corridor, name]):
                at = [(k + 1) * steps / len(curve) for k in range(len(curve))]
                axis.plot(at, curve, colour, alpha=0.8, label=name if n == 0 else None)
        axis.set(title=f"T-maze, corridor of {corridor}", xlabel="steps", ylim=(0, 1.02))
        axis.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel("right turns")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig("t_maze.png", dpi=120)


if __name__ == "__main__":
    main()
