"""Bound the logs of a platform's processes, as logrotate's `copytruncate` does.

A process has its log as its standard output, which libraries and the interpreter itself write to, so the file
cannot be replaced under it. What is in it is copied to an older file, and the file is cut to nothing; it is open
for appending, so the process goes on at its new end. A line that is written in the microseconds between the last
copy and the cut is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_SECONDS = 1.0
_PIECE = 1 << 20
_TAIL_BYTES = 256 << 10


class LogRotation:
    """A thread that looks at files until it is stopped, and makes older ones of those that are too large."""

    def __init__(self, logs: Callable[[], Iterable[Path]], most_bytes: int, files: int) -> None:
        """Look at nothing yet. `logs` returns the files; each has `files - 1` older ones at most."""
        self._logs = logs
        self._most_bytes = most_bytes
        self._files = files
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="log-rotation", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to look, if that was begun."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Look at every file once."""
        for log in self._logs():
            # Where the disk is full it is tried again.
            with suppress(OSError):
                if log.stat().st_size > self._most_bytes:
                    rotate(log, self._files)

    def _watch(self) -> None:
        while not self._stopping.wait(_SECONDS):
            self.look()


def rotate(log: Path, files: int) -> None:
    """Make gateway.log.1 of gateway.log, and so on, and leave the log empty. OSError: it is as it was."""
    for number in range(files - 1, 1, -1):
        with suppress(FileNotFoundError):
            older(log, number - 1).replace(older(log, number))
    source = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        _copy(source, older(log, 1) if files > 1 else Path(os.devnull))
        os.ftruncate(source, 0)
    finally:
        os.close(source)


def older(log: Path, number: int) -> Path:
    """Return the path of an older file of a log; 1 is the newest of them."""
    return log.with_name(f"{log.name}.{number}")


def last_lines(log: Path) -> list[str]:
    """Return the lines at the end of a log, and of its newest older file: those of the last bytes of both."""
    return [line for path in (older(log, 1), log) for line in _end_of(path)]


def _end_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []


def _copy(source: int, target: Path) -> None:
    """Copy all that there is, also what is written meanwhile."""
    with target.open("wb") as file:
        while piece := os.read(source, _PIECE):
            file.write(piece)
        file.flush()
