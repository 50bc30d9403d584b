"""Load the tokenizer and fork the workers: `python -m services.facade.work.process FD`.

A fork takes milliseconds and shares the memory of libraries and tokenizer, which take seconds to load again. This
process runs no jobs: it forks and kills workers at the request of the facade. Workers end with it, and it ends with
the facade, in every way that may end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from services.facade.text import FolderTokenizer, Tokenizer, leave_out_torch

READY, FAILED = b"ready", b"failed"
FORK, KILL = b"fork", b"kill"
PID = struct.Struct("!q")
REQUEST = struct.Struct("!QQ")
"""Most bytes of memory for a job, and the number of bytes that follow."""
ANSWER = struct.Struct("!cQ")
"""Status of an answer, and the number of bytes that follow."""
DONE, DONE_BYTES, NO_MEMORY, FAULT = b"d", b"b", b"m", b"f"
"""Statuses: a pickled result; a result in bytes; out of memory; the text of a defect."""
LONGEST_MESSAGE = 1 << 16
"""Longest message of the control socket."""
_MODULES = (
    *("dialects.answers", "dialects.chat", "dialects.paceline", "dialects.sglang", "dialects.tokens"),
    *("dialects.trl", "dialects.vllm", "work.jobs"),
)
"""Modules that jobs use."""
_PR_SET_PDEATHSIG = 1
_KEPT_BYTES = 128 * 1024 * 1024
"""Growth of its memory at which a worker ends itself, because it would not return the memory."""


def main(control: socket.socket) -> None:
    """Load the tokenizer and fork workers until the facade is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model: Path | None = pickle.loads(control.recv(LONGEST_MESSAGE))
    try:
        tokenizer = _warm(model)
    except Exception as error:
        control.send(FAILED + f"{type(error).__name__}: {error}".encode()[: LONGEST_MESSAGE // 2])
        return
    # Frozen objects are never touched by the collector, so their pages stay shared.
    gc.collect()
    gc.freeze()
    control.send(READY)
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, 1)
        if not message:
            return
        _reap(children)
        if message == FORK:
            (descriptor,) = descriptors
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                control.close()
                _child(descriptor, parent, tokenizer)
            os.close(descriptor)
            children.add(pid)
            control.send(PID.pack(pid))
        else:
            (pid,) = PID.unpack(message.removeprefix(KILL))
            # A child keeps its number until it is waited for, so this kills no other process.
            if pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                children.discard(pid)


def _warm(model: Path | None) -> Tokenizer | None:
    leave_out_torch()
    # All modules that a job may need, so that no worker imports one again.
    for name in _MODULES:
        import_module(f"services.facade.{name}")
    if model is None:
        return None
    tokenizer = FolderTokenizer(model)
    tokenizer.decode(tokenizer.encode("a", special=True), skip_special=False)
    # A template may refuse these messages; it is compiled nevertheless.
    with contextlib.suppress(Exception):
        tokenizer.chat([{"role": "user", "content": "a"}], {"add_generation_prompt": True})
    return tokenizer


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


def _child(descriptor: int, parent: int, tokenizer: Tokenizer | None) -> NoReturn:
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            # No core dump, which would have the contents of memory.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with socket.socket(fileno=descriptor) as pipe:
                _serve(pipe, tokenizer)
            status = 0
    finally:
        # Skips the exit handlers and buffers of the parent.
        os._exit(status)


def _data_bytes() -> int | None:
    """Return the bytes that the kernel counts against RLIMIT_DATA; None if it does not report them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _serve(pipe: socket.socket, tokenizer: Tokenizer | None) -> None:
    """Answer requests until the facade closes the pipe."""
    first, own = _resident_bytes(), _data_bytes()
    while (head := _received(pipe, REQUEST.size)) is not None:
        memory, size = REQUEST.unpack(head)
        if own is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (own + memory, resource.RLIM_INFINITY))
        if (request := _received(pipe, size)) is None:
            return
        status, answer = _done(request, tokenizer)
        del request
        pipe.sendall(ANSWER.pack(status, len(answer)))
        pipe.sendall(answer)
        del answer
        if _resident_bytes() - first > _KEPT_BYTES:
            return


def _done(request: bytearray, tokenizer: Tokenizer | None) -> tuple[bytes, bytes]:
    try:
        work, arguments = pickle.loads(request)
        result: Any = work(tokenizer, *arguments)
        if isinstance(result, bytes):
            return DONE_BYTES, result
        return DONE, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        return NO_MEMORY, b""
    except BaseException as error:
        import traceback

        return FAULT, "".join(traceback.format_exception(error)).encode("utf-8", "replace")[:LONGEST_MESSAGE]


def _received(pipe: socket.socket, size: int) -> bytearray | None:
    """Return `size` bytes; None if the facade has closed the pipe."""
    found = bytearray(size)
    view, got = memoryview(found), 0
    while got < size:
        if not (count := pipe.recv_into(view[got:])):
            return None
        got += count
    return found


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
