"""Measure every program on a workload in one run, interleaved, and report ratios to torch BPTT."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import (
    Program,
    make_braintrace,
    make_jax_bptt,
    make_torch_bptt,
    make_yardstick,
)
from benchmarks.ours import make_ours
from benchmarks.quiet import ForeignLoad, wait_until_quiet
from benchmarks.workloads import Workload

Maker = Callable[[Workload], Program | None]
MAKERS: dict[str, Maker] = {
    "ours": make_ours,
    "yardstick": make_yardstick,
    "torch BPTT": make_torch_bptt,
    "JAX BPTT": make_jax_bptt,
    "braintrace": make_braintrace,
}
REFERENCE = "torch BPTT"
FOLDER = Path(__file__).parent


def _prepare(
    makers: dict[str, Maker], workload: Workload
) -> tuple[dict[str, Program], dict[str, Any]]:
    """Build, compile and warm up every program that exists for the workload; one that fails is
    reported, not fatal.
    """
    programs, memory = {}, {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            program = make(workload)
            if program is None:
                continue
            size, method = program.memory()  # the first run, which compiles
            seconds = time.perf_counter() - start
            # Torch returns when it is done, but its OpenMP threads spin on for a while
            if name != REFERENCE:
                _run_and_require_finished(name, program)
        except Exception as error:
            traceback.print_exc()
            memory[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        programs[name] = program
        memory[name] = {"memory_bytes": size, "memory_method": method, "first_run_seconds": seconds}
        if program.untrained is not None:
            memory[name]["untrained"] = program.untrained()
    if workload.mode == "gradients" and {"ours", "yardstick"} <= set(programs):
        memory["ours"]["difference_to_yardstick"] = _difference(
            programs["ours"].run(), programs["yardstick"].run()
        )
    return programs, memory


def _run_and_require_finished(name: str, program: Program) -> None:
    """Run once more, and raise if the process still computes afterwards: the next program would pay
    for it.

    Freeing large buffers takes time as well, so what follows is compared with the run itself.
    """
    start = time.process_time()
    program.run()
    returned = time.process_time()
    time.sleep(0.1)
    after = time.process_time() - returned
    if after > 0.01 and after > 0.25 * (returned - start):
        raise RuntimeError(
            f"`{name}` returned before its computation was done, so its time would mean nothing"
        )


def _difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference, relative to each parameter's largest element; raise above
    1e-3.
    """
    worst = max(
        float(np.abs(found[name] - g).max() / np.abs(g).max()) for name, g in expected.items()
    )
    if not worst < 1e-3:
        raise RuntimeError(
            f"ours and the yardstick compute different gradients (relative difference {worst:.1e})"
        )
    return worst


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def _time(program: Program, clock: str) -> float:
    start = CLOCKS[clock]()
    program.run()
    return CLOCKS[clock]() - start


def measure(
    workload: Workload,
    makers: dict[str, Maker] | None = None,
    repeats: int = 7,
    budget: float = 60.0,
    patience: float = 0.0,
    clock: str = "wall",
) -> dict[str, Any]:
    """Time all programs of a workload in turns and return the least time of each.

    Taking turns exposes every program to the same disturbances of a shared machine. A slow program
    is timed only as often as the budget allows, at least once after its warm-up; `repeats` in the
    result says how often, and `foreign` which share of the machine other processes used during the
    best run.

    Args:
        workload: What to run.
        makers: Columns; all of `MAKERS` by default.
        repeats: Runs of each program after its warm-up.
        budget: Seconds for one program.
        patience: Seconds to wait before each run for other processes to be quiet; 0 does not wait.
        clock: `"wall"`, or `"cpu"` for the processor time of this process, which means something on
            a busy machine too if the process is bound to one core.
    """
    programs, results = _prepare(MAKERS if makers is None else makers, workload)
    best = dict.fromkeys(programs, float("inf"))
    foreign = dict.fromkeys(programs, 0.0)
    spent = dict.fromkeys(programs, 0.0)
    counts = dict.fromkeys(programs, 0)
    # One step takes microseconds: a turn is then many of them, and the fastest counts. A turn
    # outlasts the 0.2 s for which torch's
    # OpenMP threads go on spinning after their last work and slow the next program down.
    turn = 0.4 if workload.mode == "step" else 0.0
    for _ in range(repeats):
        for name, program in programs.items():
            if spent[name] > budget:
                continue
            if patience:
                wait_until_quiet(patience)
            load = ForeignLoad()
            elapsed, total = [], 0.0
            while not elapsed or total < turn:
                elapsed.append(_time(program, clock))
                total += elapsed[-1]
            spent[name] += total
            counts[name] += 1
            if min(elapsed) < best[name]:
                best[name], foreign[name] = min(elapsed), load.share()
    for name in programs:
        results[name] |= {
            "seconds": best[name],
            "repeats": counts[name],
            "foreign": round(foreign[name], 2),
        }
        if REFERENCE in best:
            results[name]["ratio"] = best[name] / best[REFERENCE]
    return {
        "workload": dataclasses.asdict(workload),
        "clock": clock,
        "load_average": os.getloadavg()[0],
        "programs": results,
    }


