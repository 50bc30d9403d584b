"""Pieces of work that are hostile, for the facade's workers. Each gets the tokenizer first, as all of them do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def pid(_: Any) -> int:
    return os.getpid()


def hang(_: Any, told: Path) -> None:
    """Say which process it is, and never end."""
    told.with_suffix(".new").write_text(str(os.getpid()))
    told.with_suffix(".new").rename(told)
    while True:
        pass


def take(_: Any, count: int) -> int:
    """Take so many bytes of memory."""
    return len(bytearray(count))


def die(_: Any) -> None:
    """End as by the kernel, for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_: Any) -> None:
    raise KeyError("a defect")


def sockets(_: Any) -> list[str]:
    """Return the sockets that the process has."""
    names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for name in names if name.startswith("socket:")]
