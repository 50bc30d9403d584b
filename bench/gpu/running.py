"""Run the steps in calls that resume an interrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu.host import OrderFailed, OrderLate, StartFailed, StartLate, WorkerHost
from bench.gpu.state import GpuStep, State, estimated, left, sources

DONE, FAILED, REFUSED, MORE = 0, 1, 2, 3
"""Exit statuses: all steps are done; all are done and some failed; nothing was run; out of time, call again."""
SLOWEST = 3.0
"""A step is ended after this many times its estimate plus a minute: one that starts an engine after 225 s."""
GRACE_SECONDS = 20
"""Seconds after the end of the call's time at which an unfinished step is ended; the next call repeats it."""
_ROOT = Path(__file__).parents[2]
SOURCES = tuple(_ROOT / part for part in ("kernels", "services/generation", "bench/gpu"))
"""Sources whose changes start a new run."""
Report = Callable[[State], None]


def run(
    steps: Sequence[GpuStep], host: WorkerHost, path: Path, until: float, model: str, report: Report
) -> int:
    """Run the remaining steps.

    Args:
        steps: the steps; the first one is the environment.
        host: runs the processes that carry out the steps.
        path: file of the state.
        until: end of the call, in seconds of the monotonic clock.
        model: name of the model, by which runs are distinguished.
        report: called after every step.

    Returns:
        The exit status.

    Raises:
        OtherRun: the state belongs to another run.
        OrderFailed, OrderLate: the environment step failed.
    """
    first = steps[0]
    began = time.monotonic()
    about = host.ask(first.setup, first.order, first.arguments, _limit(first, starts=True))
    known = {name: about[name] for name in ("device", "torch", "triton", "vllm")}
    state = State.resume(path, {**known, "model": model, "sources": sources(SOURCES)})
    if not state.over(first.name):
        state.begin(first.name)
        state.finish(first.name, about, None)
    _say(f"{about['device']}; environment, {time.monotonic() - began:.1f} s")
    ran = False
    for number, step in enumerate(steps, 1):
        if state.over(step.name):
            continue
        begin, starts = time.monotonic(), not host.has(step.setup)
        # Run at least one step, or a run whose steps are longer than its calls would never end.
        if ran and begin + estimated(step, starts=starts) > until:
            # A later step may be shorter.
            continue
        _say(f"[{number}/{len(steps)}] {step.name} ...")
        limit = _limit(step, starts=starts)
        if not _run(step, steps, host, state, min(limit, until + GRACE_SECONDS - begin), limit):
            return _more(state, steps, f"the time is over in {step.name!r}, which is done again")
        ran = True
        report(state)
        _say(f"    about {left(state, steps):.0f} s left")
    if any(not state.over(step.name) for step in steps):
        return _more(state, steps, "the time is over")
    report(state)
    _say(f"done; failed: {', '.join(state.failed) or 'nothing'}")
    return FAILED if state.failed else DONE


def _limit(step: GpuStep, *, starts: bool) -> float:
    return 60 + SLOWEST * estimated(step, starts=starts)


def _run(
    step: GpuStep, steps: Sequence[GpuStep], host: WorkerHost, state: State, seconds: float, limit: float
) -> bool:
    """Run a step and record it; return False if the end of the call interrupted it."""
    state.begin(step.name)
    result, error, started = None, None, True
    try:
        result = host.ask(step.setup, step.order, {**step.arguments, **step.more(state)}, seconds)
    except LookupError as missing:
        error = f"{missing} failed, or was left out, whose result it needs"
    except OrderFailed as failed:
        error, started = str(failed), not isinstance(failed, StartFailed)
    except OrderLate as late:
        if seconds < limit:
            state.drop()
            return False
        error, started = str(late), not isinstance(late, StartLate)
    if not started:
        # Another start would fail as well, and take as long.
        others = [each for each in steps if each.setup == step.setup and not state.over(each.name)]
        why = f"its process did not start, as for {step.name!r}"
        state.failed |= {each.name: why for each in others if each is not step}
    took = state.finish(step.name, result, error)
    _say(f"    {'ok' if error is None else 'FAILED: ' + last_line(error)}, {took:.1f} s")
    return True


def last_line(error: str) -> str:
    """Return the last line of a traceback, which has the error."""
    return error.strip().rpartition("\n")[2]


def _more(state: State, steps: Sequence[GpuStep], why: str) -> int:
    _say(f"{why}; about {left(state, steps):.0f} s left: call again")
    return MORE


def _say(line: str) -> None:
    print(line, flush=True)
