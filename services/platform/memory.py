"""Manage the memory of a process: limits of control groups, freed memory, and garbage collection.

`keep_freed_memory` spares decode steps page faults, and `collect_between` defers full garbage collections until no
work is in memory.
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
# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BLOCK_BYTES = 256 << 20
"""Largest block that is kept: enough for the tensors of a step, but not for weights or KV."""
_KEPT_BYTES = 1 << 30
"""Most free memory that is kept."""
# Items of work in memory above which collections take noticeably long.
_MANY_ITEMS = 4096
_CHECK_SECONDS = 0.1
# Seconds between full collections: without work in memory, and with some.
_IDLE_SECONDS, _BUSY_SECONDS = 600.0, 6 * 3600.0


class _Names(NamedTuple):
    """File names of a control group, and the entry of `memory.stat` for pages that can be dropped at once."""

    limit: str
    usage: str
    droppable: str


_SECOND = _Names("memory.max", "memory.current", "inactive_file")
_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def own_memory_limits() -> list[int]:
    """Return the memory limits of this process's control groups in bytes; empty if there are none."""
    ours = Path("/proc/self/cgroup")
    return memory_limits(ours.read_text().splitlines() if ours.is_file() else [], _CGROUPS)


def own_memory_share() -> float:
    """Return the share of its limit that this process's control group uses, 0 without a limit.

    Of nested groups with limits the fullest counts.
    """
    ours = Path("/proc/self/cgroup")
    return memory_share(ours.read_text().splitlines() if ours.is_file() else [], _CGROUPS)


def memory_share(lines: Iterable[str], root: Path) -> float:
    """Return the share of the tightest limit that is in use, 0 without one.

    Pages of files that can be dropped at once do not count, as for Kubernetes and the kernel.
    """
    shares = [0.0]
    for folder, names in _groups(lines, root):
        with suppress(OSError, ValueError):  # "max" is no number and no limit
            limit, used = (int((folder / name).read_text()) for name in (names.limit, names.usage))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            shares.append((used - int(statistics.get(names.droppable, 0))) / limit)
    return max(shares)


def memory_limits(lines: Iterable[str], root: Path) -> list[int]:
    """Return the limits of the control groups that `/proc/self/cgroup` names, of version 2 and 1, in bytes."""
    found = []
    for folder, names in _groups(lines, root):
        with suppress(OSError, ValueError):  # "max" is no number and no limit
            found.append(int((folder / names.limit).read_text()))
    return found


def _groups(lines: Iterable[str], root: Path) -> Iterator[tuple[Path, _Names]]:
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            top, names = root, _SECOND
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _FIRST
        else:
            continue
        # A container may see its own group as the root; groups that do not exist have no limit.
        group = top / place.lstrip("/")
        for folder in [group, *(each for each in group.parents if each.is_relative_to(top))]:
            yield folder, names


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, for all threads that start from now on; return False if libc cannot.

    By default glibc returns blocks above 32 MiB to the kernel, and the next decode step waits for page faults. All
    threads share one heap, since glibc's heaps of single threads hold no block above 64 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: _KEPT_BLOCK_BYTES, _TRIM_THRESHOLD: _KEPT_BYTES, _ARENA_MAX: 1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])


def return_freed_memory() -> None:
    """Return all freed memory to the kernel, if libc can; 0.2 GB took 18 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def pause_collection(items: int) -> None:
    """Stop collections for now if `items`, the work about to be in memory, are many."""
    if items > _MANY_ITEMS:
        gc.disable()


async def collect_between(items: Callable[[], int]) -> None:
    """Keep garbage collections short and full ones rare, until cancelled; `items` returns the work in memory.

    A full collection visits every object, for up to 0.7 seconds in a large heap, so it waits until no work is in
    memory.
    """
    last = time.monotonic()
    try:
        while True:
            gc.freeze()
            held = items()
            if held > _MANY_ITEMS:
                gc.disable()
            else:
                gc.enable()
            passed = time.monotonic() - last
            if passed >= (_BUSY_SECONDS if held else _IDLE_SECONDS):
                gc.unfreeze()
                gc.collect()
                gc.freeze()
                last = time.monotonic()
            await asyncio.sleep(_CHECK_SECONDS)
    finally:
        gc.enable()
