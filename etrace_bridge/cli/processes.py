"""`--processes N`: run the same command in N processes of this machine, each with its part of a
batch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etrace_bridge.cli.arguments import INTERRUPTED, UsageError
from etrace_bridge.learning.checkpoint_files import weights_file
from etrace_bridge.learning.checkpoint_sharded import sharded_folder
from etrace_bridge.learning.processes import COORDINATOR, COUNT, INDEX, distributed_mesh
from etrace_bridge.learning.signals import TERMINATED

GRACE_SECONDS = 5.0  # for the others to end by themselves after one has failed


@dataclass(frozen=True)
class Part:
    """The index of this process, and its part of the data.

    Attributes:
        index: of this process.
        count: of processes.
        mesh: over all of them; None for a single one.
    """

    index: int = 0
    count: int = 1
    mesh: Any = None

    @property
    def devices(self) -> int:
        """Return the devices of all processes."""
        return 1 if self.mesh is None else self.mesh.size

    def whole(self, index: Any) -> Any:
        """Return as many of the sequences as can be divided evenly."""
        return index[: len(index) // self.devices * self.devices]

    def own(self, index: Any) -> Any:
        """Return this process's part of a batch."""
        each = len(index) // self.count
        return index[self.index * each : (self.index + 1) * each]

    def check_batch(self, batch: int) -> None:
        """Raise if a batch cannot be divided."""
        if batch % self.devices:
            raise UsageError(
                f"--batch is {batch}; it must be a multiple of the {self.devices} devices of all "
                "processes."
            )

    def checkpoint(self, output: str) -> Path:
        """Return the path where the learner is saved."""
        return weights_file(output) if self.mesh is None else sharded_folder(output)


def is_worker() -> bool:
    """Return whether this process was started by `run_processes`."""
    return INDEX in os.environ


def join_processes() -> Part:
    """Return this process's part, once it has met the others; only the first one continues to
    print.

    The library that connects them reports to the standard output, which is for results, so its
    output goes to the standard error.
    """
    index = int(os.environ[INDEX])
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w") if index == 0 else open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    return Part(index, int(os.environ[COUNT]), distributed_mesh())


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """Run `python -m etrace_bridge` with these arguments in `count` processes; return the exit
    status.

    If one fails, the others are ended, since they would wait for it. At Ctrl-C and SIGTERM they save
    and end together; at a second one they are ended.
    """
    signal.signal(signal.SIGTERM, _exit)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command, workers = [sys.executable, "-m", "etrace_bridge", *arguments], []
    try:
        for index in range(count):
            environment = os.environ | {COORDINATOR: address, COUNT: str(count), INDEX: str(index)}
            workers.append(subprocess.Popen(command, env=environment))
        return _wait(workers)
    except (KeyboardInterrupt, SystemExit) as stop:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        return TERMINATED if isinstance(stop, SystemExit) else INTERRUPTED
    finally:
        _end([w for w in workers if w.poll() is None])


def _exit(number: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)


def _wait(workers: list[subprocess.Popen]) -> int:
    while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
        time.sleep(0.1)
    states = [w.poll() for w in workers]
    failed = [(n, state) for n, state in enumerate(states) if state]
    if not failed:
        return 0
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and any(w.poll() is None for w in workers):
        time.sleep(0.1)
    first, status = failed[0]
    if status in (INTERRUPTED, TERMINATED):  # it has said so itself
        return status
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    print(
        f"error: process {first} {how}; the others were stopped. Go on with --resume, from the "
        "last checkpoint.",
        file=sys.stderr,
    )
    return status if status > 0 else 128 - status


def _end(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(5)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
