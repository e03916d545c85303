"""Our column: the public API and nothing else, torch tensors in."""

from __future__ import annotations

from typing import Any

import jax
import torch

from benchmarks.baselines import RATE, Program, executables_memory, sequence_bytes
from benchmarks.workloads import Workload, data, torch_model


def make_ours(workload: Workload, read_loss: bool = False) -> Program | None:
    """Return `OnlineLearner.gradients` or `.step` on the workload; None while the package has no `OnlineLearner`.

    Args:
        workload: What to run.
        read_loss: For a step, read the loss as a float instead of leaving it on the device.
    """
    import etrace_bridge as eb

    if not hasattr(eb, "OnlineLearner"):
        return None
    import optax

    xs, targets = data(workload)
    learner = eb.OnlineLearner(
        eb.wrap(torch_model(workload)),
        rule={"d_rtrl": eb.rules.DRTRL, "pp_prop": eb.rules.PPProp}[workload.rule](credit=workload.credit),
        loss=torch.nn.functional.mse_loss,
        optimizer=optax.sgd(RATE),
        chunk="auto",
    )

    def run() -> Any:
        if workload.mode == "gradients":
            # The result arrives lazily: reading every gradient is what makes the computation part of the measurement.
            return {name: grad.numpy() for name, grad in learner.gradients(xs, targets).grads.items()}
        info = learner.step(xs[0], targets[0])
        return info.loss if read_loss else jax.block_until_ready(info.raw_loss)

    return Program(run, lambda: executables_memory(run, sequence_bytes(workload, outputs=True)))
