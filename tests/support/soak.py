"""What long tests have in common: they show how far they are, and leave figures behind."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "runs" / "soak"
"""Of one JSON file for each long test."""


class Progress:
    """Lines that tell how far a test is, and when it is expected to end.

    They are seen while the test runs with pytest's option -s, as `make soak` gives it, and otherwise if it fails.
    """

    def __init__(self, what: str, total: float, unit: str) -> None:
        """The test does `total` of a unit, such as 200 events or 120 seconds."""
        self._what = what
        self._total = total
        self._unit = unit
        self._began = time.monotonic()

    def tell(self, done: float, more: str) -> None:
        """Print a line: `done` of the total so far, and what else is worth knowing."""
        gone = time.monotonic() - self._began
        left = gone * (self._total - done) / done if done else 0.0
        end = time.strftime("%H:%M:%S", time.localtime(time.time() + left)) if done else "unknown"
        so_far = f"{self._what}: {self._unit} {done:.0f} of {self._total:.0f}, {more}"
        print(f"{so_far}; {gone:.0f} s gone, {left:.0f} s left, end {end}", flush=True)


def record(name: str, figures: Mapping[str, Any]) -> Path:
    """Write the figures of a long test to runs/soak/NAME.json and return the path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return path
