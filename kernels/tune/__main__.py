"""Run the first hour on a GPU: correctness to the bit, ceilings, sweeps and the table, in slices that go on.

    python -m kernels.tune [--out runs/tune] [--seconds 500] [--device cuda] [--fresh]

A call ends after `--seconds`, half a minute later at the latest, and the next one goes on where it ended. Status
0: all is done; 1: all is done, and steps failed; 2: no such device, or another run's folder; 3: call again. In the
folder: state.json (everything), report.md (table, sweeps, failures). The parameters that were fastest, and with
which all results were right, are written where the kernels read them (kernels/tuned/DEVICE.json).

`--device cpu` runs every step in Triton's interpreter on tiny shapes: to test this program, not to measure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kernels.tune.state import OtherRun, State, sources

NO_DEVICE = 2
STEP_SECONDS = 180
"""Longest that a step may take before its worker is ended."""
_GRACE_SECONDS = 30
"""A step that is not over so long after the slice is ended, too, and is done again by the next call."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or go on with a run; return the exit status."""
    options = _parsed(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from kernels.tune.measure import about
    from kernels.tuning import FOLDER, device_name, path_for

    if options.device == "cuda" and not torch.cuda.is_available():
        print("kernels.tune: no CUDA device here; nothing was run and nothing written", file=sys.stderr)
        return NO_DEVICE
    device = torch.device(options.device)
    path = options.out / "state.json"
    tuned = path_for(device_name(device), FOLDER if options.device == "cuda" else options.out)
    if options.until is not None:
        from kernels.tune.worker import work

        return work(device, path, tuned, options.until)
    if options.fresh:
        path.unlink(missing_ok=True)
    try:
        State.resume(path, {**about(device), "sources": sources()}).save()
    except OtherRun as error:
        print(f"kernels.tune: {error}", file=sys.stderr)
        return NO_DEVICE
    until = time.time() + options.seconds
    worker = [sys.executable, "-m", "kernels.tune", "--device", options.device, "--out", str(options.out)]
    return supervise(path, [*worker, "--until", str(until)], until, STEP_SECONDS)


def supervise(path: Path, command: Sequence[str], until: float, step_seconds: float) -> int:
    """Start workers by `command` until the plan or the slice is over; return the exit status.

    A step that ends its worker, or is not over after `step_seconds`, has failed; a new worker does the rest.
    """
    from kernels.tune.worker import ANEW, MORE

    while True:
        status = _ended(subprocess.Popen(command), path, step_seconds, until + _GRACE_SECONDS)
        state = State.load(path)
        assert state is not None
        if state.running is not None and time.time() > until + _GRACE_SECONDS:
            state.running = None
            state.save()
            status = MORE
        elif state.running is not None:
            state.finish(state.running[0], None, f"it ended its process, or was ended (status {status})")
            status = ANEW
        elif status not in (0, 1, MORE, ANEW):
            # It broke between two steps: another one would, too.
            return status
        if status == ANEW and time.time() < until:
            continue
        if status in (MORE, ANEW):
            print(f"there is more to do: call again. So far: {path.parent / 'report.md'}")
            return MORE
        print(f"done. Report: {path.parent / 'report.md'}; failed: {', '.join(state.failed) or 'nothing'}")
        return status


def _ended(worker: subprocess.Popen[bytes], path: Path, limit: float, end: float) -> int:
    """Wait for a worker, and end it when it has been at one step for too long, or at `end`; return its status."""
    try:
        while True:
            try:
                return worker.wait(timeout=1)
            except subprocess.TimeoutExpired:
                state = State.load(path)
                late = state is not None and state.running and time.time() - state.running[1] > limit
                if late or time.time() > end:
                    worker.kill()
                    return worker.wait()
    finally:
        worker.kill()
        worker.wait()


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kernels.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/tune"))
    parser.add_argument("--seconds", type=float, default=500, help="of this call (default 500)")
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    # Given to workers: they end at that time.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
