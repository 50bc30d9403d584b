"""Measure times on the device and on the host, and the ceilings that bounds are computed from; sweep parameters.

A sweep tries one launch parameter after the other, each with the best values of the earlier ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.kernels import cases
from bench.gpu.kernels.exact import captured
from kernels.short_query_attention.race import attending, random_step
from kernels.tuning import Run, Tuning, timer, using

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


@dataclass(frozen=True, slots=True)
class Sweep:
    """A parameter of `Tuning`, the values to try, and the runs by name that are timed with each."""

    parameter: str
    candidates: tuple[int | bool, ...]
    runs: Callable[[torch.device, cases.Sizes], dict[str, Run]]
    seconds: float


def swept(
    sweep: Sweep, chosen: Tuning, runs: dict[str, Run], timed: Callable[[Run], float]
) -> dict[str, Any]:
    """Time all runs with every candidate; the best has the smallest geometric mean of times.

    A candidate with which a run fails (too much shared memory, say) is rejected, with the error in its place.
    ValueError if all are rejected.
    """
    tried: list[dict[str, Any]] = []
    for candidate in sweep.candidates:
        row: dict[str, Any] = {"value": candidate}
        try:
            changed: dict[str, Any] = {sweep.parameter: candidate}
            with using(replace(chosen, **changed)):
                row["seconds"] = {name: timed(run) for name, run in runs.items()}
            row["mean"] = _mean(list(row["seconds"].values()))
        except Exception as error:  # Compilers raise many kinds of errors.
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            _raise_if_spoiled()
        tried.append(row)
    good = [row for row in tried if "mean" in row]
    if not good:
        raise ValueError(f"no value of {sweep.parameter} works: {tried[0]['error']}")
    return {"best": min(good, key=lambda row: row["mean"])["value"], "tried": tried}


def _raise_if_spoiled() -> None:
    """Raise if the device does not work any more, because the failure then does not concern one candidate."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _mean(times: Sequence[float]) -> float:
    return math.exp(sum(math.log(time) for time in times) / len(times))


def _attention(device: torch.device, sizes: cases.Sizes) -> dict[str, Run]:
    """Return runs: even and skewed batches, one request, verification, and a large group with long drafts."""
    alone, even, group = (1,), (sizes.requests,), (sizes.groups[-1],)
    wanted = {
        "even": random_step(device, sizes.step, "even", even[0]),
        "one long": random_step(device, sizes.step, "one long", even[0]),
        "alone": random_step(device, sizes.step, "even", alone[0]),
        "large group, long drafts": random_step(
            device, sizes.step, "log-normal", max(1, even[0] // 4), group=group[0], queries=sizes.queries[-1]
        ),
    }
    return {name: attending(step) for name, step in wanted.items()}


def _scan(device: torch.device, sizes: cases.Sizes) -> dict[str, Run]:
    return {
        f"{rows} rows": cases.sampling(cases.logits_of(device, sizes, rows, 4.0), None)
        for rows in sorted({1, 8, sizes.rows})
        if rows <= sizes.rows
    }


def _search(device: torch.device, sizes: cases.Sizes) -> dict[str, Run]:
    return {
        f"{rows} rows": cases.sampling(cases.logits_of(device, sizes, rows, 4.0), 0.95)
        for rows in sorted({1, 8, sizes.rows})
        if rows <= sizes.rows
    }


def _loss(device: torch.device, sizes: cases.Sizes) -> dict[str, Run]:
    forwards, both = cases.losses(device, sizes)
    return {"forwards": forwards, "and backwards": both}


def _copy(device: torch.device, sizes: cases.Sizes) -> dict[str, Run]:
    return cases.copies(device, sizes, "triton")


SWEEPS = (
    Sweep("attention_across", (32, 64, 128), _attention, 20),
    Sweep("attention_stages", (7, 5, 3, 2), _attention, 15),
    Sweep("attention_programs", (2, 1, 3, 4), _attention, 15),
    Sweep("attention_warps", (4, 8), _attention, 15),
    Sweep("attention_tile", (32, 16, 64, 128), _attention, 20),
    Sweep("attention_chunk", (256, 128, 512, 1024), _attention, 15),
    Sweep("wide_products", (True, False), _scan, 6),
    Sweep("scan_block", (1024, 512, 2048, 4096), _scan, 12),
    Sweep("scan_warps", (4, 2, 8), _scan, 10),
    Sweep("scan_stages", (3, 1, 2, 4), _scan, 12),
    Sweep("scan_programs", (4, 2, 8, 12), _scan, 8),
    Sweep("search_block", (1024, 512, 2048), _search, 12),
    Sweep("search_warps", (4, 8), _search, 10),
    Sweep("search_programs", (4, 2, 8), _search, 8),
    Sweep("loss_block", (2048, 1024, 4096, 8192), _loss, 15),
    Sweep("loss_warps", (8, 4, 16), _loss, 12),
    Sweep("loss_stages", (3, 1, 2, 4), _loss, 12),
    Sweep("copy_piece", (2048, 1024, 4096, 8192), _copy, 8),
)
