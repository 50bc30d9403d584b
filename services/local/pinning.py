"""Which cores or GPU an instance gets, and how its process is told. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Runs before the real program: threads that it starts inherit the cores.
_PIN = """
import os, sys
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
os.execv(sys.argv[2], sys.argv[2:])
"""


def share_cores(cores: Sequence[int], instances: int, index: int) -> tuple[int, ...]:
    """The cores of one of `instances`: equal shares, none empty; shared only when there are too few cores."""
    each = len(cores) // instances
    if each == 0:
        return (cores[index % len(cores)],)
    return tuple(cores[index * each : (index + 1) * each])


def cpu_list(cores: Sequence[int]) -> str:
    """As taskset and vLLM read it: 0,1,2."""
    return ",".join(map(str, cores))


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """`command` (its first word a path) as to be started to stay on these cores; none given: on all.

    Linux only; elsewhere the command is returned as it is.
    """
    if not cores or sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PIN, cpu_list(cores), *command]


def cpu_environment(cores: Sequence[int]) -> dict[str, str]:
    """Threads for an instance on these cores."""
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": cpu_list(cores),
    }


def cuda_environment(visible: str | None, gpus: int, index: int) -> dict[str, str]:
    """One GPU for an instance, out of those visible to the launcher."""
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[index % len(names)]}
