"""Measure times on the device and on the host, and the ceilings that bounds are computed from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.kernels import cases
from bench.gpu.kernels.graphs import captured
from kernels.tuning import Run, timer

_HOST_RUNS = 30


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of a run on the device, and of the host until it has launched it.

    With `in_graph` the run was captured, so `seconds` contains no host time. Otherwise a short run takes as long as
    its launches.
    """

    seconds: float
    host_seconds: float
    in_graph: bool


TakenBy = Callable[[Run], Taken]


def taker(device: torch.device, milliseconds: int) -> TakenBy:
    """Return a function that times a run on the device for about `milliseconds`, in a CUDA graph where possible."""
    timed = timer(device, milliseconds)

    def taken(run: Run) -> Taken:
        run()
        if device.type != "cuda":
            return Taken(timed(run), timed(run), in_graph=False)
        host = launching(device, run)
        try:
            replay = captured(device, run)
        except RuntimeError:
            # A run that waits for the device, or copies memory that the host has not pinned, cannot be captured.
            torch.cuda.synchronize(device)
            return Taken(timed(run), host, in_graph=False)
        return Taken(timed(replay), host, in_graph=True)

    return taken


def launching(device: torch.device, run: Run) -> float:
    """Return the median seconds until the host has launched a run."""
    found = []
    for _ in range(_HOST_RUNS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return median(found)


def ceilings(device: torch.device, sizes: cases.Sizes) -> dict[str, float]:
    """Measure the ceilings of the device.

    They are bytes a second of a large copy (read and written), operations a second of a large bfloat16 product, and
    words a second of Philox alone, the bound of a sampler that draws noise for every token.
    """
    from bench.gpu.kernels.philox import draw_words

    timed = timer(device, 100)
    count, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 12, 16)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=device).bfloat16()
    words = {
        f"words_{name}": sizes.noise / timed(partial(draw_words, device, sizes.noise, wide))
        for name, wide in (("wide", True), ("narrow", False))
    }
    return {
        "bytes_per_second": 2 * count / timed(lambda: target.copy_(source)),
        "flops": 2 * side**3 / timed(lambda: a @ b),
        "words_per_second": max(words.values()),
        **words,
    }


def measured(case: cases.Case, ceilings: dict[str, float], taken: TakenBy) -> Iterator[dict[str, Any]]:
    """Yield a row per implementation; one that cannot run here has its error instead of figures."""
    bounds = {
        "memory": case.moved / ceilings["bytes_per_second"],
        "products": case.flops / ceilings["flops"],
        "noise": case.words / ceilings["words_per_second"],
    }
    bound_by = max(bounds, key=lambda name: bounds[name])
    ours = None
    for name, maker in case.makers.items():
        row: dict[str, Any] = {"kernel": case.kernel, "setting": case.setting, "by": name}
        try:
            found = taken(maker())
        except Exception as error:  # Rivals come from libraries that may be absent or of another version.
            yield {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        ours = found.seconds if name == "ours" else ours
        yield {
            **row,
            "seconds": found.seconds,
            "host_seconds": found.host_seconds,
            "in_graph": found.in_graph,
            "bytes_per_second": case.moved / found.seconds,
            "flops": case.flops / found.seconds,
            "bound_by": bound_by,
            "of_bound": bounds[bound_by] / found.seconds,
            "ours_is": None if ours is None else found.seconds / ours,
        }


def host_time(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Measure how long the host takes to launch a sampling of host inputs, and until it has the result."""
    logits = cases.logits_of(device, sizes, sizes.rows, 4.0)
    runs = _HOST_RUNS if device.type == "cuda" else 2
    result = {}
    for name, top_p in (("plain", None), ("top-p", 0.95)):
        run = cases.sampling_from_host(logits, top_p)
        launched, whole = [], []
        for _ in range(runs):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            made = run()
            launched.append(time.perf_counter() - begin)
            made.to_host()
            whole.append(time.perf_counter() - begin)
        result[name] = {
            "launch_seconds": median(launched),
            "seconds": median(whole),
            "device_seconds": timer(device, 50)(run),
        }
    return result
