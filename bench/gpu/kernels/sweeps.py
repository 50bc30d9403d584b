"""Sweep one launch parameter after the other, each with the best values of the earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.kernels import cases
from kernels.short_query_attention.race import attending, random_step
from kernels.tuning import Run, Tuning, using


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
