"""Launch processes that end with their parent and report when they are ready, and share cores among them.

The ready file is JSON that a process writes for its launcher once it takes calls. Lists of cores have the notation
of taskset and vLLM: `0-2,7` is four cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Runs in the child before the program itself. The kernel sends the signal when the thread that started the child
# ends; if the parent ended before the prctl call, its process id has changed.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` as a child that the kernel kills when this process ends.

    Linux only; elsewhere `command` is returned unchanged. `command[0]` must be a path. The child dies even if this
    process is killed with SIGKILL. Start it from the main thread: it dies with the thread that started it.
    """
    if sys.platform != "linux":
        return list(command)
    # Not a preexec_fn: running Python between fork and exec is unsafe while gRPC has threads.
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


@dataclass(frozen=True, slots=True)
class ProcessEndpoint:
    """Process id and addresses of a ready process."""

    pid: int
    address: str
    """host:port of its gRPC server."""
    metrics_port: int


def write_ready_file(path: Path, address: str, metrics_port: int) -> None:
    """Write the endpoint of this process atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(asdict(ProcessEndpoint(os.getpid(), address, metrics_port))))
    part.replace(path)


def read_ready_file(path: Path | None) -> ProcessEndpoint | None:
    """Return the endpoint of a ready process; None before it is ready."""
    if path is None or not path.exists():
        return None
    values = json.loads(path.read_text())
    return ProcessEndpoint(values["pid"], values["address"], values["metrics_port"])


def share_cores(cores: Sequence[int], shares: int, index: int) -> tuple[int, ...]:
    """Return one of `shares` equal shares of the cores; shares overlap only if there are too few cores."""
    each = len(cores) // shares
    if each == 0:
        return (cores[index % len(cores)],)
    return tuple(cores[index * each : (index + 1) * each])


def cpu_list(cores: Sequence[int]) -> str:
    """Return a list of cores in the notation of taskset and vLLM: 0,1,2."""
    return ",".join(map(str, cores))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the cores of a list such as `0-2,7`; ValueError if it is invalid."""
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        cores = []
    if not cores:
        raise ValueError(f"{text!r} is no list of cores")
    return tuple(cores)


def bind_ranks(cores: str | None, ranks: int) -> str | None:
    """Return the cores of each rank on a CPU in vLLM's notation, such as 0,1|2,3; None leaves them to vLLM.

    By default vLLM binds each rank to a NUMA node, and does not start with fewer nodes than ranks.

    Args:
        cores: the instance's cores, such as 0-3, or the cores of each rank; None: all that the process may use. A
            keyword of vLLM, such as nobind, is returned unchanged.
        ranks: tensor-parallel size.

    Raises:
        ValueError: `cores` is none of these.
    """
    if ranks == 1 or (cores is not None and ("|" in cores or cores.isalpha())):
        return cores
    usable = parse_cpu_list(cores) if cores else sorted(os.sched_getaffinity(0))
    return "|".join(cpu_list(share_cores(usable, ranks, rank)) for rank in range(ranks))
