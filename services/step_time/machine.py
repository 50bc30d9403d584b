"""Compute device of this machine, and its name in saved sweeps."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path


def on_cpu() -> bool:
    """Return True if engines run on the CPU, because no GPU is visible. Does not initialise CUDA."""
    return gpu_count() == 0


def gpu_count() -> int:
    """Return how many NVIDIA GPUs this process may use, by the driver (NVML) and CUDA_VISIBLE_DEVICES.

    Device files are not enough: in a container, or a sandbox, the driver may be reached without them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return driver_gpus()
    # CUDA uses the names up to the first invalid one.
    names = [name.strip() for name in visible.split(",")]
    wanted = next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return min(wanted, driver_gpus())


@cache
def driver_gpus() -> int:
    """Return how many NVIDIA GPUs the driver has, without starting CUDA; 0 where there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def machine_name() -> str:
    """Return the processor and how many of its cores this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(found, platform.processor() or platform.machine())
    return f"{processor} x{len(os.sched_getaffinity(0))}"
