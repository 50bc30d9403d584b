"""Run the suite on a machine that stalls: `--stress`, and `--stress-seed N` to repeat a run.

A pytest plug-in. `tests/support/startup` stalls event loops, threads and conditions. In addition, each worker stops
random processes of its own for up to `LONGEST` seconds, and twice as many processes as the machine has cores take
processor time in bursts. Time limits of tests are `PATIENCE` times as long. Nothing else changes.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.platform.launching import tied

LONGEST = 0.6
BETWEEN = 2.0
PATIENCE = 5
SEED = "STRESS_SEED"
_STARTUP = Path(__file__).parent / "startup"
# Busy and idle for up to a second and a half in turn.
_BURSTS = """
import random, sys, time
chance = random.Random(sys.argv[1])
while True:
    until = time.monotonic() + chance.uniform(0, 1.5)
    while time.monotonic() < until: pass
    time.sleep(chance.uniform(0, 1.5))
"""


def run_first(**variables: str) -> None:
    """Let every Python process from here on run `tests/support/startup` first, with these variables."""
    os.environ.update(variables)
    paths = [str(_STARTUP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


class Stress:
    """The plug-in, in the process that distributes the tests and in its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._worker = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
        seed = config.getoption("stress_seed")
        # Workers have their first process's.
        self.seed = os.environ.setdefault(SEED, str(secrets.randbelow(1_000_000) if seed is None else seed))
        run_first(**{SEED: self.seed})
        self._load = list[subprocess.Popen[bytes]]()
        self._stopper: ProcessStops | None = None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the seed where one looks for it."""
        terminalreporter.write_line(f"stress: --stress-seed {self.seed}")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Begin."""
        if not hasattr(session.config, "workerinput"):
            # Before anything can break. pytest leaves headers of plug-ins out where it is to be quiet.
            self.pytest_terminal_summary(session.config.pluginmanager.get_plugin("terminalreporter"))
            for number in range(2 * (os.cpu_count() or 1)):
                command = [sys.executable, "-S", "-c", _BURSTS, f"{self.seed} {number}"]
                self._load.append(subprocess.Popen(tied(command)))
        if self._worker:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "")
            self._stopper = ProcessStops(random.Random(f"{self.seed} {worker}"), self._load)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Lengthen the time limits."""
        for item in items:
            mark = item.get_closest_marker("timeout")
            limit = mark.args[0] if mark is not None and mark.args else item.config.getini("timeout")
            item.add_marker(pytest.mark.timeout(PATIENCE * float(limit)), append=False)

    def pytest_sessionfinish(self) -> None:
        """End it."""
        if self._stopper is not None:
            self._stopper.end()
        for process in self._load:
            process.kill()
            process.wait()


class ProcessStops:
    """Stops random descendants of this process, one at a time, and lets them go on.

    A process that a test has stopped is left alone: signals of this process go through `os.kill`, which waits while
    one is stopped here.
    """

    def __init__(self, chance: random.Random, spared: list[subprocess.Popen[bytes]]) -> None:
        self._chance = chance
        self._spared = {process.pid for process in spared}
        self._sleep = time.sleep
        self._kill = os.kill
        self._stopping = threading.Lock()
        self._stopped_by_tests = set[int]()
        self._ended = threading.Event()
        os.kill = self._signal
        # The lock may be held while somebody forks.
        os.register_at_fork(after_in_child=lambda: setattr(os, "kill", self._kill))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop nothing any more."""
        self._ended.set()
        self._thread.join()
        os.kill = self._kill

    def _signal(self, pid: int, number: int) -> None:
        with self._stopping:
            if number == signal.SIGSTOP:
                self._stopped_by_tests.add(pid)
            elif number == signal.SIGCONT:
                self._stopped_by_tests.discard(pid)
            self._kill(pid, number)

    def _run(self) -> None:
        while not self._ended.wait(self._chance.expovariate(1 / BETWEEN)):
            living = psutil.Process().children(recursive=True)
            others = [each for each in living if each.pid not in self._spared]
            if others:
                self._stop(self._chance.choice(others))

    def _stop(self, process: psutil.Process) -> None:
        seconds = self._chance.uniform(0.0, LONGEST)
        with self._stopping, suppress(psutil.Error, ProcessLookupError):
            if process.pid in self._stopped_by_tests or process.status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_ZOMBIE,
            ):
                return
            self._kill(process.pid, signal.SIGSTOP)
            try:
                self._sleep(seconds)
            finally:
                self._kill(process.pid, signal.SIGCONT)
