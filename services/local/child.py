"""One process of the platform: started on a leash, with a log file, waited for until it is ready."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from services.local.logtail import readable_tail
from services.local.pinning import pinned
from services.platform.lifeline import tied

_POLL_SECONDS = 0.05
_TAIL_LINES = 30


class PlatformError(RuntimeError):
    """The platform could not be started, or a process of it is gone; the message shows its log."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process said when it was ready."""

    pid: int
    address: str
    """host:port of its gRPC server."""
    metrics_port: int


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How a process is started."""

    name: str
    argv: Sequence[str]
    log: Path
    ready_file: Path | None = None
    """Written by the process when it can be used."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """Cores that it may use; empty for all."""


class Process(Protocol):
    """What is used of a `subprocess.Popen`."""

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
    """A process, at most one at a time, under one name. `spawner` is the one thread that starts processes."""

    def __init__(self, spec: ChildSpec, spawner: ThreadPoolExecutor, launch: Launch = spawned) -> None:
        self.spec = spec
        self._spawner = spawner
        self._launch = launch
        self._process: Process | None = None
        self._ready: Ready | None = None

    @property
    def ready(self) -> Ready | None:
        """What the process said when it was ready; None before."""
        if self._ready is None:
            self._ready = self._read_ready()
        return self._ready

    @property
    def pid(self) -> int:
        """Of the running process; PlatformError when it was never started."""
        if self._process is None:
            raise PlatformError(f"{self.spec.name} is not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True from start to exit."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Of the last process: None while it runs, negative for a signal."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Starts a process; its output is appended to the log."""
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if spec.ready_file is not None:
            spec.ready_file.parent.mkdir(parents=True, exist_ok=True)
            spec.ready_file.unlink(missing_ok=True)
        self._ready = None
        self._process = self._spawner.submit(self._spawn).result()

    def wait_ready(self, deadline: float, healthy: Callable[[], None] = lambda: None) -> Ready:
        """Waits for the ready file until `deadline` (monotonic). `healthy` raises when waiting is in vain."""
        while (ready := self.ready) is None:
            healthy()
            self.check_alive()
            if time.monotonic() > deadline:
                raise PlatformError(f"{self.spec.name} was not ready in time.\n{self.tail()}")
            self._exited_within(_POLL_SECONDS)
        return ready

    def check_alive(self) -> None:
        """PlatformError with the end of the log when the process is gone."""
        if not self.alive:
            raise PlatformError(f"{self.spec.name} ended with status {self.returncode}.\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if there is a process."""
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def stop(self, timeout: float) -> None:
        """SIGTERM, then SIGKILL after `timeout` seconds (0: at once); returns when the process is gone."""
        if timeout:
            self.signal(signal.SIGTERM)
        if not self._exited_within(timeout):
            self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def tail(self) -> str:
        """The last lines of the log, under its path."""
        lines = self.spec.log.read_text(errors="replace").splitlines() if self.spec.log.exists() else []
        return "\n".join([f"--- {self.spec.log}", *readable_tail(lines, _TAIL_LINES)])

    def _spawn(self) -> Process:
        with self.spec.log.open("ab") as log:
            return self._launch(self.spec, log)

    def _read_ready(self) -> Ready | None:
        file = self.spec.ready_file
        if file is None or not file.exists():
            return None
        said = json.loads(file.read_text())
        return Ready(said["pid"], said["address"], said["metrics_port"])

    def _exited_within(self, seconds: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_together(children: Sequence[Child], timeout: float) -> None:
    """Asks all to end at once, then waits for each, at most `timeout` seconds."""
    threads = [threading.Thread(target=child.stop, args=(timeout,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
