"""Freed memory that stays with the process.

glibc gives blocks above 32 MiB back to the kernel when they are freed, and a step with many rows takes and frees
several of them. The next step finds them empty again, and waits for the page faults: in one process, and not in
the next, so that the same step has two speeds.
"""

from __future__ import annotations

import ctypes

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST = 256 << 20
"""Blocks up to here are kept, in bytes: what a step needs at once, but not weights or KV."""
_MOST = 1 << 30
"""So much is kept, in bytes."""


def keep_freed_memory() -> bool:
    """Keep what is freed, for all threads that start from now on; whether the C library can do that.

    One heap serves them all: those that glibc makes for a thread hold no block above 64 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _MOST, _ARENA_MAX: 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