def _cell(result: dict[str, Any] | None, key: str) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return "failed"
    if key == "memory":
        return f"{result['memory_bytes'] / 1e6:.0f} MB"
    return f"{result['ratio']:.2f}" if "ratio" in result else "?"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text: ratios to torch BPTT, the time of torch BPTT, and peak memory."""
    names = list(dict.fromkeys([*MAKERS, *(name for row in rows for name in row["programs"])]))
    header = [
        "workload",
        "sizes",
        "reach",
        *names,
        f"{REFERENCE} ms",
        *(f"{name} mem" for name in names),
    ]
    lines = [header]
    for row in rows:
        workload, results = Workload(**row["workload"]), row["programs"]
        reference = results.get(REFERENCE, {}).get("seconds")
        lines.append(
            [
                workload.name,
                workload.shape,
                f"<= {workload.reach}" if workload.reach else "-",
                *(_cell(results.get(name), "ratio") for name in names),
                f"{reference * 1e3:.2f}" if reference else "-",
                *(_cell(results.get(name), "memory") for name in names),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    busy = max(
        (result.get("foreign", 0) for row in rows for result in row["programs"].values()), default=0
    )
    note = (
        "\n"
        f"Other processes used up to {busy:.0%} of the machine during these runs: do not trust "
        "them."
        if busy > 0.2 and rows[0]["clock"] == "wall"
        else ""
    )
    return "\n".join(padded) + note


PAGE_HEAD = """# Benchmarks

Written by `python -m benchmarks` (`make bench` runs it last). Time of one gradient of the whole sequence as a ratio to torch BPTT on
the same model and data in the same run, least of several interleaved runs after warm-up; *step* rows are one online step with an SGD
update, its loss left on the device unless it says *loss read*. Everything goes through the public API, with torch tensors in unless it
says *JAX arrays*. The yardstick is a program written by hand for this one model and rule
(`benchmarks/yardstick*.py`). A dash: the program does not exist for this row, or would take minutes.

"""


def page(report: dict[str, Any]) -> str:
    """Return the report as a page of the documentation."""
    rows = report["rows"]
    names = list(MAKERS)
    lines = [
        [
            "workload",
            "sizes",
            "to reach",
            *names,
            f"{REFERENCE}, ms",
            "our memory",
            f"{REFERENCE}'s memory",
        ]
    ]
    for row in rows:
        workload, results = Workload(**row["workload"]), row["programs"]
        cells = [_cell(results.get(name), "ratio") for name in names]
        memory = [_cell(results.get(name), "memory") for name in ("ours", REFERENCE)]
        reach = f"≤ {workload.reach}" if workload.reach else ""
        time_ms = (
            f"{results[REFERENCE]['seconds'] * 1e3:.2f}"
            if "seconds" in results.get(REFERENCE, {})
            else "-"
        )
        lines.append([workload.name, workload.shape, reach, *cells, time_ms, *memory])
    lines.insert(1, ["---"] * len(lines[0]))
    text = PAGE_HEAD + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    for row in rows:
        if row["workload"]["mode"] == "step":
            times = [
                f"{name} {r['seconds'] * 1e6:.0f}"
                for name, r in row["programs"].items()
                if "seconds" in r
            ]
            text += f"\n- one online step ({Workload(**row['workload']).shape}), in µs: {'; '.join(times)}"
    for row in rows:
        for name, result in row["programs"].items():
            if result.get("untrained"):
                text += (
                    "\n"
                    f"- {row['workload']['name']}: {name} computes no gradient of "
                    f"{', '.join(map('`{}`'.format, result['untrained']))}"
                )
    for row in report.get("memory", ()):
        text += f"\n- peak memory of `gradients` at T={row['steps']}: {row['bytes'] / 1e6:.0f} MB, {row['traces']:.2f} × the trace"
    machine = ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in report["environment"].items()
    )
    picture = (
        "![Time and memory against steps and hidden units](pictures/benchmarks.png)\n\n"
        if "sweep" in report
        else ""
    )
    return f"{text}\n\n{picture}Machine: {machine}.\n"


def environment() -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    import jax
    import torch

    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "jax": jax.__version__,
    }


def save(report: dict[str, Any], path: Path | None = None) -> None:
    """Write the report as JSON, and the page of the documentation."""
    (path or FOLDER / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    if path is None:
        (FOLDER.parent / "docs" / "benchmarks.md").write_text(page(report))
