"""Process of a `Zygote`: import modules, then fork on request.

`python -m services.local.zygote_process DESCRIPTOR MODULE...`, with the descriptor of a listening socket.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from services.local.zygote import PID, STATUS


def _serve(listener: socket.socket, imported: Mapping[str, str]) -> tuple[str, list[str]]:
    """Fork on request; return in the forked process only, with the module to run and its arguments.

    Args:
        listener: accepts one connection for each fork.
        imported: variables that the imports have set.
    """
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        caller, _ = listener.accept()
        # This child becomes the parent that waits.
        if os.fork() == 0:
            listener.close()
            return _fork_service(caller, imported)
        caller.close()


def _reap() -> None:
    """Wait for the children that have ended, which adds their processor time to this process's totals."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_service(caller: socket.socket, imported: Mapping[str, str]) -> tuple[str, list[str]]:
    """Fork the service, report its PID, wait for it and report its status; return in the service only."""
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
        caller.sendall(PID.pack(pid))
        _, status = os.waitpid(pid, 0)
        caller.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
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
    _name(arguments[0].rpartition(".")[2])
    _use_threads(environment.get("OMP_NUM_THREADS"))
    return arguments[0], arguments[1:]


def _name(name: str) -> None:
    """Name this process for lists of processes, since its command line is the zygote's."""
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


def _use_threads(number: str | None) -> None:
    """Set the number of threads that torch would have read from this environment when it was imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and number is not None:
        torch.set_num_threads(int(number))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # SIGABRT makes a process that hangs write its stacks to its log.
    faulthandler.enable()

    # Imported objects stay: scanning them again and again takes a fifth of the import time. Freezing spares the
    # forks these scans too, since they collect garbage a few times while their engines start.
    gc.disable()
    before = dict(os.environ)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    module, sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])), added)
    # It runs anew under the name __main__, and runpy would warn about the one that was imported.
    sys.modules.pop(f"{module}.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
