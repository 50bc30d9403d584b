"""Progress of a download, reported as lines of text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Report = Callable[[str], None]
"""Takes a line for a person."""


class DownloadProgress:
    """Bytes and files that have come, of all threads; a line every `interval` seconds at most, and at the end."""

    def __init__(self, total: int, files: int, report: Report, interval: float) -> None:
        self._total = total
        self._files = files
        self._report = report
        self._interval = interval
        self._lock = threading.Lock()
        self._began = self._said = time.monotonic()
        self._here = self._come = self._done = 0

    def found(self, size: int) -> None:
        """Count bytes that were there already."""
        with self._lock:
            self._here += size

    def received(self, size: int) -> None:
        """Count bytes that have come."""
        with self._lock:
            self._here += size
            self._come += size
            now = time.monotonic()
            if now - self._said >= self._interval:
                self._said = now
                self._report(self._line(now))

    def lost(self, size: int) -> None:
        """Take back bytes that have to come again."""
        with self._lock:
            self._here -= size

    def finished_file(self) -> None:
        """Count a file that is complete."""
        with self._lock:
            self._done += 1
            if self._done == self._files:
                self._report(self._line(time.monotonic()))

    def _line(self, now: float) -> str:
        share = f" ({self._here / self._total:.0%})" if self._total else ""
        rate = self._come / max(now - self._began, 1e-9)
        return (
            f"{self._here / 1e9:.2f} of {self._total / 1e9:.2f} GB{share}, {rate / 1e6:.0f} MB/s, "
            f"{self._done} of {self._files} files"
        )
