"""Finished runs as JSON files, one for each task."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from benchmarks.reproduce.tasks import Outcome

FOLDER = Path(__file__).parent / "results"
POINTS = 50  # of a curve that are stored


class Results:
    """The runs of one task; each is on disk as soon as it is added.

    Args:
        key: the task's letter.
        folder: where the file is.
    """

    def __init__(self, key: str, folder: Path = FOLDER) -> None:
        self.path = folder / f"{key}.json"
        self.runs: list[dict] = json.loads(self.path.read_text()) if self.path.exists() else []

    def has(self, setting: str, method: str, seed: int) -> bool:
        """Return whether this run was made."""
        return any(
            (r["setting"], r["method"], r["seed"]) == (setting, method, seed) for r in self.runs
        )

    def add(
        self,
        setting: str,
        method: str,
        seed: int,
        outcome: Outcome,
        close: tuple[float, int] | None,
    ) -> None:
        """Add a run with its cosine to BPTT and its bytes; write the file, whole or not at all.

        Runs of one setting are compared with each other, so they have to be of one length.
        """
        stored = self.steps(setting)
        if stored not in (None, outcome.steps):
            raise ValueError(
                f"{self.path.name} has runs of {setting} with {stored} steps; this one has "
                f"{outcome.steps}. Choose the same length, or delete the stored runs first."
            )
        parts = np.array_split(outcome.curve, min(POINTS, len(outcome.curve)))
        curve = [float(f"{part.mean():.4g}") for part in parts]
        self.runs.append(
            {
                "setting": setting,
                "method": method,
                "seed": seed,
                "steps": outcome.steps,
                "score": float(f"{outcome.score:.6g}"),
                "seconds": round(outcome.seconds, 2),
                "curve": curve,
            }
            | ({"cosine": round(close[0], 4), "memory": close[1]} if close else {})
        )
        self.path.parent.mkdir(exist_ok=True)
        text = (
            "[\n" + ",\n".join(json.dumps(run, ensure_ascii=False) for run in self.runs) + "\n]\n"
        )
        part = self.path.with_suffix(".part")
        part.write_text(text)
        os.replace(part, self.path)

    def steps(self, setting: str) -> int | None:
        """The length of training of this setting's runs, None without runs."""
        return next((r["steps"] for r in self.runs if r["setting"] == setting), None)

    def scores(self, setting: str, method: str) -> list[float]:
        """The scores of all seeds."""
        return self.values(setting, method, "score")

    def values(self, setting: str, method: str, name: str) -> list[float]:
        """What the runs of all seeds have under a name; older runs lack some."""
        runs = [r for r in self.runs if (r["setting"], r["method"]) == (setting, method)]
        return [r[name] for r in runs if name in r]

    def methods(self) -> list[str]:
        """Methods with a run, in the order in which they came."""
        return list(dict.fromkeys(r["method"] for r in self.runs))
