"""Measure the cost of the control plane with a growing fleet: a real gateway and Redis, simulated instances.

For each fleet size a dedicated gateway and Redis serve one step with `--samples` samples for each instance. Every
instance is a gRPC server with a registration in Redis and a clock in place of an engine. It decodes each sample at
`--speed` tokens a second and reports in checkpoints, as a real instance does.
The trainer checks every sample. Processor seconds count from the first submission to the last sample. Writes
runs/bench/fleet.json after each fleet size; `longest_turns` lists the work in the gateway's longest turns.

    python -m bench.fleet [--instances 125,250,500,1000] [--samples 100]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.fleet.control_plane import ControlPlane, Usage
from bench.fleet.trainer import FleetTrainer, StepResult
from bench.fleet.workload import MAX_TOKENS, MEDIAN, SimulatedPolicy
from bench.report import BenchProgress, Figures, numbers, option_parser, show, show_table, write

FOLDER = Path("runs/bench/fleet")
_BASELINE = Path(__file__).with_name("baseline.json")
_LONGEST_TURN = "paceline_gateway_longest_turn_seconds"
Row = dict[str, Any]


def main() -> None:
    """Measure the fleets, write after each size so that an interrupted run keeps its figures, and show."""
    given, baseline = arguments(), json.loads(_BASELINE.read_text())

    def keep(rows: list[Row]) -> None:
        write("fleet", {**summary(rows, baseline), "fleets": rows, "tables": {"fleets": table_of(rows)}})

    rows = asyncio.run(measure(given, keep))
    show("fleet: cost of the control plane", summary(rows, baseline))


async def measure(given: argparse.Namespace, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Return a row of figures for each fleet size; `keep` is called with all rows so far after each."""
    rows, progress = list[Row](), BenchProgress(len(given.instances), "fleet")
    for instances in given.instances:
        rows.append(await _fleet(instances, given))
        keep(list(rows))
        progress.advance(f"{instances} instances")
    return rows


def summary(rows: Sequence[Row], baseline: Row) -> Row:
    """Return the figures that have goals, from rows in ascending order of fleet size.

    `baseline` has the journal's writes of unfinished samples when every token was reported within 50 ms.
    """
    small, large = rows[0], rows[-1]
    compared = {row["instances"]: row["gateway_ms_per_sample"] for row in rows}
    turns = [row["longest_turn_cpu_ms"] for row in rows]
    return {
        "cpu_per_sample_ratio_1000_vs_125": (
            compared[1000] / compared[125] if {125, 1000} <= compared.keys() else None
        ),
        "cpu_per_sample_ratio_largest_vs_smallest": (
            large["gateway_ms_per_sample"] / small["gateway_ms_per_sample"]
        ),
        "largest_gateway_cores": max(row["largest_gateway_cores"] for row in rows),
        "longest_turn_cpu_ms": None if None in turns else max(turns),
        "samples": large["samples"],
        "leases_lost": sum(row["leases_lost"] for row in rows),
        # A step without any write counts as one with a single write.
        "journal_writes_reduction": baseline["partial_writes_per_token"]
        * large["tokens"]
        / max(large["partial_writes"], 1),
        "journal_bytes_vs_results": large["journal_bytes_vs_results"],
    }


async def _fleet(instances: int, given: argparse.Namespace) -> Row:
    """Return the figures of a fleet, measured while it is idle and during a step."""
    samples = instances * given.samples
    options = (f"--max-queued-samples={2 * samples + 1024}", *given.gateway_option)
    with ControlPlane(FOLDER / str(instances), options) as plane:
        await plane.start(range(instances), min(given.hosts, instances), _host_options(given))
        idle = plane.usage()
        await asyncio.sleep(given.idle_seconds)
        before = plane.usage()
        trainer = FleetTrainer(plane.gateway.address, SimulatedPolicy.create(given.longest, given.median))
        step = await trainer.step(samples, given.batch_samples)
        return _row(plane, instances, step, plane.usage().since(before), before.since(idle), given)


