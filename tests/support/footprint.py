"""What the processes of a platform hold, step by step: memory, open files, threads, and the keys of Redis.

Whether that grows is judged over the last half of the steps, by the median slope over all pairs of them (Theil and
Sen): a cache that fills at first, or an allocator that takes some megabytes at once, is no growth; what each step
leaves behind is. A straight line through the values would take a single jump for growth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median

import psutil
from redis import Redis

from services.local import Platform


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process and its descendants hold.

    `memory` is in bytes and without mapped files, whose pages the kernel drops when it needs room.
    """

    memory: float
    files: float
    threads: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Growth that is allowed a step: bytes, files, threads, and keys."""

    memory: float
    files: float
    threads: float
    keys: float


@dataclass(slots=True)
class Record:
    """Footprints of each process, and keys of Redis, after each step."""

    processes: dict[str, list[Footprint]] = field(default_factory=dict)
    keys: list[float] = field(default_factory=list)

    def add(self, processes: Mapping[str, Footprint], keys: int) -> None:
        """Add what is held after one more step."""
        for name, footprint in processes.items():
            self.processes.setdefault(name, []).append(footprint)
        self.keys.append(keys)

    def growth(self) -> dict[str, dict[str, float]]:
        """Return the growth a step over the last half, by process and kind; Redis has `keys` besides."""
        found = {
            name: {
                kind: growth([asdict(each)[kind] for each in held]) for kind in ("memory", "files", "threads")
            }
            for name, held in self.processes.items()
        }
        found.setdefault("redis", {})["keys"] = growth(self.keys)
        return found

    def above(self, limits: Limits) -> dict[str, float]:
        """Return what grows by more than it may, such as {"instance-0 memory": 150000.0}."""
        allowed = asdict(limits)
        return {
            f"{name} {kind}": round(value, 3)
            for name, kinds in self.growth().items()
            for kind, value in kinds.items()
            if value > allowed[kind]
        }


def growth(values: Sequence[float]) -> float:
    """Return the median slope over all pairs of the last half of values."""
    last = list(enumerate(values))[len(values) // 2 :]
    return median((b - a) / (there - here) for (here, a), (there, b) in combinations(last, 2))


def footprint(pid: int) -> Footprint:
    """Return what a process and its descendants hold now."""
    process = psutil.Process(pid)
    found = [_own(each) for each in (process, *process.children(recursive=True))]
    known = [each for each in found if each is not None]
    return Footprint(
        sum(each.memory for each in known),
        sum(each.files for each in known),
        sum(each.threads for each in known),
    )


def footprints(platform: Platform) -> dict[str, Footprint]:
    """Return what each process of a platform holds, with its Redis and the trainer, which is this process."""
    pids = {child.spec.name: child.pid for child in platform.processes}
    if platform.redis is not None and platform.redis.pid is not None:
        pids["redis"] = platform.redis.pid
    found = {name: footprint(pid) for name, pid in pids.items()}
    own = _own(psutil.Process())
    assert own is not None
    return {**found, "trainer": own}


def keys(platform: Platform) -> int:
    """Return the number of keys in the platform's Redis."""
    with Redis.from_url(platform.redis_url) as redis:
        return int(redis.dbsize())  # type: ignore[arg-type]


def _own(process: psutil.Process) -> Footprint | None:
    """Return what one process holds; None if it has ended meanwhile."""
    try:
        return Footprint(_anonymous(process.pid), process.num_fds(), process.num_threads())
    except (psutil.Error, OSError):
        return None


def _anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10
