"""Train, save, load in a new process, go on: the same numbers to the last bit as without the stop.

One process trains on a stream and saves half-way. A second process, which shares nothing with it
but the files, loads the checkpoint and trains to the end. The losses, weights and traces are then
compared with those of a process that never stopped.

    python examples/checkpoint_resume.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb

LENGTH = 2_000


class Model(torch.nn.Module):
    """A GRU with dropout, whose random key is saved too, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(3, 16)
        self.drop = torch.nn.Dropout(0.1)
        self.out = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.gru(x)[0]))


def train(first: int, last: int, begin: str | None, end: str) -> list[float]:
    """Trains from one step of the stream to another; from a checkpoint, if there is one."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if begin is None:
        learner = eb.OnlineLearner(model, rule="d_rtrl", loss=mse_loss, optimizer=optimizer)
    else:
        learner = eb.OnlineLearner.load(begin, model, loss=mse_loss, optimizer=optimizer)
    # the same for every process, wherever it begins
    stream = torch.randn(LENGTH, 4, 3, generator=torch.Generator().manual_seed(1))
    # say the input before this one
    losses = [learner.step(stream[n], stream[n - 1]).loss for n in range(first, last)]
    learner.save(end)
    return losses


def train_elsewhere(first: int, last: int, begin: Path | None, end: Path) -> list[float]:
    """The same in a new process."""
    arguments = ["--part", str(first), str(last), str(begin or ""), str(end)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    parser.add_argument(
        "--part", nargs=4, metavar=("FIRST", "LAST", "BEGIN", "END"), help="for the new processes"
    )
    options = parser.parse_args()
    if options.part:
        first, last, begin, end = options.part
        print(json.dumps(train(int(first), int(last), begin or None, end)))
        return
    steps = 40 if options.small else LENGTH
    with tempfile.TemporaryDirectory() as folder:
        whole, half, resumed = (
            Path(folder) / f"{name}.safetensors" for name in ("whole", "half", "resumed")
        )
        expected = train_elsewhere(0, steps, None, whole)
        found = train_elsewhere(0, steps // 2, None, half)
        print(
            f"Saved after {steps // 2} steps: "
            f"{', '.join(sorted(p.name for p in Path(folder).iterdir() if p.name.startswith('half')))}"
        )
        found += train_elsewhere(steps // 2, steps, half, resumed)
        one, two = safetensors.torch.load_file(whole), safetensors.torch.load_file(resumed)
        model = Model()
        model.load_state_dict(two)  # the weights are a plain file for torch
    print(
        f"Losses of all {steps} steps equal: {found == expected}; the last one is {found[-1]:.6f}."
    )
    print(f"Weights equal: {all(torch.equal(one[name], two[name]) for name in one)}.")
    if found != expected:
        raise SystemExit("The resumed training differs.")


if __name__ == "__main__":
    main()
