"""One of several processes that train together over loopback; `test_processes` starts them and
compares.

Usage: process_script.py INDEX COUNT PORT FOLDER [LOAD]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import brainstate
import jax
import numpy as np
import optax
import torch
from torch.nn.functional import mse_loss

from share import FULL

BATCH, STEPS, LENGTH = 8, 50, 6
KINDS = ("float32", "float64")
FACTORED = ("low_rank", "ok_rtrl")  # whose traces are singular vectors


def cases(count: int) -> list[tuple[str, str]]:
    """The rules, and the dtypes of each, that so many processes run: every rule in both groups, in
    another dtype in each, since compiling takes seconds; in both with `make test-full`.
    """
    from etrace_bridge.rules import rule_names

    found = [(rule, kind) for rule in rule_names() for kind in KINDS]
    turns = [n // 2 + n + (count == 2) for n in range(len(found))]
    return [case for case, turn in zip(found, turns, strict=True) if FULL or turn % 2 == 0]


def run_case(rule: str, kind: str, part: slice = slice(None), **where: Any) -> dict[str, list]:
    """Steps with a rule in a dtype, and the learner's arrays after them."""
    dtype = getattr(torch, kind)
    with brainstate.environ.context(precision=64 if kind == "float64" else 32):
        learner = make_learner(rule, dtype, **where)
        return run_steps(learner, *data(dtype, part), STEPS) | whole_state(learner)


def make_learner(rule: str, dtype: torch.dtype, hidden: int = 3, **where: Any):
    import etrace_bridge as eb
    from learner_models import make_net

    model = make_net(dtype, hidden=hidden)
    return eb.OnlineLearner(
        model, rule=rule, loss=mse_loss, optimizer=optax.adam(0.01), chunk=2, **where
    )


def data(dtype: torch.dtype, part: slice = slice(None)):
    """Inputs and targets of a sequence, or a process's part of them."""
    from learner_models import make_data

    xs, ys = make_data(steps=LENGTH, batch=BATCH, dtype=dtype)
    return xs[:, part], ys[:, part]


def run_steps(learner: Any, xs: torch.Tensor, ys: torch.Tensor, steps: int) -> dict[str, list]:
    """Online steps: losses and outputs."""
    infos = [learner.step(xs[n % LENGTH], ys[n % LENGTH]) for n in range(steps)]
    return {"losses": [info.loss for info in infos], "outputs": [infos[-1].output]}


def whole_state(learner: Any) -> dict[str, list]:
    """Weights, states and trace, gathered from all processes, and what the trace stands for."""
    state = learner.runtime.store.state
    parts = {"weights": state.theta, "hidden": state.hidden, "trace": jax.tree.leaves(state.trace)}
    found = {name: [np.array(gather(x)) for x in arrays] for name, arrays in parts.items()}
    return found | {"influence": influence(learner, found)}


def influence(learner: Any, found: dict[str, list]) -> list[Any]:
    """The gradient through the past, for a random cotangent of the states, under rules whose traces
    are factors: those turn by more than rounding errors where singular values are close, and their
    products do not.
    """
    rule, program = learner.rule, learner.runtime.store.compiled.program
    if rule.name not in FACTORED:
        return []
    draw = np.random.default_rng(0)
    h0 = [0.1 * draw.standard_normal(h.shape).astype(h.dtype) for h in found["hidden"]]
    trace = jax.tree.unflatten(
        jax.tree.structure(learner.runtime.store.state.trace), found["trace"]
    )
    past = jax.jit(lambda *given: list(rule.past(program, *given).values()))
    return [np.asarray(x) for x in past(found["weights"], trace, h0)]


def gather(x: jax.Array) -> Any:
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    return jax.jit(
        lambda x: x,
        out_shardings=jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec()),
    )(x)


