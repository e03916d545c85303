"""Trains on one device and on a mesh of four and prints the differences; `test_devices` runs it in
a process of its own.
"""

from __future__ import annotations

import json
import math
import re
import tempfile

import jax
import numpy as np
import optax
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge.schedule.chunk_plan import divide
from learner_models import make_data, make_net
from share import FULL

BATCH, UNITS = 8, 16
MORE = ["rflo", "otpe", "decolle"] if FULL else []  # their traces are those of `eprop` and `d_rtrl`
RULES = ["d_rtrl", "rtrl", "ostl", "snap_n", "snap1", "eprop", "pp_prop", *MORE]


def train(**where) -> tuple[eb.OnlineLearner, dict[str, list]]:
    """Steps, sequences and gradients; everything that came out."""
    model = make_net(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    learner = eb.OnlineLearner(
        model, rule="d_rtrl", loss=mse_loss, optimizer=optimizer, chunk=2, **where
    )
    xs, ys = make_data(batch=BATCH, dtype=torch.float32)
    found: dict[str, list] = {"losses": [], "outputs": []}
    for n in range(20):
        info = learner.step(xs[n % 6], ys[n % 6])
        found["losses"].append(info.loss)
        found["outputs"].append(info.output)
    learner.reset(mask=[True] * 3 + [False] * 5)
    found["losses"] += [
        learner.update(xs, ys, carry=True).loss,
        learner.update(xs, ys, every="chunk").loss,
    ]
    found["gradients"] = list(learner.gradients(xs, ys).grads.values())
    found["outputs"].append(learner.predict(xs))
    values = learner.runtime.store.state
    arrays = {
        "weights": values.theta,
        "hidden": values.hidden,
        "trace": jax.tree.leaves(values.trace),
    }
    # the next step gives these arrays away
    found |= {name: [np.array(x) for x in each] for name, each in arrays.items()}
    return learner, found


def apart(one: list, other: list) -> float:
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(one, other, strict=True)
    )


class Gated(torch.nn.Module):
    """A GRU whose units can be divided, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = torch.nn.GRU(2, UNITS), torch.nn.Linear(UNITS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(x)[0])


def divided(rule: str) -> dict:
    """Steps with units divided over two devices and the batch over two, and on one device."""
    xs, ys = make_data(batch=BATCH, dtype=torch.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "units"))
    states, losses = [], []
    for where in ({}, {"mesh": mesh, "partition": "units"}):
        torch.manual_seed(0)
        learner = eb.OnlineLearner(
            Gated(), rule=rule, loss=mse_loss, optimizer=optax.adam(0.01), **where
        )
        losses.append([learner.step(xs[n % 6], ys[n % 6]).loss for n in range(10)])
        states.append(learner.runtime.store.state)
    pairs = zip(
        *(jax.tree.leaves((state.theta, state.hidden, state.trace)) for state in states),
        strict=True,
    )
    return {
        "apart": max(
            apart(*losses), *(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
        ),
        "shards": [
            x.addressable_shards[0].data.size / x.size
            for x in jax.tree.leaves(states[1].trace)
            if x.ndim > 1
        ],
        "weights": [
            x.addressable_shards[0].data.size / x.size
            for x in states[1].theta
            if x.size >= UNITS * UNITS
        ],
        "collectives": collectives(learner, "step", xs[0], ys[0])
        + (chunk_collectives(learner, xs, ys) if rule != "pp_prop" else []),
        "largest trace": max(
            (x.addressable_shards[0].data.size for x in jax.tree.leaves(states[1].trace)), default=0
        ),
    }


def low_rank() -> dict:
    """Steps of `low_rank` on two by two devices and on one, and what a step moves."""
    xs, _ = make_data(batch=BATCH, dtype=torch.float32)
    ys = torch.zeros(*xs.shape[:2], UNITS)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "units"))
    weights = []
    for where in ({}, {"mesh": mesh, "partition": "units"}):
        torch.manual_seed(0)
        rule, optimizer = eb.rules.LowRankRTRL(rank=3), optax.sgd(0.1)
        learner = eb.OnlineLearner(torch.nn.RNN(2, UNITS), rule, mse_loss, optimizer, **where)
        for n in range(6):
            learner.step(xs[n], ys[n])
        weights.append([np.array(w) for w in learner.runtime.store.state.theta])
    return {
        "apart": apart(*weights),
        "collectives": collectives(learner, "step", xs[0], ys[0]),
        "factor": learner.runtime.store.state.trace["families"][0]["A"].size // mesh.size,
    }


def chunk_collectives(
    learner: eb.OnlineLearner, xs: torch.Tensor, ys: torch.Tensor
) -> list[tuple[str, int]]:
    """Those of two chunks of two steps that continue the stream."""
    learner.runtime.programs.update(learner_loss(learner), divide(4, 2), True, False)
    return collectives(learner, "update", xs[:4], ys[:4])


def learner_loss(learner: eb.OnlineLearner):
    """The loss that the learner's step was compiled with."""
    return next(key[0][1] for key in learner.runtime.store.compiled.programs if key[0][0] == "step")


