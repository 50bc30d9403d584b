"""Limits of memory that Linux's control groups set."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def own_memory_limits() -> list[int]:
    """Return the limits of this process's control groups in bytes; none where there are none."""
    ours = Path("/proc/self/cgroup")
    return memory_limits(ours.read_text().splitlines() if ours.is_file() else [], _CGROUPS)


def memory_limits(lines: Iterable[str], root: Path) -> list[int]:
    """Return the limits of the control groups that `/proc/self/cgroup` names, of version 2 and 1, in bytes."""
    found = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own group as the root: what is not there has no limit of its own.
        group = top / place.lstrip("/")
        for folder in [group, *(each for each in group.parents if each.is_relative_to(top))]:
            with suppress(OSError, ValueError):  # "max" is no number, and no limit
                found.append(int((folder / name).read_text()))
    return found
