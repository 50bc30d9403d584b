"""Launch processes that end with their parent, report when they are ready, and share cores.

A child is tied to its parent even if the parent is killed with SIGKILL. The ready file is JSON that a process
writes for its launcher once it takes calls. Cores are written as by taskset and vLLM: `0-2,7` is four cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Runs in the child before it becomes the real program. The kernel sends the signal when the thread that
# started the child ends; a parent that was gone before that was arranged shows as a changed parent id.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` as a child that the kernel kills when this process ends.

    Linux only; elsewhere `command` is returned unchanged. `command[0]` must be a path. Start it from the main
    thread: the child dies with the thread that started it.
    """
    if sys.platform != "linux":
        return list(command)
    # Not a preexec_fn: running Python between fork and exec is unsafe beside the threads of gRPC.
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


@dataclass(frozen=True, slots=True)
class ProcessEndpoint:
    """Process id and addresses of a ready process."""

    pid: int
    address: str
    """host:port of its gRPC server."""
    metrics_port: int


def write_ready_file(path: Path, address: str, metrics_port: int) -> None:
    """Write the endpoint of this process; a reader never sees a part of it."""
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
    """Return one of `shares` equal shares of cores, which overlap only if there are too few cores."""
    each = len(cores) // shares
    if each == 0:
        return (cores[index % len(cores)],)
    return tuple(cores[index * each : (index + 1) * each])


def cpu_list(cores: Sequence[int]) -> str:
    """Return a list of cores in the notation of taskset and vLLM: 0,1,2."""
    return ",".join(map(str, cores))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the cores that a list such as `0-2,7` names. ValueError if it is none."""
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


def bind_ranks(told: str | None, ranks: int) -> str | None:
    """Return the cores of each rank on a CPU in vLLM's notation, such as 0,1|2,3; None leaves them to vLLM.

    Left to itself vLLM gives a rank a NUMA node, and does not start where there are fewer nodes than ranks.

    Args:
        told: the instance's cores, such as 0-3, or those of each rank; None: all that the process may use. A word
            of vLLM's, such as nobind, is returned as it is.
        ranks: tensor-parallel size.

    Raises:
        ValueError: `told` is none of these.
    """
    if ranks == 1 or (told is not None and ("|" in told or told.isalpha())):
        return told
    cores = parse_cpu_list(told) if told else sorted(os.sched_getaffinity(0))
    return "|".join(cpu_list(share_cores(cores, ranks, rank)) for rank in range(ranks))
