"""Limits of memory that Linux's control groups set, and how near they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
