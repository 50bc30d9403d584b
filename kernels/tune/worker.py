"""The process that runs steps. One that ends it, or spoils the device for it, costs that step and no other."""

from __future__ import annotations

import gc
import time
import traceback
from pathlib import Path

import torch

from kernels import backend
from kernels.tune import report
from kernels.tune.plan import Bench, Step, steps
from kernels.tune.state import State
from kernels.tuning import Tuning, using

MORE, ANEW = 3, 4
"""Exit statuses: the time of this slice is over; the device's context is spoiled, start another worker."""


def work(device: torch.device, path: Path, tuned: Path, until: float) -> int:
    """Run what is left of the plan until `until` (seconds since the epoch); return the exit status."""
    state = State.load(path)
    assert state is not None
    backend.use("triton")
    bench = Bench(device, state, tuned)
    plan = steps(device)
    for index, step in enumerate(plan):
        if state.over(step.name):
            continue
        if time.time() + step.seconds > until:
            _say(f"slice over before {step.name!r}; about {left(state, plan):.0f} s left")
            return MORE
        _say(f"[{index + 1}/{len(plan)}] {step.name} ...")
        whole = run(step, bench)
        _say(f"    {'ok' if step.name in state.done else 'FAILED: ' + state.failed[step.name]}")
        _say(f"    about {left(state, plan):.0f} s left")
        if not whole:
            return ANEW
    return 1 if state.failed else 0


def run(step: Step, bench: Bench) -> bool:
    """Run a step and record it; return whether the device can be used on."""
    state = bench.state
    state.begin(step.name)
    try:
        with using(Tuning(**state.values)):
            result, error = step.run(bench), None
    except Exception as problem:  # Whatever it is, the other steps are to run.
        result, error = None, f"{type(problem).__name__}: {str(problem)[:500]}"
        if isinstance(problem, AssertionError):
            error += traceback.format_exc()[-500:]
    seconds = state.finish(step.name, result, error)
    report.write(state)
    _say(f"    {seconds:.1f} s")
    gc.collect()
    if bench.device.type != "cuda":
        return True
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def left(state: State, plan: list[Step]) -> float:
    """Return the estimated seconds of the steps that are left, corrected by how the others went."""
    done = [(state.done[step.name]["seconds"], step.seconds) for step in plan if step.name in state.done]
    rate = sum(took for took, _ in done) / max(1.0, sum(planned for _, planned in done)) if done else 1.0
    return sum(step.seconds for step in plan if not state.over(step.name)) * rate


def _say(line: str) -> None:
    print(line, flush=True)
