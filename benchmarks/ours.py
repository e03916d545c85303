"""Our column: the public API and nothing else, torch tensors in."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch

from benchmarks.baselines import DECAY, RATE, Program, executables_memory, sequence_bytes
from benchmarks.workloads import Workload, data, torch_model


def make_ours(
    workload: Workload, read_loss: bool = False, jax_arrays: bool = False
) -> Program | None:
    """Return `OnlineLearner.gradients` or `.step` on the workload; None while the package has no
    `OnlineLearner`.

    Args:
        workload: What to run.
        read_loss: For a step, read the loss as a float instead of leaving it on the device.
        jax_arrays: For a step, give JAX arrays instead of torch tensors.
    """
    import etrace_bridge as eb

    if not hasattr(eb, "OnlineLearner"):
        return None
    import optax

    xs, targets = data(workload)
    rule = (
        eb.rules.PPProp(DECAY, credit=workload.credit)
        if workload.rule == "pp_prop"
        else eb.rules.DRTRL(workload.credit)
    )
    learner = eb.OnlineLearner(
        eb.wrap(torch_model(workload)),
        rule=rule,
        loss=torch.nn.functional.mse_loss,
        optimizer=optax.sgd(RATE),
        chunk="auto",
    )

    x, target = (jax.numpy.asarray(a[0].numpy()) if jax_arrays else a[0] for a in (xs, targets))

    def run() -> Any:
        if workload.mode == "gradients":
            # The result arrives lazily: reading every gradient is what makes the computation part
            # of the measurement.
            return {
                name: grad.numpy() for name, grad in learner.gradients(xs, targets).grads.items()
            }
        info = learner.step(x, target)
        return info.loss if read_loss else jax.block_until_ready(info.raw_loss)

    return Program(run, lambda: executables_memory(run, sequence_bytes(workload, outputs=True)))


def make_online_module(workload: Workload) -> Program | None:
    """Return one step of `OnlineModule` with torch's `backward` and SGD, as torch BPTT's column
    runs them; for steps only.
    """
    import etrace_bridge as eb

    if workload.mode != "step":
        return None
    model, (xs, targets) = torch_model(workload), data(workload)
    rule = (
        eb.rules.PPProp(DECAY, credit=workload.credit)
        if workload.rule == "pp_prop"
        else eb.rules.DRTRL(workload.credit)
    )
    online, optimizer = eb.OnlineModule(model, rule=rule), torch.optim.SGD(model.parameters(), RATE)

    def run() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(online(xs[0]), targets[0]).backward()
        optimizer.step()

    return Program(run, lambda: executables_memory(run, sequence_bytes(workload, outputs=True)))


# One step, in other ways than leaving the loss on the device and giving torch tensors.
STEP_VARIANTS = {
    "ours, loss read": functools.partial(make_ours, read_loss=True),
    "ours, JAX arrays": functools.partial(make_ours, jax_arrays=True),
    "OnlineModule": make_online_module,
}
