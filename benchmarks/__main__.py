"""Run the benchmarks: `python -m benchmarks [--quick] [--only NAME ...] [--no-sweep]
[--synchronous]`.

On a machine that others use, `OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks --clock cpu`
still gives fair ratios.
"""

from __future__ import annotations

import argparse

import jax

from benchmarks.harness import CLOCKS, MAKERS, environment, measure, save, table
from benchmarks.ours import STEP_VARIANTS
from benchmarks.workloads import WORKLOADS


def main() -> None:
    """Measure and print the table; a full run also writes `results.json` beside this file, and the
    documentation's page and picture.
    """
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Ratios to torch BPTT within one run."
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, help=f"some rows of: {', '.join(names)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats and a small sweep, nothing is written"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="runs of each program after its warm-up (default 7)"
    )
    parser.add_argument(
        "--no-sweep", action="store_true", help="leave out the plot against T and H"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="SECONDS",
        help="wait up to this long before each run for a quiet machine",
    )
    parser.add_argument(
        "--synchronous",
        action="store_true",
        help="run JAX's programs in the calling thread; nothing is written",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time; bind to one core for it",
    )
    options = parser.parse_args()

    if options.synchronous:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    repeats, budget = (3, 10.0) if options.quick else (options.repeats, 8.0 * options.repeats)
    rows = []
    for workload in WORKLOADS:
        if options.only and workload.name not in options.only:
            continue
        makers = MAKERS | STEP_VARIANTS if workload.mode == "step" else MAKERS
        rows.append(measure(workload, makers, repeats, budget, options.patience, options.clock))
        print(table(rows[-1:]), flush=True)
    print(
        "\nRatios to torch BPTT, least time of each program in one interleaved run:\n" + table(rows)
    )
    if options.only:
        return
    report = {"environment": environment(), "rows": rows}
    is_kept = not (options.quick or options.synchronous)
    if not options.no_sweep:
        from benchmarks.sweep import flatness, plot, sweep

        report["memory"] = flatness(options.quick)
        report["sweep"] = sweep(options.quick, options.patience, options.clock, repeats)
        if is_kept:
            plot(report["sweep"])
    if is_kept:
        save(report)


if __name__ == "__main__":
    main()
