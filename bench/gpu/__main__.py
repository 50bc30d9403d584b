"""Check answers, step times and kernels of Paceline on a GPU, most important first, in resumable calls.

    python -m bench.gpu [--brief] [--seconds 500] [--only GLOB ...] [--model q17|q8|DIR] [--out runs/gpu]

Parts, in order: vLLM's libraries against float32; tokens of V1, which must be the same with drafts and without;
step times of V1, plainly and with drafts; the same of stock vLLM; the kernels; V2, and V2 scheduling ahead; replays
of a text by Paceline and by stock vLLM with its own speculation; the batch-invariant mode, in which no token may
differ in bfloat16 either; draft models; V1 and stock with other graphs; then all other cells, trees, float32, and
sweeps of launch parameters. bench/gpu/README.md explains each figure. `--brief` runs the first steps of the first
parts, and ends within 340 s by its own estimates. `--list` prints the steps.

A call ends after `--seconds`, at most half a minute later, and the next call resumes the run. Status 0: all steps
are done. Status 1: all are done, and some failed. Status 2: nothing was run (no device, another run's folder, a
wrong option). Status 3: call again. The folder has results.jsonl, with a line for each finished step; state.json,
from which a run resumes, also on another machine of the same kind; report.md; gpu.json, its main tables as data,
which `python -m bench.nightly --publish gpu` takes from runs/bench; and tuned/, launch parameters for
kernels/tuned.

`--model` is q17 or q8, the shapes of Qwen3-1.7B and 8B with random weights that are drawn on the device, or a
folder in Hugging Face layout. With q17, replays take the shape q8. Configs and draft heads are made in
runs/gpu-models, not among the results. `--device cpu` runs every part on tiny shapes in Triton's interpreter; it
tests the program and measures nothing. Without vLLM the kernel parts run, and all others fail at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import report
from bench.gpu.engines.setup import PREFILL, model_folder
from bench.gpu.plan import GpuSubject, chosen, plan
from bench.gpu.running import (
    LINES,
    REFUSED,
    GpuStep,
    OrderFailed,
    OrderLate,
    OtherRun,
    State,
    WorkerHost,
    estimated,
    run,
    total,
)
from bench.gpu.sizes import TINY, GpuSizes, Graphs
from bench.report import keep, option_parser
from services.step_time.machine import gpu_count

BRIEF_SECONDS = 340.0
MADE = Path("runs/gpu-models")
"""Folder for configs of models and for draft heads, of which the latter are large."""


def main(given: Sequence[str] | None = None) -> int:
    """Start or resume a run; return the exit status."""
    options = _parsed(given)
    if options.device == "cuda" and gpu_count() == 0 and not options.list:
        return _refused("no CUDA device here; nothing was run and nothing written")
    try:
        steps = chosen(plan(_subject(options)), brief=options.brief, only=options.only)
    except ValueError as error:
        return _refused(str(error))
    if options.list:
        _print(steps)
        return 0
    until = time.monotonic() + (options.seconds or (BRIEF_SECONDS if options.brief else 500))
    path = options.out / "state.json"
    if options.fresh:
        for old in (path, options.out / LINES):
            old.unlink(missing_ok=True)
    try:
        with WorkerHost() as host:
            status = run(steps, host, path, until, options.model, lambda state: report.write(state, steps))
    except (OtherRun, OrderFailed, OrderLate) as error:
        return _refused(str(error))
    if (state := State.load(path)) is not None:
        if options.device == "cuda":
            keep(Path("runs/bench") / report.FIGURES, report.figures(state, steps), indent=1)
        print("\n".join(report.summary(state, steps)), flush=True)
    return status


def _subject(options: argparse.Namespace) -> GpuSubject:
    on_cpu = options.device == "cpu"
    named = "tiny" if on_cpu and options.model == "q17" else options.model
    folder, load_format = model_folder(named, MADE / named)
    larger = model_folder("q8", MADE / "q8")[0] if named == "q17" else None
    return GpuSubject(
        folder,
        load_format,
        "float32" if on_cpu else options.dtype,
        options.device,
        Graphs.NONE if on_cpu else Graphs(options.graphs),
        PREFILL.get(named, PREFILL["q8"]),
        options.out,
        TINY if on_cpu else GpuSizes(),
        MADE,
        larger,
    )


def _print(steps: Sequence[GpuStep]) -> None:
    before = None
    for step in steps:
        print(f"{estimated(step, starts=step.setup != before):7.1f} s  {step.name}")
        before = step.setup
    print(f"{total(steps):7.1f} s  in all, by estimates")


def _refused(why: str) -> int:
    print(f"bench.gpu: {why}", file=sys.stderr)
    return REFUSED


def _parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--brief", action="store_true", help="the first steps of the first parts")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="steps of these names, and what they need"
    )
    parser.add_argument(
        "--model", default="q17", help="q17, q8, or a folder with a config.json (default q17)"
    )
    parser.add_argument(
        "--graphs",
        choices=tuple(Graphs),
        default=Graphs.FULL,
        help="CUDA graphs of the engines (default full)",
    )
    parser.add_argument("--dtype", default="bfloat16", help="number type of the engines (default bfloat16)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--seconds", type=float, help="time of this call (default 500, with --brief 340)")
    parser.add_argument("--fresh", action="store_true", help="discard an earlier run's state")
    parser.add_argument("--list", action="store_true", help="print the steps and their estimated seconds")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
