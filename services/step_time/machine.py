"""Compute device of this machine, and its name in saved sweeps."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def on_cpu() -> bool:
    """Return True if engines run on the CPU, because no GPU is visible. Does not initialise CUDA."""
    return not Path("/dev/nvidiactl").exists()


def machine_name() -> str:
    """Return the processor and how many of its cores this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(found, platform.processor() or platform.machine())
    return f"{processor} x{len(os.sched_getaffinity(0))}"
