"""The process of a `Zygote`: it imports modules, and forks when it is asked to.

`python -m services.local.zygote_process DESCRIPTOR MODULE...`: the descriptor is that of a socket that listens.
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
    """Fork on demand. Returns in the forked process only: the module to run, and its arguments.

    Args:
        listener: where orders come in.
        imported: what the imports have put into the environment.
    """
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        caller, _ = listener.accept()
        # The one that waits.
        if os.fork() == 0:
            listener.close()
            return _attended(caller, imported)
        caller.close()


def _reap() -> None:
    """Wait for the children that have ended, so that their processor time counts as this process's children's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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
    """Name this process in lists of processes, where its command line is the zygote's."""
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


def _use_threads(number: str | None) -> None:
    """Let torch have the threads that it would have read from the environment when it was imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and number is not None:
        torch.set_num_threads(int(number))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
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
