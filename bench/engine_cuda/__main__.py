"""First minutes of the engines on a GPU, in slices that go on where the last one stopped.

    python -m bench.engine_cuda [--model DIR] [--out runs/engine_cuda] [--seconds 500]

For V1, V2, V2 scheduling ahead, and vLLM with its own defaults: tokens, which must be the same with drafts and
without, on all of ours, and on V1 with draft trees; step times by samples and context, and by drafts; how long the
device idles between two steps; graphs captured and hit; what a step waits for, and what it copies; attention and
sampling by themselves; the host's time for drafts; memory. docs/one-gpu.md says what each figure means.

A call ends after `--seconds`, a minute later at the latest. Status 0: all is done; 1: all is done, and steps
failed; 2: no such device, or another run's folder; 3: call again. In the folder are state.json, which has
everything, and report.md.

`--model` is a folder in Hugging Face layout; one with a config.json and no weights gets random ones, beside it in
`--out`. Without it the model is a random Qwen3 of half a billion parameters. `--device cpu` runs every step on a
tiny model, V2 in Triton's interpreter: to test this program, not to measure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.engine_cuda import report
from bench.engine_cuda.host import OrderFailed, OrderLate, WorkerHost
from bench.engine_cuda.kinds import CudaSizes, EngineKind
from bench.engine_cuda.models import model_folder
from bench.engine_cuda.plan import CudaStep, estimated, left, steps
from kernels.tune.state import OtherRun, State, sources

DONE, FAILED, NO_DEVICE, MORE = 0, 1, 2, 3
STEP_SECONDS = 400
"""Longest that a step may take, its engine's start included."""
_GRACE_SECONDS = 60
SOURCES = tuple(
    Path(__file__).parents[2] / part for part in ("kernels", "services/generation", "bench/engine_cuda")
)
"""A change of these begins a run anew."""
TINY = CudaSizes(
    rows=(1, 2), contexts=(12,), drafts=(2,), wrong=(0.2,), drafted_rows=(2,), steps=2, exact=3, tokens=8,
    kv_bytes=8 << 20, kinds=(EngineKind.STOCK, EngineKind.V1, EngineKind.AHEAD, EngineKind.TREES),
)  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """Run or go on with a run; return the exit status."""
    options = _parsed(given)
    sizes = TINY if options.device == "cpu" else CudaSizes()
    until = time.monotonic() + options.seconds
    if options.device == "cuda" and not _has_device():
        print("bench.engine_cuda: no CUDA device here; nothing was run and nothing written", file=sys.stderr)
        return NO_DEVICE
    path = options.out / "state.json"
    if options.fresh:
        path.unlink(missing_ok=True)
    model = model_folder(options.model, options.out / "model", tiny=options.device == "cpu")
    dtype = "float32" if options.device == "cpu" else options.dtype
    with WorkerHost(sizes) as host:
        return run_slice(steps(model, dtype, sizes), host, path, until, str(model))


def run_slice(plan: Sequence[CudaStep], host: WorkerHost, path: Path, until: float, model: str) -> int:
    """Run what is left of a plan until the time (monotonic, seconds); return the exit status."""
    first = plan[0]
    about = host.ask(first.setup, first.order, first.arguments, STEP_SECONDS)
    known = {name: about[name] for name in ("device", "torch", "triton", "vllm")}
    try:
        state = State.resume(path, {**known, "model": model, "sources": sources(*SOURCES)})
    except OtherRun as error:
        print(f"bench.engine_cuda: {error}", file=sys.stderr)
        return NO_DEVICE
    if not state.over(first.name):
        state.begin(first.name)
        state.finish(first.name, about, None)
    ran = False
    for number, step in enumerate(plan, 1):
        if state.over(step.name):
            continue
        begin = time.monotonic()
        # One step at least, or a run whose steps are longer than its slices would never end.
        if ran and begin + estimated(step, starts=not host.has(step.setup)) > until:
            return _more(state, plan, f"slice over before {step.name!r}")
        _say(f"[{number}/{len(plan)}] {step.name} ...")
        if not _run(step, host, state, min(STEP_SECONDS, until + _GRACE_SECONDS - begin)):
            return _more(state, plan, f"slice over in {step.name!r}, which is done again")
        ran = True
        report.write(state, plan)
        _say(f"    about {left(state, plan):.0f} s left")
    report.write(state, plan)
    _say(f"done. Report: {path.parent / 'report.md'}; failed: {', '.join(state.failed) or 'nothing'}")
    return FAILED if state.failed else DONE


def _run(step: CudaStep, host: WorkerHost, state: State, seconds: float) -> bool:
    """Run a step and record it; return False for one that the slice's end cut off."""
    state.begin(step.name)
    result, error = None, None
    try:
        result = host.ask(step.setup, step.order, {**step.arguments, **step.more(state)}, seconds)
    except LookupError as missing:
        error = f"{missing} failed, whose result it needs"
    except OrderFailed as failed:
        error = str(failed)
    except OrderLate as late:
        if seconds < STEP_SECONDS:
            state.running = None
            state.save()
            return False
        error = str(late)
    took = state.finish(step.name, result, error)
    _say(f"    {'ok' if error is None else 'FAILED: ' + error.strip().rpartition(chr(10))[2]}, {took:.1f} s")
    return True


def _more(state: State, plan: Sequence[CudaStep], why: str) -> int:
    _say(
        f"{why}; about {left(state, plan):.0f} s left: call again. So far: {state.path.parent / 'report.md'}"
    )
    return MORE


def _has_device() -> bool:
    """Return whether there is a CUDA device, without a context of this process on it."""
    import torch

    return torch.cuda.device_count() > 0


def _say(line: str) -> None:
    print(line, flush=True)


def _parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine_cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="folder with a config.json, and weights unless random ones do"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the engines that are measured (default bfloat16)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/engine_cuda"))
    parser.add_argument("--seconds", type=float, default=500, help="of this call (default 500)")
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
