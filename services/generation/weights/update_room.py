"""Memory and disk that an update of the weights needs, against what there is: decided before an instance serves.

Files are mapped, and tensors loaded one at a time: the memory of an update is at least that of its largest tensor.
What `adopted_weights` keeps is on disk, or in memory where that folder is on tmpfs: then every version counts.

Only what is certain is refused. A limit that other processes share, or a disk that others fill, is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.platform.config.sources import ConfigError

_SETTING = "update_room=off starts the instance all the same"


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of the served model's tensors: of all, and of the largest."""

    model: int
    tensor: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the host, in bytes."""

    limit: int
    """The least of the machine's memory and the limits of the instance's control groups."""
    serving: int
    """Private memory of all ranks together, while they serve and no update is under way."""
    processes: int


@dataclass(frozen=True, slots=True)
class AdoptedDisk:
    """File system of `adopted_weights`, in bytes."""

    path: Path
    total: int
    free: int
    held: int
    """Of versions that are there already."""
    in_memory: bool
    """True on tmpfs, whose files count against the memory limit."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of what is needed, by name."""

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
