"""Open files that others wrote: regular ones alone, and no more of them than is expected."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def open_regular(path: Path) -> int:
    """Return a file descriptor to read a regular file.

    OSError: there is none, or it is something else, such as a FIFO, of which the opening alone would wait for ever,
    or a device, which has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.path.isfile(descriptor):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """Return what is in a regular file. OSError as `open_regular`, or if there are more than `most` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content
