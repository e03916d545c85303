"""Trains on one device and on a mesh of four and prints the differences; `test_devices` runs it in a process of its own."""

from __future__ import annotations

import json
import tempfile

import jax
import numpy as np
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from learner_models import make_data, make_net

BATCH = 8


def train(**where) -> tuple[eb.OnlineLearner, dict[str, list]]:
    """Steps, sequences and gradients; everything that came out."""
    model = make_net(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=mse_loss, optimizer=optimizer, chunk=2, **where)
    xs, ys = make_data(batch=BATCH, dtype=torch.float32)
    found: dict[str, list] = {"losses": [], "outputs": []}
    for n in range(20):
        info = learner.step(xs[n % 6], ys[n % 6])
        found["losses"].append(info.loss)
        found["outputs"].append(info.output)
    learner.reset(mask=[True] * 3 + [False] * 5)
    found["losses"] += [learner.update(xs, ys, carry=True).loss, learner.update(xs, ys, every="chunk").loss]
    found["gradients"] = list(learner.gradients(xs, ys).grads.values())
    found["outputs"].append(learner.predict(xs))
    values = learner._runtime.values
    arrays = {"weights": values.theta, "hidden": values.hidden, "trace": jax.tree.leaves(values.trace)}
    found |= {name: [np.array(x) for x in each] for name, each in arrays.items()}  # the next step gives these arrays away
    return learner, found


def apart(one: list, other: list) -> float:
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(one, other, strict=True))


def main() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    _, alone = train()
    learner, together = train(mesh=mesh)
    differences = {name: apart(alone[name], together[name]) for name in alone}
    with tempfile.TemporaryDirectory() as folder:
        model = make_net(torch.float32)
        path, optimizer = learner.save(f"{folder}/model"), torch.optim.Adam(model.parameters(), lr=0.01)
        loaded = eb.OnlineLearner.load(path, model, loss=mse_loss, optimizer=optimizer)  # from four devices onto one
    xs, ys = make_data(batch=BATCH, seed=1, dtype=torch.float32)
    differences["resumed"] = abs(learner.step(xs[0], ys[0]).loss - loaded.step(xs[0], ys[0]).loss)
    start = [np.asarray(p.detach()) for n, p in make_net(torch.float32).named_parameters() if not n.startswith("spare")]
    try:
        eb.OnlineLearner(make_net(torch.float32), loss=mse_loss, mesh=mesh).step(
            *(each[0] for each in make_data(batch=6, dtype=torch.float32))
        )
    except eb.InputError as error:
        message = str(error)
    second = eb.OnlineLearner(make_net(torch.float32), loss=mse_loss, device=jax.devices()[1])
    second.step(xs[0], ys[0]), second.step(xs[1], ys[1])
    values = learner._runtime.values
    report = {
        "devices": len(jax.devices()),
        "moved": apart(start, together["weights"]),
        "differences": differences,
        "batch shards": [shard.data.shape for shard in values.hidden[0].addressable_shards],
        "weight shards": sum(shard.data.shape == values.theta[0].shape for shard in values.theta[0].addressable_shards),
        "second device": sorted({d.id for leaf in second._runtime._leaves for d in leaf.devices()}),
        "error": message,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
