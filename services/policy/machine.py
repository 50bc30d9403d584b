"""What engines of this machine compute on, and what it is called in calibrations."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def on_cpu() -> bool:
    """Whether engines compute on the processor: no GPU is to be seen. CUDA is not started."""
    return not Path("/dev/nvidiactl").exists()


def machine_name() -> str:
    """The processor and how many of its cores this process may use."""
    return f"{_processor()} x{len(os.sched_getaffinity(0))}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())
