"""How costs grow: work of each of two devices, size of the program with layers, cold and warm
start.

    python -m benchmarks.scaling [layers ...]
    python -m benchmarks.scaling --lengths [lengths ...]

Work is counted by XLA, not timed: FLOPs of the compiled online step on a device. The efficiency is
what one device has to do alone over twice what each of two has to do. The start is the first online
step and the first sequence, in a process that finds its `cache_dir` empty and in one that finds it
filled. The first step of models of 1 to 50 layers is measured in CPU time, less than a minute in all.
`--lengths` prints the CPU time of sequences of several lengths, with a program for each of them and
with `any_length=True`, in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from benchmarks.step_size import measure

SIZES = {"d_rtrl": 64, "pp_prop": 64}  # hidden units for each rule
BATCH = 32


def make_learner(units: int, rule: str, **options: Any) -> eb.OnlineLearner:
    """A GRU with as many inputs as units."""
    torch.manual_seed(0)
    model = torch.nn.GRU(units, units)
    return eb.OnlineLearner(model, rule, loss=mse_loss, optimizer=optax.sgd(1e-3), **options)


def count_flops(rule: str, **where: Any) -> float:
    """FLOPs of an online step on one device."""
    units = SIZES[rule]
    learner, x = make_learner(units, rule, **where), torch.ones(BATCH, units)
    learner.step(x, x)
    store = learner.runtime.store
    call = next(p for key, p in store.compiled.programs.items() if key[0][0] == "step")
    arrays = store.placement.put_batch(([x.numpy()], x.numpy()), 0, BATCH)
    found = call.lower(store.arrays(), *arrays).compile().cost_analysis()
    return float((found[0] if isinstance(found, list) else found)["flops"])


def count_all() -> dict[str, list[float]]:
    """By rule: FLOPs alone, with the batch divided over two devices, with the units divided."""
    devices = np.array(jax.devices()[:2])
    batch = {"mesh": jax.sharding.Mesh(devices, ("batch",))}
    mesh = jax.sharding.Mesh(devices.reshape(1, 2), ("batch", "units"))
    places = {}, batch, {"mesh": mesh, "partition": "units"}
    return {rule: [count_flops(rule, **where) for where in places] for rule in SIZES}


def time_start(folder: str) -> list[float]:
    """Seconds of the first online step and of the first sequence."""
    learner = make_learner(64, "d_rtrl", cache_dir=folder, chunk=50)
    xs, seconds = torch.ones(100, BATCH, 64), []
    for call in (lambda: learner.step(xs[0], xs[0]).loss, lambda: learner.update(xs, xs).loss):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds


def run_apart(*args: str, devices: int = 1) -> Any:
    """What this script prints in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.scaling", *args]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def print_efficiency() -> None:
    print(
        f"{'rule':<8}  {'units':>5}  {'MFLOP alone':>11}  {'batch divided':>13}  {'units divided':>13}"
    )
    for rule, (alone, *divided) in run_apart("--count", devices=2).items():
        shares = "  ".join(f"{alone / (2 * each):>13.2f}" for each in divided)
        print(f"{rule:<8}  {SIZES[rule]:>5}  {alone / 1e6:>11.1f}  {shares}")


def print_layers(counts: list[int]) -> None:
    measure(1)  # imports and first-call costs of JAX itself
    print(
        f"{'layers':>6}  {'lines of HLO':>12}  {'per layer':>9}  {'CPU time, s':>11}  {'per layer':>9}"
    )
    for layers in counts:
        lines, seconds = measure(layers)
        row = f"{layers:>6}  {lines:>12,}  {lines / layers:>9,.0f}  {seconds:>11.1f}"
        row += f"  {seconds / layers:>9.2f}"
        print(row, flush=True)


def print_start() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'start':<5}  {'first step, s':>13}  {'first sequence, s':>17}")
        for name in ("cold", "warm"):
            step, sequence = run_apart("--start", folder)
            print(f"{name:<5}  {step:>13.2f}  {sequence:>17.2f}")


def time_lengths(lengths: list[int], repeats: int = 5) -> None:
    """Prints CPU seconds of the first gradients of each length, and CPU milliseconds of later ones."""
    learners = [make_learner(64, "d_rtrl"), make_learner(64, "d_rtrl", chunk=64, any_length=True)]
    print(f"{'length':>6}  {'first, s':>8}  {'later, ms':>9}  {'any, s':>6}  {'any, ms':>8}")
    for length in lengths:
        xs = torch.ones(length, BATCH, 64)
        times = [[cpu_seconds(learner, xs) for learner in learners] for _ in range(repeats + 1)]
        first, later = times[0], [min(each) for each in zip(*times[1:], strict=True)]
        row = f"{length:>6}  {first[0]:>8.2f}  {1e3 * later[0]:>9.1f}"
        print(f"{row}  {first[1]:>6.2f}  {1e3 * later[1]:>8.1f}", flush=True)


def cpu_seconds(learner: eb.OnlineLearner, xs: torch.Tensor) -> float:
    begun = time.process_time()
    jax.block_until_ready(list(learner.gradients(xs, xs).raw_grads.values()))
    return time.process_time() - begun


def main(args: list[str]) -> int:
    if args[:1] == ["--lengths"]:
        time_lengths([int(n) for n in args[1:]] or [100, 128, 500, 1000, 10000])
    elif args[:1] == ["--count"]:
        print(json.dumps(count_all()))
    elif args[:1] == ["--start"]:
        print(json.dumps(time_start(args[1])))
    else:
        print_efficiency(), print()
        print_start(), print()
        print_layers([int(n) for n in args] or [1, 5, 10, 20, 50])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
