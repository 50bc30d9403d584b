"""Processes that have their modules imported already: forked from one that imported them and did nothing else.

Importing takes longer than starting all else of a process, above all vLLM, and a run of the tests starts hundreds.
What is read from the environment while modules are imported is the same for all of them. There are three processes
to fork from: one with vLLM, for instances, one with vLLM and its V2 runner, and a small one for what controls them.

    process = forked([sys.executable, "-m", "services.generation", ...], environment, log)

The process runs the module as `__main__`, with a session, a parent and an end of its own: the parent, which does
nothing but wait, tells of the end over a socket. Both die with this process, however it ends.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from services.local.child import ChildSpec, Process, spawned
from services.platform.lifeline import tied

INSTANCES = frozenset(
    {"services.generation", "tests.support.breaking_instance", "tests.support.engine_process"}
)
"""Modules that are forked from where vLLM is imported."""
_SERVICES = tuple(
    f"services.{name}" for name in ("bubbles", "drafter", "drafts", "gateway", "policy", "reallocator")
)
_TOOLS = ("services.models", "services.platform.grpc.health", "tests.support.cluster.valkey")
CONTROL = frozenset({*_SERVICES, *_TOOLS, "tests.support.fake_learner_service"})
"""Modules that are forked from where nothing large is imported."""
_STATUS = struct.Struct("<i")
_PID = struct.Struct("<i")
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
                    said = self._news.recv(_STATUS.size)
                    # Its parent was killed, and it with it.
                    self.returncode = _STATUS.unpack(said)[0] if said else -signal.SIGKILL
        return self.returncode


class Zygote:
    """The process to fork from. It is started with the first fork, and dies with this process."""

    def __init__(self, *imports: str) -> None:
        """`imports` are the modules that it imports."""
        self._imports = imports
        self._lock = threading.Lock()
        self._address = ""
        self._process: subprocess.Popen[bytes] | None = None

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
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
        order = json.dumps([list(argv[2:]), dict(environment), list(cores), os.getcwd()]).encode()
        news = socket.socket(socket.AF_UNIX)
        news.settimeout(_START_TIMEOUT)
        news.connect(self._address)
        fds = array.array("i", [log.fileno(), *(() if pipe is None else (pipe,))])
        news.sendmsg([struct.pack("<q", len(order))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        news.sendall(order)
        said = news.recv(_PID.size)
        if not said:
            raise RuntimeError("the zygote did not fork")
        news.settimeout(None)
        return Forked(_PID.unpack(said)[0], news)

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="zygote-"))
        self._address = str(folder / "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(64)
        os.set_inheritable(listener.fileno(), True)
        command = [sys.executable, "-m", "tests.support.zygote", str(listener.fileno()), *self._imports]
        started: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            started.append(
                subprocess.Popen(
                    tied(command),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                )
            )
            # It dies with the thread that started it.
            threading.Event().wait()

        threading.Thread(target=start, daemon=True, name="zygote").start()
        while not started:
            threading.Event().wait(0.01)
        self._process = started[0]
        listener.close()


# vLLM imports the last two when it builds a worker. Nothing here may import numba, which must come later.
_INSTANCE_IMPORTS = (
    "services.generation.__main__",
    "services.generation.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)
_instances = Zygote(*_INSTANCE_IMPORTS)
_v2_instances = Zygote("tests.support.v2_first", *_INSTANCE_IMPORTS)
_control = Zygote(*[f"{name}.__main__" for name in _SERVICES], "services.platform.grpc.health")


def forked(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: BinaryIO,
    cores: Sequence[int] = (),
    pipe: int | None = None,
    *,
    v2: bool = False,
) -> Forked:
    """Return a process out of one of this process's zygotes (see `Zygote.fork`): [python, -m, module, flags...].

    With `v2` out of one in which vLLM was imported for its V2 runner.
    """
    # A module that enters a container names the one to run in it behind itself.
    of_instances = _v2_instances if v2 else _instances
    zygote = of_instances if INSTANCES.intersection(argv) else _control
    return zygote.fork(argv, environment, cores, log, pipe)


def launch(spec: ChildSpec, log: BinaryIO) -> Process:
    """For `services.local.Platform`: its services are forked, all else is started as always."""
    if spec.argv[1] == "-m" and spec.argv[2] in INSTANCES | CONTROL:
        return forked(spec.argv, {**os.environ, **spec.environment}, log, spec.cores)
    return spawned(spec, log)


# -- in the zygote ----------------------------------------------------------------------------------------


def _serve(listener: socket.socket, imported: Mapping[str, str]) -> tuple[str, list[str]]:
    """Fork on demand. Returns in the forked process only: the module to run, and its arguments.

    Args:
        listener: where orders come in.
        imported: what the imports have put into the environment.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        caller, _ = listener.accept()
        # The one that waits.
        if os.fork() == 0:
            listener.close()
            return _attended(caller, imported)
        caller.close()


def _attended(caller: socket.socket, imported: Mapping[str, str]) -> tuple[str, list[str]]:
    """Fork the process proper; tell its pid, wait for it, tell its status. Returns in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, fds, _, _ = socket.recv_fds(caller, 8, 2)
    (size,) = struct.unpack("<q", head)
    order = b""
    while len(order) < size:
        order += caller.recv(size - len(order))
    arguments, environment, cores, folder = json.loads(order)
    _die_with(os.getppid())
    waiting = os.getpid()
    pid = os.fork()
    if pid:
        caller.sendall(_PID.pack(pid))
        _, status = os.waitpid(pid, 0)
        caller.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    caller.close()
    _die_with(waiting)
    os.setsid()
    log, *pipes = fds
    for place in (1, 2):
        os.dup2(log, place)
    for pipe in pipes:
        os.dup2(pipe, 0)
    for fd in fds:
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**imported, **environment})
    if cores:
        os.sched_setaffinity(0, cores)
    return arguments[0], arguments[1:]


def _die_with(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    import faulthandler
    import gc
    import importlib
    import runpy

    # A process that hangs tells where, in its log: SIGABRT.
    faulthandler.enable()

    # What is imported stays: to look through it again and again takes a fifth of the import. Forks need not look
    # either, which collect garbage a few times while their engines start.
    gc.disable()
    before = dict(os.environ)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    module, sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])), added)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
