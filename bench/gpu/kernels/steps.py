"""Define the kernel steps in order of their dependencies: answers, ceilings, times, sweeps, times again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.kernels import cases, engine_step, exact, measure
from bench.gpu.running import CEILINGS, KERNELS, SWEEP, TUNED_CHECKS
from kernels.tuning import Tuning, about, device_name, path_for, write

REAL = cases.Sizes()
TINY = cases.Sizes(
    requests=2, context=32, long=48, drafted=1, drafts=2, heads=2, kv_heads=1, head_size=16, rows=1,
    vocabulary=260, outputs=48, inputs=128, layers=2, blocks=9, packed_tokens=70, tokens=2, noise=8192,
    batches=(1,), groups=(4,), queries=(3,),
)  # fmt: skip
CANDIDATES_WITHOUT_DEVICE = 2


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Inputs of a step: the device, the folder for parameters, and results of other steps (`KernelOrders.step`)."""

    device: torch.device
    tuned: Path
    found_ceilings: Mapping[str, float] | None
    values: Mapping[str, Any]
    wrong: Sequence[str]

    @property
    def sizes(self) -> cases.Sizes:
        """Settings to measure in; tiny ones in the interpreter."""
        return REAL if self.device.type == "cuda" else TINY

    @property
    def ceilings(self) -> dict[str, float]:
        """Measured ceilings. LookupError if that step has failed."""
        if self.found_ceilings is None:
            raise LookupError("there are no ceilings: that step failed, or was left out")
        return dict(self.found_ceilings)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One step: its approximate seconds on a device, and its function. `brief` steps are part of a brief run."""

    name: str
    seconds: float
    run: Callable[[KernelBench], dict[str, Any]]
    brief: bool = False


def kernel_steps(device: str) -> list[KernelStep]:
    """Return the steps for a device, "cuda" or "cpu"."""
    checks = exact.checks(torch.device(device))
    # The checks that an engine runs at its start are left to it.
    brief = {"noise", "masks", "near ties"}
    plan = [
        KernelStep(f"{KERNELS}exact: {name}", seconds, partial(_exact, run), name in brief)
        for name, seconds, run in checks
    ]
    plan += [
        KernelStep(name, seconds, partial(_on_device, run), True)
        for name, seconds, run in (
            (CEILINGS, 10, measure.ceilings),
            (f"{KERNELS}engine step: nothing waits", 5, engine_step.unwaited),
            (f"{KERNELS}engine step: in a graph", 10, engine_step.replayed),
            (f"{KERNELS}engine step: beside a product", 8, engine_step.beside_product),
        )
    ]
    # Also before the sweeps, so that there is a table if the time is over after them.
    plan += [
        KernelStep(f"{KERNELS}defaults: {name}", 15, partial(_table, name), name in ("attention", "sampler"))
        for name in cases.CASES
    ]
    plan += [
        KernelStep(f"{KERNELS}{name}", seconds, partial(_on_device, run), run is measure.host_time)
        for name, seconds, run in (
            ("host time of sampling", 5, measure.host_time),
            ("compiled code", 40, exact.resources),
            ("CUDA graphs", 15, exact.replayed),
            ("recompiles", 20, exact.recompiles),
        )
    ]
    plan += [
        KernelStep(f"{SWEEP}{sweep.parameter}", sweep.seconds, partial(_sweep, sweep))
        for sweep in measure.SWEEPS
    ]
    plan += [
        KernelStep(f"{TUNED_CHECKS}{name}", seconds, partial(_exact, run)) for name, seconds, run in checks
    ]
    plan.append(KernelStep(f"{KERNELS}tuned parameters", 1, _write))
    plan += [KernelStep(f"{KERNELS}tuned: {name}", 15, partial(_table, name)) for name in cases.CASES]
    return plan


def _exact(check: Callable[[torch.device, cases.Sizes], None], bench: KernelBench) -> dict[str, Any]:
    check(bench.device, bench.sizes)
    return {}


def _on_device(
    run: Callable[[torch.device, cases.Sizes], Mapping[str, Any]], bench: KernelBench
) -> dict[str, Any]:
    return dict(run(bench.device, bench.sizes))


def _table(name: str, bench: KernelBench) -> dict[str, Any]:
    """Measure the cases of one kernel and its rivals, most of which need CUDA.

    If ours fails in a setting, the run has a failure, but the other settings are still measured.
    """
    ceilings = bench.ceilings
    rows: list[dict[str, Any]] = []
    wanted = {"ours", "torch"} if bench.device.type != "cuda" else None
    for case in cases.CASES[name](bench.device, bench.sizes):
        makers = {name: maker for name, maker in case.makers.items() if wanted is None or name in wanted}
        taken = measure.taker(bench.device, 60)
        rows.extend(measure.measured(replace(case, makers=makers), ceilings, taken))
    failed = {
        f"{name}, {row['setting']}": row["error"] for row in rows if row["by"] == "ours" and "error" in row
    }
    return {"rows": rows, "failed": failed}


def _sweep(sweep: measure.Sweep, bench: KernelBench) -> dict[str, Any]:
    """Try each value of one parameter with the values chosen so far, and keep the fastest."""
    runs = sweep.runs(bench.device, bench.sizes)
    if bench.device.type != "cuda":
        sweep = replace(sweep, candidates=sweep.candidates[:CANDIDATES_WITHOUT_DEVICE])
        runs = dict(list(runs.items())[-1:])
    taken = measure.taker(bench.device, 60)
    return measure.swept(sweep, Tuning(**bench.values), runs, lambda run: taken(run).seconds)


def _write(bench: KernelBench) -> dict[str, Any]:
    """Write the parameters for the kernels to read, if every result was right with them."""
    if bench.wrong:
        raise ValueError(f"nothing is written, for these failed: {', '.join(bench.wrong)}")
    chosen = Tuning(**bench.values)
    path = path_for(device_name(bench.device), bench.tuned)
    write(path, chosen, about(bench.device))
    return {"path": str(path), "values": asdict(chosen)}
