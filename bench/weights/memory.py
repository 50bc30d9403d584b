"""Measure the private memory of processes while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

_EVERY_SECONDS = 0.02


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, clean and dirty, by smaps_rollup; 0 once it has ended."""
    try:
        return parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return 0


def parse_rollup(text: str) -> int:
    """Return the private bytes in the text of a smaps_rollup file."""
    lines = (line.split() for line in text.splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line[0].startswith("Private_"))


def available_bytes() -> int:
    """Return the available memory of the machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


class PeakMemory:
    """Peak private memory of each process inside the `with` block, and its memory before."""

    def __init__(self, pids: Mapping[str, int], measure: Callable[[int], int] = private_bytes) -> None:
        self._pids = pids
        self._measure = measure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.before = {name: self._measure(pid) for name, pid in self._pids.items()}
        self.peak = dict(self.before)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def growth(self, name: str) -> int:
        """Return the bytes by which a process's peak exceeds its memory before."""
        return self.peak[name] - self.before[name]

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._look()

    def _look(self) -> None:
        for name, pid in self._pids.items():
            self.peak[name] = max(self.peak[name], self._measure(pid))
