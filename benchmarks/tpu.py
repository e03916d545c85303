"""Compiles every rule's programs for a TPU, without having one.

    pip install libtpu        # XLA's compiler for TPUs; it needs no TPU
    python -m benchmarks.tpu [--rule NAME] [--gru] [--topology v5e:2x2]

Two programs for each rule, the online step with its update and the gradients of a sequence in
chunks, of a small model with a convolution, spiking neurons, an LSTM and a GRU; or, with `--gru`,
of the GRU of `benchmarks.roofline`. What is printed are the counts of the TPU's own compiler.
Nothing is run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# The compiler would otherwise ask the network which TPU this machine has.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import snntorch
from jax.experimental import topologies
from torch import Tensor, nn

import etrace_bridge as eb
from benchmarks.programs import Programs
from benchmarks.roofline import compiled_gru
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.rules import make_rule, rule_names

MISSING = (
    "There is no TPU compiler here. Install it with `pip install libtpu`; it needs no TPU, but "
    "Linux on x86."
)
STEPS, CHUNK = 7, 2


class Everything(nn.Module):
    """A convolution, spiking neurons, an LSTM and a GRU: one trace for all of them.

    Args:
        size: height and width of the input.
        channels: of the convolution.
        hidden: units of the LSTM.
        outputs: units of the GRU.
    """

    def __init__(self, size: int = 3, channels: int = 2, hidden: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.size = size
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.lif = snntorch.Leaky(beta=0.8, learn_beta=True, init_hidden=True)
        self.lstm = nn.LSTMCell(channels * size * size, hidden)
        self.gru = nn.GRUCell(hidden, outputs)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        memory, h = (None, None) if state is None else state
        spikes = self.lif(self.conv(x.reshape(-1, 1, self.size, self.size)))
        memory = self.lstm(spikes.flatten(1), memory)
        h = self.gru(memory[0], h)
        return h, (memory, h)


def count(function: Callable, shapes: tuple, donated: int, device: Any) -> list[float]:
    """FLOPs, bytes moved, bytes of all buffers, and CPU seconds to compile."""
    begun = time.process_time()
    place = jax.sharding.SingleDeviceSharding(device)
    call = jax.jit(function, in_shardings=place, out_shardings=place, donate_argnums=donated)
    program = call.lower(*shapes).compile()
    found, memory = program.cost_analysis(), program.memory_analysis()
    seconds = time.process_time() - begun
    buffers = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    return [found["flops"], found["bytes accessed"], buffers, seconds]


def main(arguments: list[str]) -> int:
    """Print a line for each program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rule", action="append", help="only these rules")
    parser.add_argument("--topology", default="v5e:2x2", help="as JAX names it (default v5e:2x2)")
    parser.add_argument("--gru", action="store_true", help="1,024 units, 256 inputs, batch 256")
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("libtpu") is None:
        print(MISSING, file=sys.stderr)
        return 1
    device = topologies.get_topology_desc(args.topology, platform="tpu").devices[0]
    if args.gru:
        compiled = compiled_gru(1024, 256, 256)
    else:
        compiled = CompiledStep(eb.wrap(Everything()), [np.zeros((2, 9), np.float32)], "tpu")
    print(f"{device.device_kind}\n")
    print("| rule | program | MFLOP | MB moved | MB of buffers | to compile, CPU s |")
    print("|---|---|---:|---:|---:|---:|")
    for rule in args.rule or rule_names():
        programs = Programs(compiled, make_rule(rule))
        for name, program, donated in (
            ("step", programs.step(), 0),
            (f"{STEPS} steps", programs.gradients(STEPS, CHUNK), 1),
        ):
            *counts, seconds = count(*program, donated, device)
            row = " | ".join(f"{number / 1e6:,.3g}" for number in counts)
            print(f"| `{rule}` | {name} | {row} | {seconds:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
