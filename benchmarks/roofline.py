"""What a GPU or TPU could do at best, by counting: FLOPs, bytes and kernels of the online step,
from its compiled program.

    python -m benchmarks.roofline [--units 1024 --inputs 256 --batch 256 --steps 1000] [--paper]

The program is laid out as for a GPU or TPU and compiled here, without being run. `--paper` prints
memory and communication of a model of many devices, from formulas that are checked against the
memory that the code makes at small sizes.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import jax
import numpy as np
import optax
import torch

import etrace_bridge as eb
from benchmarks.programs import Programs
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.rules import make_rule
from etrace_bridge.schedule.chunk_plan import trace_bytes

# Published peaks: operations per second of matrix products (TF32 on GPUs, bfloat16 on the TPU), and
# bytes per second of main memory.
DEVICES = {
    "A100 80GB": (156e12, 2.04e12),
    "H100 SXM": (495e12, 3.35e12),
    "TPU v5e": (197e12, 0.82e12),
}
RULES = ("d_rtrl", "pp_prop", "bptt")
DENSE = ("B·3H·(I + H + 2)", lambda b, i, h, n, p: b * 3 * h * (i + h + 2))
# Elements of a rule's memory for a GRU layer (the mean over layers): B batch, I inputs, H units,
# n hidden values and P weights of all layers. Single numbers are left out.
FORMULAS = {
    "d_rtrl": DENSE,
    "snap1": DENSE,
    "eprop": DENSE,
    "rflo": DENSE,
    "decolle": DENSE,
    "three_factor": DENSE,
    "otpe": (
        "(2 - H/n)·B·3H·(I + H + 2)",
        lambda b, i, h, n, p: b * 3 * h * (i + h + 2) * (2 * n - h) // n,
    ),
    "pp_prop": ("B·(I + 5H + 1)", lambda b, i, h, n, p: b * (i + 5 * h + 1)),
    "ottt": ("B·(I + 7H)", lambda b, i, h, n, p: b * (i + 7 * h)),
    "low_rank": (
        "2·B·3H·(I + H + 2) + B·H·(n + 4)",
        lambda b, i, h, n, p: 2 * b * 3 * h * (i + h + 2) + b * h * (n + 4),
    ),
    "ostl": ("B·H·3H·(I + H + 2)", lambda b, i, h, n, p: b * h * 3 * h * (i + h + 2)),
    "snap_n": (
        "B·(n + H)/2·3H·(I + H + 2)",
        lambda b, i, h, n, p: b * (n + h) // 2 * 3 * h * (i + h + 2),
    ),
    "rtrl": ("B·H·P", lambda b, i, h, n, p: b * h * p),
    "uoro": ("B·H + P·H/n", lambda b, i, h, n, p: b * h + p * h // n),
    "kf_rtrl": (
        "B·(4n·H + 3I + 3H)",
        lambda b, i, h, n, p: b * (4 * n * h + 3 * i + 3 * h),
    ),
    "ok_rtrl": (
        "4·B·(4n·H + 3I + 3H + 6)",
        lambda b, i, h, n, p: 4 * b * (4 * n * h + 3 * i + 3 * h + 6),
    ),
    "dni": ("H·(n + 1)", lambda b, i, h, n, p: h * (n + 1)),
    "fptt": ("2·P·H/n", lambda b, i, h, n, p: 2 * p * h // n),
    "bptt": ("0 (activations: K·B·4H)", lambda b, i, h, n, p: 0),
    "immediate": ("0", lambda b, i, h, n, p: 0),
}


def compiled_gru(units: int, inputs: int, batch: int, layers: int = 1) -> CompiledStep:
    """A GRU's step, laid out as for an accelerator."""
    return CompiledStep(
        eb.wrap(torch.nn.GRU(inputs, units, layers)), [np.zeros((batch, inputs), np.float32)], "gpu"
    )


def count(compiled: CompiledStep, rule_name: str) -> dict[str, float]:
    """FLOPs, bytes and kernels of an online step with its update by SGD."""
    programs = Programs(compiled, make_rule(rule_name), optax.sgd(1e-3))
    step, shapes = programs.step()
    program = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    found: Any = program.cost_analysis()
    entry = program.as_text().split("ENTRY", 1)[1]
    kernels = len(
        re.findall(
            r" = \S+ (?:fusion|dot|convolution|custom-call|reduce|copy|transpose|concatenate)\(",
            entry,
        )
    )
    return {
        "flops": found["flops"],
        "bytes": found["bytes accessed"],
        "kernels": kernels,
        "memory": trace_bytes(programs.state.trace),
    }


def roofline(units: int, inputs: int, batch: int, steps: int) -> None:
    """Print the table of counts and bounds."""
    compiled = compiled_gru(units, inputs, batch)
    print(
        f"GRU, {units} units, {inputs} inputs, batch {batch}, float32; bounds for {steps} online "
        "steps\n"
    )
    print(
        "| rule | memory, GB | GFLOP per step | GB per step | kernels per step | "
        f"{' | '.join(f'{name}, s' for name in DEVICES)} |"
    )
    print("|---|" + "---:|" * (4 + len(DEVICES)))
    for rule in RULES:
        found = count(compiled, rule)
        bounds = [
            steps * max(found["flops"] / peak, found["bytes"] / bandwidth)
            for peak, bandwidth in DEVICES.values()
        ]
        numbers = [found["memory"] / 1e9, found["flops"] / 1e9, found["bytes"] / 1e9]
        print(
            f"| `{rule}` | {' | '.join(f'{x:.3g}' for x in numbers)} | {found['kernels']} | "
            f"{' | '.join(f'{x:.2g}' for x in bounds)} |"
        )


def paper(layers: int, units: int, batch: int, devices: int) -> None:
    """Print memory and communication of a large model whose batch is divided, after a check of the
    formulas at small sizes.
    """
    for h, i, b, count in ((4, 3, 2, 1), (6, 5, 3, 1), (4, 4, 2, 2)):
        program = compiled_gru(h, i, b, count).program
        weights = count * 3 * h * (h + i + 2)
        for rule, (_, elements) in FORMULAS.items():
            memory = jax.eval_shape(lambda r=rule, p=program: make_rule(r).init(p))
            made = trace_bytes([x for x in jax.tree.leaves(memory) if x.ndim])
            expected = 4 * count * elements(b, i, h, count * h, weights)
            assert made == expected, (rule, h, i, b, count, made, expected)
    P = layers * 3 * units * 2 * units
    print(
        "| rule | elements of a layer | all, bytes | of a device, bytes | all-reduce of a device "
        "and update, bytes |"
    )
    print("|---|---|---:|---:|---:|")
    for rule, (formula, elements) in FORMULAS.items():
        whole, share = (
            4.0 * layers * elements(b, units, units, layers * units, P)
            for b in (batch, batch // devices)
        )
        print(f"| `{rule}` | {formula} | {whole:.2g} | {share:.2g} | {2 * 4 * P:.2g} |")


def main(arguments: list[str]) -> int:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("units", 1024), ("inputs", 256), ("batch", 256), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--paper", action="store_true", help="12 layers of 16,384 units, batch 4,096, 1,024 devices"
    )
    args = parser.parse_args(arguments)
    if args.paper:
        paper(12, 16384, 4096, 1024)
    else:
        roofline(args.units, args.inputs, args.batch, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
