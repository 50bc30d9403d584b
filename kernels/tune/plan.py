"""The steps of a run, in the order of what depends on what: answers first, then ceilings, sweeps, the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.short_query_attention.choice import AttentionName, fastest
from kernels.tune import cases, engine_step, exact, graphs, measure, sweeps
from kernels.tune.race import RaceShape, backends, race
from kernels.tune.state import State
from kernels.tuning import Tuning, write

REAL = cases.Sizes()
TINY = cases.Sizes(
    requests=2, context=32, long=48, drafted=1, drafts=2, heads=2, kv_heads=1, head_size=16, rows=1,
    vocabulary=260, outputs=48, inputs=128, layers=2, blocks=9, packed_tokens=70, tokens=2, noise=8192,
    batches=(1,), groups=(4,), queries=(3,),
)  # fmt: skip
CANDIDATES_WITHOUT_DEVICE = 2


@dataclass(slots=True)
class Bench:
    """Inputs of all steps: the device, what was found so far, and where the parameters are to go."""

    device: torch.device
    state: State
    tuned: Path

    @property
    def sizes(self) -> cases.Sizes:
        """Settings to measure in; tiny ones in the interpreter."""
        return REAL if self.device.type == "cuda" else TINY

    @property
    def ceilings(self) -> dict[str, float]:
        """Measured ceilings. LookupError if that step has failed."""
        if "ceilings" not in self.state.done:
            raise LookupError("there are no ceilings: that step failed")
        return dict(self.state.done["ceilings"]["result"])


@dataclass(frozen=True, slots=True)
class Step:
    """One step: about how many seconds it takes on a device, and what it does."""

    name: str
    seconds: float
    run: Callable[[Bench], dict[str, Any]]


def steps(device: torch.device) -> list[Step]:
    """Return the plan for a device."""
    checks = exact.checks(device)
    plan = [Step(f"exact: {name}", seconds, partial(_exact, run)) for name, seconds, run in checks]
    plan.append(Step("compiled code", 40, lambda bench: graphs.resources(bench.device, bench.sizes)))
    plan.append(Step("CUDA graphs", 15, lambda bench: graphs.replayed(bench.device, bench.sizes)))
    plan += [
        Step(f"engine step: {name}", seconds, partial(_engine_step, run))
        for name, seconds, run in (
            ("nothing waits", 10, engine_step.unwaited),
            ("in a graph", 30, engine_step.replayed),
            ("beside a product", 15, engine_step.beside_product),
        )
    ]
    plan.append(Step("recompiles", 20, lambda bench: graphs.recompiles(bench.device, bench.sizes)))
    plan.append(Step("ceilings", 10, lambda bench: measure.ceilings(bench.device, bench.sizes)))
    # Before the sweeps, too: should the time be over after them, there is a table.
    plan += [Step(f"defaults: {name}", 25, partial(_table, name, ours=True)) for name in cases.CASES]
    plan.append(Step("attention backends", 10, _race))
    plan.append(Step("host time of sampling", 5, lambda bench: measure.host_time(bench.device, bench.sizes)))
    plan += [
        Step(f"sweep: {sweep.parameter}", sweep.seconds, partial(_sweep, sweep)) for sweep in sweeps.SWEEPS
    ]
    plan += [Step(f"exact, tuned: {name}", seconds, partial(_exact, run)) for name, seconds, run in checks]
    plan.append(Step("tuned parameters", 1, _write))
    plan += [Step(f"tuned: {name}", 40, partial(_table, name, ours=False)) for name in cases.CASES]
    return plan


def _exact(check: Callable[[torch.device, cases.Sizes], None], bench: Bench) -> dict[str, Any]:
    check(bench.device, bench.sizes)
    return {}


def _engine_step(run: Callable[[torch.device, cases.Sizes], dict[str, Any]], bench: Bench) -> dict[str, Any]:
    return run(bench.device, bench.sizes)


def _table(name: str, bench: Bench, *, ours: bool) -> dict[str, Any]:
    """Measure the cases of one kernel: with `ours`, without its rivals. Most of those need CUDA."""
    ceilings = bench.ceilings
    rows: list[dict[str, Any]] = []
    wanted = {"ours"} if ours else {"ours", "torch"} if bench.device.type != "cuda" else None
    for case in cases.CASES[name](bench.device, bench.sizes):
        makers = {name: maker for name, maker in case.makers.items() if wanted is None or name in wanted}
        timed = measure.timer(bench.device, 100 if ours else 300)
        rows.extend(measure.measured(replace(case, makers=makers), ceilings, timed))
    # A setting that ours fails in is a failure of the run, and the other settings are measured all the same.
    for row in rows:
        if row["by"] == "ours" and "error" in row:
            bench.state.failed[f"{name}, {row['setting']}"] = row["error"]
    return {"rows": rows}


def _race(bench: Bench) -> dict[str, Any]:
    """Time the attention backends as an engine does at its start, and say which it would take."""
    sizes = bench.sizes
    shape = RaceShape(
        sizes.heads, sizes.kv_heads, sizes.head_size, sizes.context, sizes.long, min(64, sizes.requests)
    )
    makers = backends(ours=True)
    if bench.device.type != "cuda":
        makers = {AttentionName.OURS: makers[AttentionName.OURS]}
    timings = list(race(bench.device, shape, makers))
    return {"timings": [asdict(timing) for timing in timings], "fastest": fastest(timings)}


def _sweep(sweep: sweeps.Sweep, bench: Bench) -> dict[str, Any]:
    """Try each value of one parameter with what is chosen so far, and keep the fastest."""
    runs = sweep.runs(bench.device, bench.sizes)
    if bench.device.type != "cuda":
        sweep = replace(sweep, candidates=sweep.candidates[:CANDIDATES_WITHOUT_DEVICE])
        runs = dict(list(runs.items())[-1:])
    found = sweeps.swept(sweep, Tuning(**bench.state.values), runs, measure.timer(bench.device, 60))
    bench.state.values[sweep.parameter] = found["best"]
    return found


def _write(bench: Bench) -> dict[str, Any]:
    """Write the parameters for the kernels to read, if every result was right with them."""
    checked = [f"exact, tuned: {name}" for name, _, _ in exact.checks(bench.device)]
    wrong = [step for step in checked if step not in bench.state.done]
    if wrong:
        raise ValueError(f"nothing is written, for these failed: {', '.join(wrong)}")
    chosen = Tuning(**bench.state.values)
    write(bench.tuned, chosen, bench.state.about)
    return {"path": str(bench.tuned), "values": asdict(chosen)}
