"""Memory and disk of the machine that an instance runs on, read from Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from services.generation.config import GenerationConfig
from services.generation.weights.shards import read_header, weight_files
from services.generation.weights.update_room import AdoptedDisk, HostMemory, WeightSizes, check_update_room

_log = structlog.get_logger(__name__)
_CGROUPS = Path("/sys/fs/cgroup")
_IN_MEMORY = {"tmpfs", "ramfs"}


def check_host(config: GenerationConfig) -> None:
    """Log what updates of an instance that has loaded its model may lack.

    Raises:
        UpdateDoesNotFit: none could be staged (see `check_update_room`).
    """
    if config.update_room == "off":
        return
    disk = adopted_disk(config.adopted_weights) if config.adopted_weights else None
    for reason in check_update_room(weight_sizes(Path(config.model)), host_memory(), disk):
        _log.warning("update_room_scarce", reason=reason)


def weight_sizes(model: Path) -> WeightSizes:
    """Return the bytes of a model's tensors, from the headers of its files."""
    spans = [entry["data_offsets"] for file in weight_files(model) for entry in read_header(file)[1].values()]
    sizes = [end - begin for begin, end in spans]
    return WeightSizes(sum(sizes), max(sizes, default=0))


def host_memory() -> HostMemory:
    """Return the memory that this process, its children and their control groups have."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    # Ranks on other machines are not among them.
    private = [private_dirty(process.pid) for process in processes]
    ours = Path("/proc/self/cgroup")
    limits = memory_limits(ours.read_text().splitlines() if ours.is_file() else [], _CGROUPS)
    return HostMemory(min([psutil.virtual_memory().total, *limits]), sum(private), len(processes))


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


def adopted_disk(path: Path) -> AdoptedDisk:
    """Return the file system of a folder, which need not be there yet."""
    there = next(each for each in [path.absolute(), *path.absolute().parents] if each.is_dir())
    found = os.statvfs(there)
    held = 0
    for file in path.glob("v*-*/*"):
        with suppress(OSError):  # removed meanwhile
            held += file.stat().st_size
    return AdoptedDisk(
        path,
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        held,
        _file_system(there) in _IN_MEMORY,
    )


def private_dirty(pid: int) -> int:
    """Return the memory that a process has for itself and that no file could give back, in bytes; 0 if it ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return 1024 * int(line.split()[1])
    return 0


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on."""
    resolved = folder.resolve()
    mounts = [
        (Path(part.mountpoint), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(part.mountpoint)
    ]
    return max(mounts, key=lambda mount: len(mount[0].parts), default=(resolved, ""))[1]