def collectives(
    learner: eb.OnlineLearner, name: str, x: torch.Tensor, y: torch.Tensor
) -> list[tuple[str, int]]:
    """The collectives of one of a learner's programs, one for each array that they give a device,
    with its elements.
    """
    store = learner.runtime.store
    call = next(p for key, p in store.compiled.programs.items() if key[0][0] == name)
    axis = 0 if name == "step" else 1
    arrays = store.placement.put_batch(([np.asarray(x)], np.asarray(y)), axis, BATCH)
    more = () if name == "step" else (None,)
    text = call.lower(store.arrays(), *more, *arrays, *more).compile().as_text()
    found = []
    for shapes, name in re.findall(
        r"= (.*?) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text
    ):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):  # several arrays may move together
            found.append((name, math.prod(int(n) for n in dims.split(",") if n)))
    return found


def main() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    _, alone = train()
    learner, together = train(mesh=mesh)
    differences = {name: apart(alone[name], together[name]) for name in alone}
    with tempfile.TemporaryDirectory() as folder:
        model = make_net(torch.float32)
        path = learner.save(f"{folder}/model")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        # from four devices onto one
        loaded = eb.OnlineLearner.load(path, model, loss=mse_loss, optimizer=optimizer)
    xs, ys = make_data(batch=BATCH, seed=1, dtype=torch.float32)
    differences["resumed"] = abs(learner.step(xs[0], ys[0]).loss - loaded.step(xs[0], ys[0]).loss)
    start = [
        np.asarray(p.detach())
        for n, p in make_net(torch.float32).named_parameters()
        if not n.startswith("spare")
    ]
    try:
        eb.OnlineLearner(make_net(torch.float32), loss=mse_loss, mesh=mesh).step(
            *(each[0] for each in make_data(batch=6, dtype=torch.float32))
        )
    except eb.InputError as error:
        message = str(error)
    second = eb.OnlineLearner(
        make_net(torch.float32), loss=mse_loss, optimizer=optax.sgd(0.01), device=jax.devices()[1]
    )
    second.step(xs[0], ys[0]), second.step(xs[1], ys[1])
    values = learner.runtime.store.state
    report = {
        "devices": len(jax.devices()),
        "moved": apart(start, together["weights"]),
        "differences": differences,
        "batch shards": [shard.data.shape for shard in values.hidden[0].addressable_shards],
        "weight shards": sum(
            shard.data.shape == values.theta[0].shape
            for shard in values.theta[0].addressable_shards
        ),
        "second device": sorted(
            {d.id for leaf in second.runtime.store.arrays() for d in leaf.devices()}
        ),
        "error": message,
        "batch only": collectives(learner, "step", xs[0], ys[0]),
        "divided": {rule: divided(rule) for rule in RULES},
        "low rank": low_rank(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
