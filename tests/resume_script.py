"""Trains from one step to another and prints the losses; `test_checkpoint` runs it in processes of
their own.

python resume_script.py FIRST LAST CHECKPOINT-OR-"-" SAVE-AS
"""

from __future__ import annotations

import json
import sys

import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from learner_models import make_data, make_net


def main(first: int, last: int, begin: str, end: str) -> None:
    model = make_net(torch.float32, dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if begin == "-":
        learner = eb.OnlineLearner(model, rule="d_rtrl", loss=mse_loss, optimizer=optimizer, seed=7)
    else:
        learner = eb.OnlineLearner.load(begin, model, loss=mse_loss, optimizer=optimizer)
    xs, ys = make_data(steps=200, dtype=torch.float32)
    losses = [learner.step(xs[n], ys[n]).loss for n in range(first, last)]
    learner.save(end)
    print(json.dumps(losses))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
