"""Run the processes of a platform: start them, wait until they are ready, restart them, and rotate their logs.

A `Child` is one process, which dies with the launcher. `ProgressLines` reports which are ready,
`Supervisor` restarts those that died, and `LogRotation` bounds their logs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from services.local.config import RestartPolicy
from services.local.machine import pinned
from services.platform.launching import ProcessEndpoint, read_ready_file, tied
from services.platform.tasks import ExponentialBackoff

_POLL_SECONDS = 0.05
_SUPERVISION_SECONDS = 0.1
_ROTATION_SECONDS = 1.0
_PROGRESS_SECONDS = 0.2
_REPORT_SECONDS = 10.0
_TAIL_LINES = 30
_TAIL_BYTES = 256 << 10
_COPY_BYTES = 1 << 20
# Triton warns about leaked objects at exit, in some seventy lines that would hide the actual end of a log.
_AT_EXIT = re.compile(r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.")


class PlatformError(RuntimeError):
    """The platform could not be started, or one of its processes has ended; the message shows its log."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Command, environment and files of a process."""

    name: str
    argv: Sequence[str]
    log: Path
    ready_file: Path | None = None
    """Written by the process once it is ready."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """Cores that the process may use; empty for all."""


class Process(Protocol):
    """The part of `subprocess.Popen` that this module uses."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


Launch = Callable[[ProcessSpec, BinaryIO], Process]
"""Starts a process and sends its output to a file."""


def spawned(spec: ProcessSpec, log: BinaryIO) -> Process:
    """Start a process that dies with the thread that starts it."""
    return subprocess.Popen(
        tied(pinned(spec.argv, spec.cores)),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **spec.environment},
        start_new_session=True,  # a Ctrl-C in the terminal is for the launcher alone
    )