def _row(
    plane: ControlPlane,
    instances: int,
    step: StepResult,
    used: Usage,
    resting: Usage,
    given: argparse.Namespace,
) -> Row:
    """Return the figures of a step from the use of the control plane during it and while it was idle."""
    samples, metrics = instances * given.samples, plane.metrics()
    turn = metrics.values.get(_LONGEST_TURN)
    partial_writes = metrics["paceline_gateway_journal_chunks_total"]
    submits = sorted(step.submit_seconds)
    # Without the gateway's constant traffic for reading the registry.
    journal_bytes = used.redis_bytes - resting.redis_bytes / given.idle_seconds * step.seconds
    return {
        "instances": instances,
        "samples": step.samples,
        "wrong_samples": step.wrong,
        "tokens": step.tokens,
        "step_seconds": step.seconds,
        "redis_seconds_per_1000": 1000 * used.redis_seconds / samples,
        "gateway_ms_per_sample": 1000 * used.gateway_seconds / samples,
        "largest_gateway_cores": used.gateway_seconds / step.seconds,
        "idle_gateway_cores": resting.gateway_seconds / given.idle_seconds,
        "longest_turn_cpu_ms": None if turn is None else 1000 * turn,
        "longest_turns": plane.longest_turns(),
        "submit_p99_ms": 1000 * submits[math.ceil(0.99 * len(submits)) - 1],
        "submissions": len(submits),
        "gateway_peak_mib": plane.peak_memory() / (1 << 20),
        "redis_bytes": used.redis_bytes,
        "result_bytes": step.result_bytes,
        "journal_bytes_vs_results": journal_bytes / step.result_bytes,
        "partial_writes": partial_writes,
        "partial_writes_per_sample": partial_writes / samples,
        "acknowledged": step.acknowledged,
        "lost_acknowledgements": step.lost_acknowledgements,
        "leases_lost": plane.leases_lost(),
        "lost_instances": metrics["paceline_gateway_instance_losses_total"],
    }


def _host_options(given: argparse.Namespace) -> tuple[str, ...]:
    return tuple(f"--{name}={getattr(given, name)}" for name in ("speed", "compression", "longest", "median"))


def table_of(rows: Sequence[Row]) -> Figures:
    """Print and return the table of the fleets."""
    columns = (
        ("samples", "samples"),
        ("gateway, ms of processor time a sample", "gateway_ms_per_sample"),
        ("share of a core", "largest_gateway_cores"),
        ("Redis, s a thousand samples", "redis_seconds_per_1000"),
        ("longest turn, ms", "longest_turn_cpu_ms"),
        ("p99 of submit, ms", "submit_p99_ms"),
        ("peak memory, MiB", "gateway_peak_mib"),
        ("journal bytes / results", "journal_bytes_vs_results"),
    )
    return show_table("fleet, by instances", columns, {str(row["instances"]): row for row in rows})


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    sizes = "fleet sizes, ascending, separated by commas"
    parser.add_argument(
        "--instances", type=lambda text: sorted(numbers(int)(text)), default=[125, 250, 500, 1000], help=sizes
    )
    parser.add_argument("--samples", type=int, default=100, help="samples of each instance")
    parser.add_argument("--batch-samples", type=int, default=512, help="samples of one submission")
    parser.add_argument("--speed", type=float, default=50.0, help="tokens a second of each sample")
    parser.add_argument("--compression", type=float, default=1.0, help="how many times as fast time runs")
    parser.add_argument("--longest", type=int, default=MAX_TOKENS, help="tokens of the longest response")
    parser.add_argument("--median", type=float, default=MEDIAN, help="tokens of the median response, uncut")
    parser.add_argument("--hosts", type=int, default=4, help="processes of simulated instances")
    parser.add_argument("--idle-seconds", type=float, default=4.0, help="measured before the step begins")
    parser.add_argument(
        "--gateway-option", action="append", default=[], help="flag of the gateway, repeatable"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
