"""Processor time of the suite: the sum over all processes, and the files that cost most.

A pytest plug-in. At the end of each file a worker reads the processor time of itself, of the children that it has
waited for, and of its living descendants. The sum is a lower bound: a process is not counted if its parent ended
without waiting for it. The run ends with a table of the `SHOWN` dearest files; all are in `runs/test-times.json`.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

SHOWN = 30
RESULT = Path("runs/test-times.json")


class ProcessorTime:
    """Processor seconds by test file: measured in a worker, summed and shown where workers report to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before = 0.0
        self._began = time.monotonic()
        self._files = dict[str, float]()
        self._has_workers = bool(getattr(config.option, "numprocesses", None))

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Count what collecting costs, imports included, as a file of its own."""
        if self._has_workers:
            self._files["(compiling)"] = _seconds_of_ended_children()
        result = yield
        if not self._has_workers:
            self._count("(collecting)")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Count a file when its last test has ended; its fixtures are torn down by then."""
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._count(item.path.relative_to(self._config.rootpath).as_posix())
        return result

    def pytest_sessionfinish(self) -> None:
        """Send a worker's figures to the process that started it."""
        if self._has_workers:
            # Its children from here on are the workers, which count themselves.
            self._files["(distributing)"] = _own_seconds()
            return
        self._count("(the rest)")
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output["processor_time"] = self._files

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add a worker's figures. One that crashed has sent none."""
        for file, seconds in getattr(node, "workeroutput", {}).get("processor_time", {}).items():
            self._files[file] = self._files.get(file, 0.0) + seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the sum and the dearest files, and write all files to `RESULT`."""
        total = sum(self._files.values())
        ordered = sorted(self._files.items(), key=lambda each: -each[1])
        RESULT.parent.mkdir(exist_ok=True)
        rounded = {file: round(seconds, 2) for file, seconds in ordered}
        wall = time.monotonic() - self._began
        result = {"processor_seconds": round(total, 1), "wall_seconds": round(wall, 1), "files": rounded}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        terminalreporter.section(f"{total:.0f} s of processor time, {wall:.0f} s of wall time")
        for file, seconds in ordered[:SHOWN]:
            terminalreporter.write_line(f"{seconds:8.1f} s  {file}")

    def _count(self, file: str) -> None:
        now = max(self._before, processor_seconds())
        self._files[file] = self._files.get(file, 0.0) + now - self._before
        self._before = now


def processor_seconds() -> float:
    """Return the processor seconds of this process, of its children that ended, and of its living descendants."""
    total = _own_seconds() + _seconds_of_ended_children()
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            # It has ended meanwhile: its parent's sum has it.
            continue
    return total


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _seconds_of_ended_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
