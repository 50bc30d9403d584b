"""Share cores or GPUs of this machine out among instances."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from services.local.config import PlatformConfig
from services.local.machine import chooses_cuda
from services.platform.cores import cpu_list, share_cores
from services.step_time.machine import driver_gpus

# Runs before the real program: threads that it starts inherit the cores.
_PIN = """
import os, sys
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
os.execv(sys.argv[2], sys.argv[2:])
"""


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """Return the command that runs `command` on these cores only; without cores, on all.

    Its first word must be a path. Linux only; elsewhere `command` is returned unchanged.
    """
    if not cores or sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PIN, cpu_list(cores), *command]


def cpu_environment(cores: Sequence[int]) -> dict[str, str]:
    """Return the variables that bind the threads of an instance to its cores."""
    return {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": cpu_list(cores)}


def cuda_environment(visible: str | None, gpus: int, index: int) -> dict[str, str]:
    """Return the variable that gives an instance one GPU of those visible to the launcher."""
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[index % len(names)]}


def share_of_machine(config: PlatformConfig, index: int) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return environment and cores that give an instance its share of this machine."""
    gpus = driver_gpus()
    if chooses_cuda(config.device, gpus):
        return cuda_environment(os.environ.get("CUDA_VISIBLE_DEVICES"), max(1, gpus), index), ()
    if not config.pin:
        return {}, ()
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = share_cores(sorted(affinity), config.instances, index)
    return cpu_environment(cores), cores
