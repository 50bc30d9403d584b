"""Run the quick form of every benchmark and write the documents' tables from its figures.

Each benchmark has a time limit; all together take 67 minutes on two cores. A benchmark that
fails or exceeds its limit is ended and keeps its earlier figures. bench/results keeps the figures that the
documents show, in a small file for each benchmark, which is committed with them. `make lint` fails if a table
differs from these files, or is not marked although the code that it measures has changed by more than its share
(bench/measured_code.py).

    python -m bench.nightly [--only gateway rollout]
    python -m bench.nightly --publish rollout         # keep a longer run's figures, from runs/bench; run nothing
    python -m bench.nightly --publish                 # only rewrite the documents, and mark stale figures
    python -m bench.nightly --check                   # write nothing; list what is not up to date
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measured_code import MEASURED, lines_of, measured_by
from bench.nightly.documents import (
    RESULTS,
    Published,
    outdated,
    publish,
    published,
    rewritten,
    written_by_hand,
)
from bench.report import option_parser, say
from bench.rollout.registry import ARCTIC

NIGHT_MINUTES = 67
"""Time for all benchmarks together, on two cores."""


@dataclass(frozen=True, slots=True)
class NightlyJob:
    """A benchmark: its module, its options, and the minutes after which it is ended.

    It writes runs/bench/`name`.json.
    """

    name: str
    module: str
    minutes: float
    options: tuple[str, ...] = ()
    arctic: bool = False
    """Compare with arctic-inference, which `scripts/arctic` builds."""

    @property
    def command(self) -> str:
        """Return the command with which a reader gets the same figures."""
        return " ".join(("python -m", self.module, *self.options))


LONGER = ("axes.recorded", "rollout.smollm2", "device_clock", "precision", "host_step", "gpu")
"""Benchmarks that do not fit in a night, or need a GPU; they are run and published by hand."""
JOBS = (
    NightlyJob("rollout", "bench.rollout", 26.0, ("--minutes", "24")),
    NightlyJob("gateway", "bench.gateway", 2.0, ("--rounds", "7")),
    NightlyJob("facade", "bench.facade", 3.0, ("--rounds", "6")),
    NightlyJob("fleet", "bench.fleet", 3.0, ("--instances", "125,250")),
    NightlyJob("weights", "bench.weights", 4.0, ("--sizes", "100", "--fleets", "1,2")),
    NightlyJob("coupled", "bench.coupled", 4.0, ("--rounds", "2"), arctic=True),
    NightlyJob(
        "policy", "bench.policy", 5.0, ("--rounds", "6", "--samples", "8,32", "--wrong", "0.02,0.4,0.95")
    ),
    NightlyJob("policy.simulated", "bench.policy.simulated", 3.0),
    NightlyJob("axes", "bench.axes", 4.0),
    NightlyJob("migration", "bench.migration", 4.0, ("--rounds", "1", "--tail-rounds", "3")),
    NightlyJob("learner", "bench.learner", 4.0, ("--steps", "8", "--warm-up-seconds", "10")),
    NightlyJob("simulate", "bench.simulate", 3.0),
    NightlyJob("simulate.replays", "bench.simulate.replays", 2.0),
)


_BENCH = Path(__file__).parents[1]
DOCUMENTS = (
    Path("README.md"),
    Path("docs/performance.md"),
    Path("docs/evidence.md"),
    Path("docs/learner.md"),
    Path("docs/simulator.md"),
    *(Path("bench", each.parent.name, each.name) for each in sorted(_BENCH.glob("*/README.md"))),
)
_NAMES = [job.name for job in JOBS]


def main() -> None:
    """Run the command; the exit status is 1 if a benchmark has no new figures, or if a check fails."""
    given = arguments()
    failed = list[str]()
    if given.check:
        sys.exit("\n".join(complaints()) or None)
    if given.publish is not None:
        for name in given.publish:
            publish(name)
    else:
        failed = run_all([job for job in JOBS if job.name in given.only])
    write_documents()
    if failed:
        say(f"nightly: no new figures of {', '.join(failed)}")
        sys.exit(1)


def run_all(jobs: Sequence[NightlyJob]) -> list[str]:
    """Run benchmarks one after the other, keep their figures, and return the names of those without new ones."""
    failed, began = [], time.monotonic()
    for place, job in enumerate(jobs):
        left = sum(each.minutes for each in jobs[place:])
        gone = (time.monotonic() - began) / 60
        say(
            f"nightly: {job.name}, {place + 1} of {len(jobs)}; {gone:.0f} minutes gone, {left:.0f} left at most"
        )
        if ended := run(job):
            say(f"nightly: {job.name} {ended}")
            failed.append(job.name)
        else:
            publish(job.name, job.command)
    return failed


def run(job: NightlyJob) -> str:
    """Run a benchmark with its output in runs/bench/nightly; return the reason for a failure, or ""."""
    log = Path("runs/bench/nightly") / f"{job.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", job.module, *job.options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(_with_arctic() if job.arctic else {})},
            start_new_session=True,
        )
        try:
            status = process.wait(60 * job.minutes)
        except subprocess.TimeoutExpired:
            return f"took more than {job.minutes:.0f} minutes; see {log}"
        finally:
            # Its child processes may outlive it, after a crash or when it is ended here.
            _end(process)
    return f"ended with status {status}; see {log}" if status else ""


def _with_arctic() -> dict[str, str]:
    """Build arctic-inference and return the variables with which it is found; a benchmark reports if it is missing.

    Its plug-in is not loaded, because it changes vLLM beyond what is compared.
    """
    subprocess.run(["scripts/arctic"], stdout=subprocess.DEVNULL, check=False)
    paths = (str(ARCTIC.absolute()), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_PLUGINS": ""}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def write_documents() -> None:
    """Rewrite the generated tables of all documents."""
    figures = published()
    for path in DOCUMENTS:
        before = path.read_text()
        after = rewritten(before, figures)
        if after != before:
            path.write_text(after)
            say(f"nightly: {path} is rewritten")


def complaints() -> Iterator[str]:
    """Yield each table that differs from its figures or is stale and not marked, and how to mend it."""
    figures = published()
    for name, measured in MEASURED.items():
        for path in measured.paths:
            if not lines_of([path]):
                yield f"bench/measured_code.py: {path}, which {name} measures, has no code; name where it is now"
    for document in DOCUMENTS:
        text = document.read_text()
        for part in outdated(text, figures):
            fault = _fault(part["name"], part["body"], figures)
            yield f"{document}: table `{part['name']} {part['what']}` {fault}"
        for head in written_by_hand(text):
            yield (
                f"{document}: no result is behind the table {head}; let its benchmark write it (`tables` of a"
                " result), or say in a sentence what matters, with its commit"
            )


def _fault(name: str, shown: str, figures: Published) -> str:
    """Return what is wrong with a table that is not as `write_documents` writes it."""
    result, code = figures.get(name, {}), measured_by(name)
    mark = result.get("mark", "")
    if code is None or result.get("changed") is None or not mark or mark in shown:
        origin = RESULTS / f"{name}.json" if name in figures else RESULTS
        return f"differs from {origin}; `python -m bench.nightly --publish` rewrites it"
    return (
        f"is stale and not marked so: {result['changed']:.0%} of the lines of {', '.join(code.paths)} have changed"
        f" since {result['measured_at'][:10]}, at most {code.share:.0%} may. Measure anew (`{result['command']}`,"
        f" then `python -m bench.nightly --publish {name}`), or mark it (`python -m bench.nightly --publish`)"
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=_NAMES, default=_NAMES)
    parser.add_argument(
        "--publish",
        nargs="*",
        choices=[*_NAMES, *LONGER],
        help="run nothing; keep these figures of runs/bench",
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing; list tables that are not up to date"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
