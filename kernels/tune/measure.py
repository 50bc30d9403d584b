"""Times on the device, what bounds them, and the ceilings that bounds are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from kernels.tune import cases
from kernels.tuning import device_name

Timer = Callable[[Callable[[], Any]], float]
_HOST_RUNS = 50


def timer(device: torch.device, milliseconds: int) -> Timer:
    """Return what times a run: the median over about `milliseconds`, the L2 cache flushed before each.

    In the interpreter there is one run, by the clock: a number, and no measurement.
    """
    if device.type != "cuda":
        return _once

    def timed(run: Callable[[], Any]) -> float:
        from triton.testing import do_bench  # type: ignore[import-untyped]

        return float(do_bench(run, warmup=20, rep=milliseconds, return_mode="median")) / 1000

    return timed


def _once(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def ceilings(device: torch.device, sizes: cases.Sizes) -> dict[str, float]:
    """Measure what the device can do.

    Bytes a second of a large copy (read and written), operations a second of a large bfloat16 product, and words a
    second of nothing but Philox, the bound of a sampler that draws noise for every token.
    """
    from kernels.tune.philox import draw_words

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


def measured(case: cases.Case, ceilings: dict[str, float], timed: Timer) -> Iterator[dict[str, Any]]:
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
            taken = timed(maker())
        except Exception as error:  # Rivals come from libraries that may be absent or of another version.
            yield {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        ours = taken if name == "ours" else ours
        yield {
            **row,
            "seconds": taken,
            "bytes_per_second": case.moved / taken,
            "flops": case.flops / taken,
            "bound_by": bound_by,
            "of_bound": bounds[bound_by] / taken,
            "ours_is": None if ours is None else taken / ours,
        }


def host_time(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Measure how long the host takes to launch a sampling of what it has, and until it has the result."""
    logits = cases.logits_of(device, sizes, sizes.rows, 4.0)
    runs = _HOST_RUNS if device.type == "cuda" else 2
    result = {}
    for name, top_p in (("plain", None), ("top-p", 0.95)):
        run = cases.sampling_from_host(logits, top_p)
        launched, whole = [], []
        for _ in range(runs):
            _wait(device)
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


def about(device: torch.device) -> dict[str, Any]:
    """Return the machine and the software."""
    names = ("torch", "triton", "vllm", "flashinfer-python")
    return {"device": device_name(device), **{name: _version(name) for name in names}}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