class Child:
    """At most one process at a time under one name; `spawner` is the one thread that starts processes."""

    def __init__(self, spec: ProcessSpec, spawner: ThreadPoolExecutor, launch: Launch = spawned) -> None:
        self.spec = spec
        self._spawner = spawner
        self._launch = launch
        self._process: Process | None = None
        self._ready: ProcessEndpoint | None = None

    @property
    def ready(self) -> ProcessEndpoint | None:
        """Endpoint of the process; None before it is ready."""
        if self._ready is None:
            self._ready = read_ready_file(self.spec.ready_file)
        return self._ready

    @property
    def pid(self) -> int:
        """Process id; PlatformError if the process was never started."""
        if self._process is None:
            raise PlatformError(f"{self.spec.name} is not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True from start to exit."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the last process: None while it runs, negative for a signal."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start a process; its output is appended to the log."""
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if spec.ready_file is not None:
            spec.ready_file.parent.mkdir(parents=True, exist_ok=True)
            spec.ready_file.unlink(missing_ok=True)
        self._ready = None
        self._process = self._spawner.submit(self._spawn).result()

    def wait_ready(self, deadline: float, healthy: Callable[[], None] = lambda: None) -> ProcessEndpoint:
        """Wait for the ready file until `deadline` (monotonic); `healthy` may raise to end the wait early."""
        while (ready := self.ready) is None:
            healthy()
            self.check_alive()
            if time.monotonic() > deadline:
                raise PlatformError(f"{self.spec.name} was not ready in time.\n{self.tail()}")
            self._exited_within(_POLL_SECONDS)
        return ready

    def check_alive(self) -> None:
        """Raise PlatformError with the end of the log if the process has ended."""
        if not self.alive:
            raise PlatformError(f"{self.spec.name} ended with status {self.returncode}.\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def stop(self, timeout: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout` seconds (0: at once); return when the process has ended."""
        if timeout:
            self.signal(signal.SIGTERM)
        if not self._exited_within(timeout):
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL and return when the process has ended.

        A process that a supervisor starts in its place meanwhile is left alone.
        """
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def tail(self) -> str:
        """Return the last lines of the log, under its path."""
        lines = last_lines(self.spec.log)
        return "\n".join([f"--- {self.spec.log}", *readable_tail(lines, _TAIL_LINES)])

    def _spawn(self) -> Process:
        with self.spec.log.open("ab") as log:
            return self._launch(self.spec, log)

    def _exited_within(self, seconds: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_together(children: Sequence[Child], timeout: float) -> None:
    """Stop processes concurrently; kill those that still run after `timeout` seconds."""
    threads = [threading.Thread(target=child.stop, args=(timeout,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def readable_tail(lines: Sequence[str], limit: int) -> list[str]:
    """Return the last `limit` lines, structured ones as plain text and tracebacks on separate lines."""
    kept = [line for line in lines if not _AT_EXIT.match(line)]
    return [part for line in kept[-limit:] for part in _readable(line)][-limit:]


def _readable(line: str) -> list[str]:
    try:
        entry = json.loads(line)
    except ValueError:
        return [line]
    if not isinstance(entry, dict) or "event" not in entry:
        return [line]
    hidden = ("event", "level", "timestamp", "service", "logger", "exception")
    rest = " ".join(f"{key}={value}" for key, value in entry.items() if key not in hidden)
    head = f"{entry.get('timestamp', '')} {entry.get('level', '')} {entry['event']} {rest}".strip()
    return [head, *str(entry.get("exception", "")).splitlines()]


class Restarts:
    """Deaths of one process, and the time of the next restart."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: list[float] = []
        self._backoff = ExponentialBackoff(policy.initial, policy.maximum)

    def died(self, now: float) -> float | None:
        """Record a death at `now` (monotonic seconds) and return when to restart; None: no more restarts."""
        self._deaths = [death for death in self._deaths if now - death < self._policy.window] + [now]
        self._backoff.failures = len(self._deaths)
        return None if len(self._deaths) > self._policy.limit else now + self._backoff.delay


class Supervisor:
    """A thread that restarts processes that died, until it is stopped.

    `expected` returns the processes that should be alive; `checked` is called after each round of checks.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        expected: Callable[[], Iterable[Child]],
        checked: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy
        self._expected = expected
        self._checked = checked
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float | None] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; nothing is restarted afterwards."""
        self._stopping.set()
        self._thread.join()

    def gave_up(self, child: Child) -> bool:
        """Return True if a process died too often and will not be restarted."""
        return child.spec.name in self._due and self._due[child.spec.name] is None

    def _watch(self) -> None:
        while not self._stopping.wait(_SUPERVISION_SECONDS):
            for child in self._expected():
                self._check(child, time.monotonic())
            self._checked()

    def _check(self, child: Child, now: float) -> None:
        name = child.spec.name
        if child.alive:
            self._due.pop(name, None)  # started by a caller
        elif name not in self._due:
            self._due[name] = self._restarts.setdefault(name, Restarts(self._policy)).died(now)
        elif (due := self._due[name]) is not None and now >= due:
            del self._due[name]
            child.start()


class ProgressLines:
    """Report on a wait line by line, from a thread that runs while the block does.

    A line says which process has become ready; after ten seconds without one, a line names what is awaited.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        began: float,
        ready: Callable[[], list[str]],
        awaited: Callable[[], list[str]],
    ) -> None:
        """Prepare a report that started at `began` (monotonic).

        Args:
            report: gets each line.
            ready: returns the names of all processes that are ready.
            awaited: returns the names of the others, or of whatever else is awaited.
        """
        self._report = report
        self._began = self._reported_at = began
        self._ready_names, self._awaited = ready, awaited
        self._reported: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def check(self, now: float, ready: Iterable[str], awaited: Iterable[str]) -> None:
        """Report new names in `ready`, and those in `awaited` if nothing was reported for ten seconds."""
        elapsed = f"{now - self._began:.0f} s"
        for name in ready:
            if name not in self._reported:
                self._reported.add(name)
                self._report_line(now, f"{name} is ready after {elapsed}")
        waiting = ", ".join(awaited)
        if waiting and now - self._reported_at >= _REPORT_SECONDS:
            self._report_line(now, f"{elapsed} gone, waiting for {waiting}")

    def _report_line(self, now: float, line: str) -> None:
        self._reported_at = now
        self._report(line)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_PROGRESS_SECONDS)
            self.check(time.monotonic(), self._ready_names(), [] if over else self._awaited())


class LogRotation:
    """A thread that rotates log files that have become too large, until it is stopped.

    A log is the standard output of a process, which libraries and the interpreter write to as well, so the file
    cannot be replaced. It is copied and truncated instead, as by logrotate's `copytruncate`; a line that is written
    in the microseconds between the last copy and the truncation is lost.
    """

    def __init__(self, logs: Callable[[], Iterable[Path]], max_bytes: int, files: int) -> None:
        """Watch the files that `logs` returns; keep `files` of each, the current one included."""
        self._logs = logs
        self._max_bytes = max_bytes
        self._files = files
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="log-rotation", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread if it was started."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Check every file once."""
        for log in self._logs():
            # The next check tries again, such as after the disk was full.
            with suppress(OSError):
                if log.stat().st_size > self._max_bytes:
                    rotate(log, self._files)

    def _watch(self) -> None:
        while not self._stopping.wait(_ROTATION_SECONDS):
            self.check()


def rotate(log: Path, files: int) -> None:
    """Copy gateway.log to gateway.log.1, and so on, and truncate it. On OSError the log is unchanged."""
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
    """Return the path of an older file of a log; number 1 is the newest."""
    return log.with_name(f"{log.name}.{number}")


def last_lines(log: Path) -> list[str]:
    """Return the lines in the last 256 KiB of the newest older file of a log, and then of the log."""
    return [line for path in (older(log, 1), log) for line in _end_of(path)]


def _end_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []


def _copy(source: int, target: Path) -> None:
    """Copy a file to its end, including what is written meanwhile."""
    with target.open("wb") as file:
        while piece := os.read(source, _COPY_BYTES):
            file.write(piece)
        file.flush()
