"""Memory and disk of the machine that an instance runs on, read from Linux."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from services.generation.config import GenerationConfig
from services.generation.weights.shards import read_header, weight_files
from services.generation.weights.update_room import AdoptedDisk, HostMemory, WeightSizes, check_update_room
from services.platform.memory_limits import own_memory_limits

_log = structlog.get_logger(__name__)
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
    return HostMemory(
        min([psutil.virtual_memory().total, *own_memory_limits()]), sum(private), len(processes)
    )


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
