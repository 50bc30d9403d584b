"""Processes that have their modules imported already: forked from one that imported them and did nothing else.

Importing takes longer than starting all else of a process, above all vLLM. What is read from the environment while
modules are imported is the same for all of them. Linux only.

    zygote = Zygote("services.gateway.__main__", "services.policy.__main__")
    process = zygote.fork([sys.executable, "-m", "services.gateway", ...], environment, cores=(), log=log)

The process runs the module as `__main__`, with a session, a parent and an end of its own: the parent, which does
nothing but wait, tells of the end over a socket. Both die with the process that made the zygote, however it ends.
"""

from __future__ import annotations

import array
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from services.platform.launching import tied

STATUS = struct.Struct("<i")
"""An exit status on the socket of a fork; before it is said, the socket has the process's PID."""
PID = struct.Struct("<i")
"""A process's id on that socket."""
_START_TIMEOUT = 600.0


class Forked:
    """A process out of the zygote, to be used like a `subprocess.Popen`, by several threads."""

    def __init__(self, pid: int, news: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._news = news
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._news.close()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, once there is one. subprocess.TimeoutExpired after `timeout` seconds."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            # It may have ended without its parent having told of it yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            ready, _, _ = select.select([self._news], [], [], timeout)
            with self._lock:
                if ready and self.returncode is None:
                    said = self._news.recv(STATUS.size)
                    # Its parent was killed, and it with it.
                    self.returncode = STATUS.unpack(said)[0] if said else -signal.SIGKILL
        return self.returncode


class Zygote:
    """The process to fork from, to be used by several threads. It dies with this process."""

    def __init__(
        self, *imports: str, environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            imports: the modules that it imports.
            environment: variables beside this process's that it imports them with.
            log: for what they say while they are imported. Unset: this process's output.
        """
        self._imports = imports
        self._log = log
        # A pool of threads of OpenMP would not survive a fork, and with one thread there is none.
        self._environment = {**(environment or {}), "OMP_NUM_THREADS": "1"}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start to import, if that has not been done; return at once. OSError if nothing can be started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def close(self) -> None:
        """End it, and the processes that were forked from it and still run."""
        self._closed.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(Path(self._address).parent, ignore_errors=True)

    def fork(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int],
        log: BinaryIO,
        pipe: int | None = None,
    ) -> Forked:
        """Run `python -m module flags...`, [python, -m, module, flags...] being `argv`.

        Args:
            argv: the command line.
            environment: the whole of it.
            cores: that it may use; empty for all.
            log: for its output.
            pipe: descriptor that becomes its standard input.

        RuntimeError if it cannot be forked, as when a module cannot be imported.
        """
        order = json.dumps([list(argv[2:]), dict(environment), list(cores), os.getcwd()]).encode()
        news = socket.socket(socket.AF_UNIX)
        news.settimeout(_START_TIMEOUT)
        try:
            self.begin()
            return self._asked(news, order, [log.fileno(), *(() if pipe is None else (pipe,))])
        except OSError as error:
            news.close()
            raise RuntimeError(f"nothing can be forked from where {self._imports[0]} is imported") from error

    def _asked(self, news: socket.socket, order: bytes, files: Sequence[int]) -> Forked:
        news.connect(self._address)
        fds = array.array("i", files)
        news.sendmsg([struct.pack("<q", len(order))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        news.sendall(order)
        said = news.recv(PID.size)
        if not said:
            raise ConnectionResetError
        news.settimeout(None)
        return Forked(PID.unpack(said)[0], news)

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="zygote-"))
        self._address = str(folder / "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(64)
        os.set_inheritable(listener.fileno(), True)
        command = [
            sys.executable,
            "-m",
            "services.local.zygote_process",
            str(listener.fileno()),
            *self._imports,
        ]
        started: Future[subprocess.Popen[bytes]] = Future()

        def start() -> None:
            try:
                with ExitStack() as stack:
                    log = stack.enter_context(self._log.open("ab")) if self._log else None
                    process = subprocess.Popen(
                        tied(command),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=[listener.fileno()],
                        env=os.environ | self._environment,
                        start_new_session=True,  # a Ctrl-C in the terminal is for the launcher alone
                    )
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(process)
            # It dies with the thread that started it.
            self._closed.wait()

        threading.Thread(target=start, daemon=True, name="zygote").start()
        with listener:
            self._process = started.result()
