"""Time runs on a device; name the device and the versions of the software."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kernels.tuning import device_name

Run = Callable[[], Any]
Timer = Callable[[Run], float]
_SOFTWARE = ("torch", "triton", "vllm", "flashinfer-python")


def timer(device: torch.device, milliseconds: int) -> Timer:
    """Return what times a run in seconds: the median over about `milliseconds`, the L2 cache flushed before each.

    A run that the host launches more slowly than the device works takes as long as its launches do. Without a CUDA
    device a run is timed once, by the clock: a number, and no measurement.
    """
    if device.type != "cuda":
        return _once

    def timed(run: Run) -> float:
        from triton.testing import do_bench  # type: ignore[import-untyped]

        return float(do_bench(run, warmup=20, rep=milliseconds, return_mode="median")) / 1000

    return timed


def _once(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def about(device: torch.device) -> dict[str, Any]:
    """Return the device's name, and the versions of the software; None for what is not installed."""
    return {"device": device_name(device), **{name: _version(name) for name in _SOFTWARE}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
