"""Fork processes from one that has imported their modules and has done nothing else.

Imports, above all vLLM's, take most of the start of a process. Settings that modules read from the environment
while they are imported are the same for all forks. Linux only.

    zygote = Zygote("services.gateway.__main__", "services.policy.__main__")
    process = zygote.fork([sys.executable, "-m", "services.gateway", ...], environment, cores=(), log=log)

A fork runs the module as `__main__` in its own session. Its parent only waits for it and reports its exit status
over a socket. Both die with the process that made the zygote, however that ends.

`multiprocessing`'s `forkserver` with a preload does not replace it. Tried with Python 3.11: after a SIGKILL of the
launcher its server and children live on, since each child holds the pipe whose end would stop the server; a process
has one server, so a second list of modules is ignored (the tests need three, with vLLM, with its V2 runner and
without); and a module of the preload that is missing is skipped silently.
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
"""Exit status on the socket of a fork, sent after the PID."""
PID = struct.Struct("<i")
"""Process id on the socket of a fork."""
_START_TIMEOUT = 600.0


class Forked:
    """A process forked from a zygote: like a `subprocess.Popen`, but several threads may use it."""

    def __init__(self, pid: int, reports: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reports = reports
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._reports.close()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status; subprocess.TimeoutExpired after `timeout` seconds."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if the process has not ended."""
        if self.poll() is None:
            # It may have ended before its parent has reported so.
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
            ready, _, _ = select.select([self._reports], [], [], timeout)
            with self._lock:
                if ready and self.returncode is None:
                    message = self._reports.recv(STATUS.size)
                    # Without a status its parent was killed, and it with its parent.
                    self.returncode = STATUS.unpack(message)[0] if message else -signal.SIGKILL
        return self.returncode


class Zygote:
    """The process to fork from, which dies with this process. Several threads may use it."""

    def __init__(
        self, *imports: str, environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Prepare the process without starting it.

        Args:
            imports: the modules that it imports.
            environment: variables during the imports, in addition to this process's.
            log: output of the imports. None: this process's output.
        """
        self._imports = imports
        self._log = log
        # OpenMP's thread pool would not survive a fork; with one thread there is no pool.
        self._environment = {**(environment or {}), "OMP_NUM_THREADS": "1"}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def preload(self) -> None:
        """Start the process and its imports unless it runs; return at once. OSError if it cannot be started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def close(self) -> None:
        """Kill the process, and with it the forks that still run."""
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
        """Fork a process that runs `python -m module flags...`.

        Args:
            argv: the command line: [python, -m, module, flags...].
            environment: all variables of the process.
            cores: cores that it may use; empty for all.
            log: its output.
            pipe: descriptor that becomes its standard input.

        Raises:
            RuntimeError: it cannot be forked, for example because a module cannot be imported.
        """
        order = json.dumps([list(argv[2:]), dict(environment), list(cores), os.getcwd()]).encode()
        reports = socket.socket(socket.AF_UNIX)
        reports.settimeout(_START_TIMEOUT)
        try:
            self.preload()
            return self._request(reports, order, [log.fileno(), *(() if pipe is None else (pipe,))])
        except OSError as error:
            reports.close()
            raise RuntimeError(f"nothing can be forked from where {self._imports[0]} is imported") from error

    def _request(self, reports: socket.socket, order: bytes, files: Sequence[int]) -> Forked:
        reports.connect(self._address)
        fds = array.array("i", files)
        reports.sendmsg([struct.pack("<q", len(order))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        reports.sendall(order)
        pid = reports.recv(PID.size)
        if not pid:
            raise ConnectionResetError
        reports.settimeout(None)
        return Forked(PID.unpack(pid)[0], reports)

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
            # The process dies with the thread that started it.
            self._closed.wait()

        threading.Thread(target=start, daemon=True, name="zygote").start()
        with listener:
            self._process = started.result()
