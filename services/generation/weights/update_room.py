"""Memory and disk that an update of the weights needs, compared with what the machine has.

Files are mapped, and tensors loaded one at a time, so an update needs at least the memory of its largest tensor.
The folder `adopted_weights` is on disk, or in memory if it is on tmpfs: then every version counts.

An instance is refused only if updates are certain to fail. A limit that other processes share, or a disk that
others fill, is a warning. `check_update_room` decides, before an instance serves, and is pure; `check_host` reads
the sizes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from services.generation.config import GenerationConfig
from services.generation.weights.files import read_header, weight_files
from services.platform.config import ConfigError
from services.platform.memory import own_memory_limits

_SETTING = "update_room=off starts the instance all the same"
_log = structlog.get_logger(__name__)
_IN_MEMORY = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of the served model's tensors: of all, and of the largest."""

    model: int
    tensor: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the host, in bytes."""

    limit: int
    """Minimum of the machine's memory and the limits of the instance's control groups."""
    serving: int
    """Private memory of all ranks together, while they serve and no update is in progress."""
    processes: int


@dataclass(frozen=True, slots=True)
class AdoptedDisk:
    """File system of `adopted_weights`, in bytes."""

    path: Path
    total: int
    free: int
    held: int
    """Bytes of versions that are there already."""
    in_memory: bool
    """True on tmpfs, whose files count against the memory limit."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Part of the needed memory, by name."""

    name: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {gigabytes(self.bytes)}"


class UpdateDoesNotFit(ConfigError):
    """Raised when no update could be staged; `problems` have the figures."""


def check_update_room(sizes: WeightSizes, memory: HostMemory, disk: AdoptedDisk | None) -> list[str]:
    """Return warnings, with figures, about updates that may find too little room.

    Raises:
        UpdateDoesNotFit: not even one update can find room, whatever else runs on the machine.
    """
    new = MemoryPart("the new version", sizes.model)
    kept = [
        MemoryPart("the served version", sizes.model),
        MemoryPart("the one before", sizes.model),
        MemoryPart("a base of LoRA adapters", sizes.model),
    ]
    least = [
        MemoryPart(f"serving ({memory.processes} processes)", memory.serving),
        MemoryPart("the largest tensor", sizes.tensor),
    ]
    problems, warnings = list[str](), list[str]()
    if disk is not None and disk.in_memory:
        least.append(new)
    if _sum(least) > memory.limit:
        problems.append(_lack("memory", least, memory.limit, "the limit"))
    elif disk is not None and disk.in_memory and _sum([*least, *kept]) > memory.limit:
        warnings.append(_lack(f"memory, with {disk.path} in it", [*least, *kept], memory.limit, "the limit"))
    if disk is not None:
        room = disk.free + disk.held
        if new.bytes > disk.total:
            problems.append(_lack(f"space in {disk.path}", [new], disk.total, "the file system"))
        elif _sum([new, *kept]) > room:
            text = _lack(f"space in {disk.path}", [new, *kept], room, "free or held by versions")
            warnings.append(f"{text}; files that are hard links to the trainer's take none")
    if problems:
        raise UpdateDoesNotFit([*problems, _SETTING])
    return warnings


def gigabytes(count: int) -> str:
    """Return a number of bytes as text, in GB of 10^9."""
    return f"{count / 1e9:.3f} GB"


def _sum(parts: Sequence[MemoryPart]) -> int:
    return sum(part.bytes for part in parts)


def _lack(what: str, parts: Sequence[MemoryPart], there: int, where: str) -> str:
    figures = " + ".join(map(str, parts))
    return f"an update needs {gigabytes(_sum(parts))} of {what}: {figures}; {where} has {gigabytes(there)}"


def check_host(config: GenerationConfig) -> None:
    """Log whether updates of an instance that has loaded its model may lack memory or disk.

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
    """Return the memory of this process and its children, and their limits."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    # Ranks on other machines are not among them.
    private = [private_dirty(process.pid) for process in processes]
    return HostMemory(
        min([psutil.virtual_memory().total, *own_memory_limits()]), sum(private), len(processes)
    )


def adopted_disk(path: Path) -> AdoptedDisk:
    """Return the file system of a folder, which need not exist yet."""
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
    """Return the private memory of a process that no file backs, in bytes; 0 if the process ended."""
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
