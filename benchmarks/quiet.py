"""How much of the machine other processes use, so that a benchmark on a shared machine can wait for
its turn.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class ForeignLoad:
    """Share of all cores that other processes used since the object was made; zero where the system
    does not tell.
    """

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._busy = _busy_seconds()
        self._own = time.process_time()

    def share(self) -> float:
        """Return the share, between 0 and 1."""
        wall = time.perf_counter() - self._wall
        foreign = _busy_seconds() - self._busy - (time.process_time() - self._own)
        return max(foreign, 0.0) / max(wall * (os.cpu_count() or 1), 1e-9)


def wait_until_quiet(limit: float, share: float = 0.1, window: float = 0.2) -> float:
    """Wait until other processes used less than `share` of the machine for `window` seconds, at
    most `limit` seconds.

    Returns:
        Seconds waited.
    """
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < limit:
        load = ForeignLoad()
        time.sleep(window)
        if load.share() < share:
            break
    return waited


def _busy_seconds() -> float:
    """Return the time that all cores together have been busy since boot."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = _STAT.read_text().split(
        maxsplit=9
    )[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")
