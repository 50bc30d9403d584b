"""Child processes that do not outlive their parent, even when it is killed with SIGKILL."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in the child before it becomes the real program. The kernel sends the signal when the thread that
# started the child ends; a parent that was gone before that was arranged shows as a changed parent id.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` as a child that the kernel kills when this process ends.

    Linux only; elsewhere `command` is returned unchanged. `command[0]` must be a path. Start it from the main
    thread: the child dies with the thread that started it.
    """
    if sys.platform != "linux":
        return list(command)
    # Not a preexec_fn: running Python between fork and exec is unsafe beside the threads of gRPC.
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
