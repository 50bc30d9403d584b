"""Manage the memory of a process: limits, freed memory, and garbage collection.

Limits come from Linux's control groups. Freed blocks stay with the process, because glibc returns blocks above 32
MiB to the kernel and the next decode step would wait for page faults. Collections leave large heaps alone while
they are in use: a full one looks at every object for up to 0.7 seconds, so it waits until nothing is in work.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")


def own_memory_limits() -> list[int]:
    """Return the limits of this process's control groups in bytes; none where there are none."""
    ours = Path("/proc/self/cgroup")
    return memory_limits(ours.read_text().splitlines() if ours.is_file() else [], _CGROUPS)


def own_memory_share() -> float:
    """Return the part of its limit that this process's control group has in use, 0 without a limit.

    Of several groups with limits, one within another, the fullest counts.
    """
    ours = Path("/proc/self/cgroup")
    return memory_share(ours.read_text().splitlines() if ours.is_file() else [], _CGROUPS)


def memory_share(lines: Iterable[str], root: Path) -> float:
    """Return the part of the tightest limit that is in use, 0 without one.

    Pages of files that can be dropped at once are not in use, as Kubernetes and the kernel see it, too.
    """
    shares = [0.0]
    for folder, names in _groups(lines, root):
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit, used = (int((folder / name).read_text()) for name in (names.limit, names.usage))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            shares.append((used - int(statistics.get(names.droppable, 0))) / limit)
    return max(shares)


def memory_limits(lines: Iterable[str], root: Path) -> list[int]:
    """Return the limits of the control groups that `/proc/self/cgroup` names, of version 2 and 1, in bytes."""
    found = []
    for folder, names in _groups(lines, root):
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            found.append(int((folder / names.limit).read_text()))
    return found


class _Names(NamedTuple):
    """Files of a control group, and the entry of `memory.stat` about pages that can be dropped at once."""

    limit: str
    usage: str
    droppable: str


_SECOND = _Names("memory.max", "memory.current", "inactive_file")
_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(lines: Iterable[str], root: Path) -> Iterator[tuple[Path, _Names]]:
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            top, names = root, _SECOND
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _FIRST
        else:
            continue
        # A container may see its own group as the root: what is not there has no limit of its own.
        group = top / place.lstrip("/")
        for folder in [group, *(each for each in group.parents if each.is_relative_to(top))]:
            yield folder, names


# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST = 256 << 20
"""Largest block that is kept, in bytes: enough for the tensors of a step, but not for weights or KV."""
_MOST = 1 << 30
"""Most bytes that are kept."""


def keep_freed_memory() -> bool:
    """Keep freed memory, for all threads that start from now on; return False if the C library cannot.

    All threads share one heap, since the heaps that glibc makes for single threads hold no block above 64 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _MOST, _ARENA_MAX: 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])


def return_freed_memory() -> None:
    """Return all freed memory to the kernel, if the C library can. 0.2 GB took 18 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Items of work in memory from which collections take long enough to be noticed.
_MANY = 4096
_LOOK_SECONDS = 0.1
# Time after a full collection until the next: while nothing is in work, and otherwise.
_FULL_SECONDS, _LONGEST_PAUSE = 600.0, 6 * 3600.0


def pause_collection(items: int) -> None:
    """Collect nothing for now if so many items of work are about to be in memory."""
    if items > _MANY:
        gc.disable()


async def collect_between(items: Callable[[], int]) -> None:
    """Let collections be short, and full ones rare, until cancelled. `items` tells how much work is in memory."""
    last = time.monotonic()
    try:
        while True:
            gc.freeze()
            held = items()
            if held > _MANY:
                gc.disable()
            else:
                gc.enable()
            passed = time.monotonic() - last
            if passed >= (_LONGEST_PAUSE if held else _FULL_SECONDS):
                gc.unfreeze()
                gc.collect()
                gc.freeze()
                last = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        gc.enable()