def all_calls(learner: Any, xs: torch.Tensor, ys: torch.Tensor, rows: slice) -> dict[str, list]:
    """What else a learner can do; sequences, masks, a loader."""
    found: dict[str, list] = {}
    gone = (torch.arange(BATCH) % 3 == 0)[rows]
    learner.reset(gone)
    found["after reset"] = [learner.step(xs[0], ys[0]).loss]
    found["update"] = [
        learner.update(xs, ys).loss,
        learner.update(xs, ys, carry=True, every="chunk").loss,
    ]
    few = torch.arange(xs.shape[1]) % (BATCH // 2) < 2  # two of each process
    found["other batch"] = [learner.update(xs[:, few], ys[:, few]).loss]
    result = learner.gradients(xs, ys)
    found["gradients"] = [*result.grads.values()]
    found["sequence outputs"] = [result.outputs, learner.predict(xs)]
    found["evaluate"] = [learner.evaluate([(xs, ys)])]
    loader = [(xs, ys), (ys.flip(0) + xs, ys)]
    history = learner.fit(
        loader, epochs=2, validation=loader, metrics={"size": lambda o, t: (o - t).abs().mean()}
    )
    found["fit"] = [
        *history["loss"],
        *history["validation_loss"],
        *history["size"],
        *history["validation_size"],
    ]
    learner.sync_to_torch()
    found["synced"] = [t.clone() for t in learner.runtime.net.model.state_dict().values()]
    return found


def divided_units(part: slice = slice(None), **where: Any) -> tuple[Any, dict[str, list]]:
    """Steps and a sequence of a model whose 4 units can be divided; weights back in torch."""
    learner, (xs, ys) = make_learner("d_rtrl", torch.float64, 4, **where), data(torch.float64, part)
    found = run_steps(learner, xs, ys, 5)
    found["losses"].append(learner.update(xs, ys).loss)
    learner.sync_to_torch()
    found["synced"] = [t.clone() for t in learner.runtime.net.model.state_dict().values()]
    return learner, found | whole_state(learner)


def save(path: Path, found: dict[str, list]) -> None:
    np.savez(
        path,
        **{f"{name}/{n}": np.asarray(x) for name, xs in found.items() for n, x in enumerate(xs)},
    )


def main() -> None:
    index, count, port, folder, *load = sys.argv[1:]
    index, count, folder = int(index), int(count), Path(folder)
    import etrace_bridge as eb

    mesh = eb.distributed_mesh(f"127.0.0.1:{port}", count, index, heartbeat_seconds=20)
    each = BATCH // count
    rows = slice(index * each, (index + 1) * each)
    for rule, kind in cases(count):
        save(folder / f"{rule}-{kind}-{index}.npz", run_case(rule, kind, rows, mesh=mesh))
    brainstate.environ.set(precision=64 if load else 32)
    learner = checkpoints(eb, mesh, index, rows, folder, load)
    if load:
        learner = make_learner("d_rtrl", torch.float64, mesh=mesh)
        (xs, ys) = data(torch.float64, rows)
        run_steps(learner, xs, ys, 3)
        save(folder / f"calls-{index}.npz", all_calls(learner, xs, ys, rows))
        messages(eb, mesh, learner, xs, ys, index, folder)
        meshes = mesh.devices.reshape(2, 2), mesh.devices.reshape(2, 2).T
        for name, devices, part in zip(
            ("within", "across"), meshes, (rows, slice(None)), strict=True
        ):
            grid = jax.sharding.Mesh(devices, ("batch", "units"))
            learner, found = divided_units(part, mesh=grid, partition="units")
            save(folder / f"{name}-{index}.npz", found)
            learner.save(folder / f"checkpoint-{name}")
    elif index == count - 1:  # the last process dies while the others go on
        os.kill(os.getpid(), 9)
    else:
        xs, ys = data(torch.float32, rows)
        while True:
            learner.step(xs[0], ys[0])


def messages(eb: Any, mesh: Any, learner: Any, xs: Any, ys: Any, index: int, folder: Path) -> None:
    """Errors that every process gets, and global arrays in place of parts."""
    lines = []
    whole = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "batch")), xs.numpy()
    )
    lines.append(str(float(abs(learner.evaluate([(whole, ys)]) - learner.evaluate([(xs, ys)])))))
    for bad in (xs[:, :0] if index else xs, torch.cat([xs, xs], 1) if index else xs):
        try:
            learner.predict(bad)
        except eb.InputError as error:
            lines.append(str(error))
    lines += labels(eb, mesh, index)
    lines.append(
        str(eb.check_gradients(learner.runtime.net.model, xs, ys, mse_loss, rule="rtrl").ok)
    )
    (folder / f"messages-{index}.txt").write_text("\n".join(lines))


class Tagger(torch.nn.Module):
    """Labels for a sequence of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = torch.nn.Embedding(5, 2), torch.nn.RNN(2, 3, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.words(words))[0]


def labels(eb: Any, mesh: Any, index: int) -> list[str]:
    """The difference between whole arrays of integers and each process's part of them, and the
    error for a word that does not exist, which the last process has.
    """
    learner = eb.OnlineLearner(Tagger(), loss=torch.nn.functional.cross_entropy, mesh=mesh)
    words, tags = (torch.arange(n, n + 12).reshape(4, 3) % 3 for n in (0, 7))
    batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    whole = lambda x: jax.make_array_from_process_local_data(batch, x.numpy())
    losses = [learner.evaluate([each]) for each in ((words, tags), (whole(words), whole(tags)))]
    lines = [str(abs(losses[0] - losses[1]))]
    try:
        learner.evaluate([(whole(words + 4 * index), whole(tags))])
    except eb.InputError as error:
        lines.append(str(error))
    return lines


def checkpoints(eb: Any, mesh: Any, index: int, rows: slice, folder: Path, load: list[str]) -> Any:
    """Steps, saved; or a checkpoint of another number of processes, and steps after it."""
    from learner_models import make_net

    xs, ys = data(torch.float32, rows)
    if load:
        options = {"loss": mse_loss, "optimizer": optax.adam(0.01), "mesh": mesh}
        learner = eb.OnlineLearner.load(load[0], make_net(torch.float32), **options)
        save(folder / f"loaded-{index}.npz", whole_state(learner))
    else:
        learner = make_learner("d_rtrl", torch.float32, mesh=mesh)
    run_steps(learner, xs, ys, 4)
    learner.save(folder / "checkpoint")
    save(folder / f"saved-{index}.npz", whole_state(learner))
    if load:
        again = eb.OnlineLearner.load(folder / "checkpoint", make_net(torch.float32), **options)
        for name, each in (("on", learner), ("again", again)):
            save(folder / f"{name}-{index}.npz", run_steps(each, xs, ys, 4) | whole_state(each))
    return learner


if __name__ == "__main__":
    main()
