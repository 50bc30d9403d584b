"""Process that has the tokenizer and forks the workers: `python -m services.facade.work.process FD`.

A fork takes milliseconds and shares the memory of libraries and tokenizer, which take seconds to load anew. This
process never does a request's work: it forks, and kills, when the facade says so. Workers end with it, and it ends
with the facade, however that ends.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.facade.text import FolderTokenizer, Tokenizer, leave_out_torch

READY, FAILED = b"ready", b"failed"
FORK, KILL = b"fork", b"kill"
PID = struct.Struct("!q")
REQUEST = struct.Struct("!QQ")
"""Most bytes of memory that a piece of work may take, and the number of bytes that follow."""
ANSWER = struct.Struct("!cQ")
"""Status of an answer, and the number of bytes that follow."""
DONE, DONE_BYTES, NO_MEMORY, FAULT = b"d", b"b", b"m", b"f"
"""A pickled result; a result that is bytes; the memory did not suffice; a defect, as text."""
LONGEST_MESSAGE = 1 << 16
"""Longest message of the control socket."""
_PR_SET_PDEATHSIG = 1
_KEPT_BYTES = 128 * 1024 * 1024
"""Memory beyond that of its fork with which a worker ends itself: it would not give it back."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the workers need."""

    model: Path | None


def main(control: socket.socket) -> None:
    """Load the tokenizer and fork workers until the facade is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup: Setup = pickle.loads(control.recv(LONGEST_MESSAGE))
    try:
        tokenizer = _warm(setup)
    except Exception as error:
        control.send(FAILED + f"{type(error).__name__}: {error}".encode()[: LONGEST_MESSAGE // 2])
        return
    # Objects that are never looked at again by the collector are never copied by it either.
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
            # A child that was not waited for keeps its number, so this kills no other process.
            if pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                children.discard(pid)


def _warm(setup: Setup) -> Tokenizer | None:
    leave_out_torch()
    # All that a body or an answer may need, so that no worker imports it again.
    from services.facade.dialects import answers, chat, paceline, sglang, tokens, trl, vllm
    from services.facade.work import jobs

    assert all((answers, chat, vllm, paceline, sglang, tokens, trl, jobs, jobs))
    if setup.model is None:
        return None
    tokenizer = FolderTokenizer(setup.model)
    tokenizer.decode(tokenizer.encode("a", special=True), skip_special=False)
    # A template may want other messages; then it is compiled all the same.
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
            # No file of what was in memory.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with socket.socket(fileno=descriptor) as pipe:
                _serve(pipe, tokenizer)
            status = 0
    finally:
        # Nothing of the parent's is flushed or ended here.
        os._exit(status)


def _data_bytes() -> int | None:
    """Return the bytes that the kernel counts against RLIMIT_DATA; None where it does not tell."""
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
    """Return so many bytes; None if the facade has closed the pipe."""
    found = bytearray(size)
    view, got = memoryview(found), 0
    while got < size:
        if not (count := pipe.recv_into(view[got:])):
            return None
        got += count
    return found


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
