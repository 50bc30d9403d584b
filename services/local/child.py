"""One process of the platform: dies with the launcher, logs to a file, and is waited for until it is ready."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from services.local.log_rotation import last_lines
from services.local.pinning import pinned
from services.platform.lifeline import tied
from services.platform.ready_file import ProcessEndpoint, read_ready_file

_POLL_SECONDS = 0.05
_TAIL_LINES = 30
# Triton's complaint about itself, some seventy lines, which is the last that an instance says however it ends.
_AT_EXIT = re.compile(r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.")


class PlatformError(RuntimeError):
    """The platform could not be started, or a process of it is gone; the message shows its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Command, environment and files of a process."""

    name: str
    argv: Sequence[str]
    log: Path
    ready_file: Path | None = None
    """Written by the process when it can be used."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """Cores that it may use; empty for all."""


class Process(Protocol):
    """The part of `subprocess.Popen` that is used; a test double of a process needs no more."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


Launch = Callable[[ChildSpec, BinaryIO], Process]
"""Starts a process whose output goes to a file."""


def spawned(spec: ChildSpec, log: BinaryIO) -> Process:
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
    """At most one process at a time under one name. `spawner` is the one thread that starts processes."""

    def __init__(self, spec: ChildSpec, spawner: ThreadPoolExecutor, launch: Launch = spawned) -> None:
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
        """Process id; PlatformError if it was never started."""
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
        """Wait for the ready file until `deadline` (monotonic). `healthy` raises when waiting is in vain."""
        while (ready := self.ready) is None:
            healthy()
            self.check_alive()
            if time.monotonic() > deadline:
                raise PlatformError(f"{self.spec.name} was not ready in time.\n{self.tail()}")
            self._exited_within(_POLL_SECONDS)
        return ready

    def check_alive(self) -> None:
        """Raise PlatformError with the end of the log if the process is gone."""
        if not self.alive:
            raise PlatformError(f"{self.spec.name} ended with status {self.returncode}.\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process."""
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def stop(self, timeout: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout` seconds (0: at once); return when the process is gone."""
        if timeout:
            self.signal(signal.SIGTERM)
        if not self._exited_within(timeout):
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL and return when the process is gone. One that a keeper starts in its place is let be."""
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
    """Stop all processes at once; wait at most `timeout` seconds before killing them."""
    threads = [threading.Thread(target=child.stop, args=(timeout,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def readable_tail(lines: Sequence[str], most: int) -> list[str]:
    """Return the last `most` lines: structured ones as plain text, tracebacks on lines of their own."""
    telling = [line for line in lines if not _AT_EXIT.match(line)]
    return [part for line in telling[-most:] for part in _readable(line)][-most:]


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
