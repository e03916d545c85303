"""How many random programs each fuzz test has tried: counted in the file that `FUZZ_RECORD` names,
program by program, so that a run which is cut short counts too.

`make fuzz` keeps these counts in tests/fuzzed.json: by day, then by test, the programs that were right
and the runs of a test that found a fault.
"""

from __future__ import annotations

import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path


def record(test: str, what: str, count: int = 1) -> None:
    """Add to a count (`"programs"` or `"faults"`) of a test; without the variable, do nothing."""
    if "FUZZ_RECORD" not in os.environ:
        return
    path = Path(os.environ["FUZZ_RECORD"])
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        days = json.loads(file.read() or "{}")
        day = days.setdefault(datetime.now(UTC).date().isoformat(), {})
        counts = day.setdefault(test, {"programs": 0, "faults": 0})
        counts[what] += count
        text = json.dumps(days, indent=1, sort_keys=True) + "\n"
        file.truncate(0)
        file.write(text)
