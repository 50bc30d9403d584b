"""Measure the private memory of processes while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Self

_EVERY_SECONDS = 0.02


class PeakMemory:
    """Peak memory of each process inside the `with` block, by `measure`."""

    def __init__(self, pids: Mapping[str, int], measure: Callable[[int], int]) -> None:
        self._pids = pids
        self._measure = measure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.peak = {name: self._measure(pid) for name, pid in self._pids.items()}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._look()

    def _look(self) -> None:
        for name, pid in self._pids.items():
            self.peak[name] = max(self.peak[name], self._measure(pid))
