"""Measure the cost of the control plane with a growing fleet: a real gateway and Redis, simulated instances.

For each fleet size a dedicated gateway and Redis serve one step with `--samples` samples for each instance. Every
instance is a gRPC server with a registration in Redis and a clock in place of an engine. It decodes each sample at
`--speed` tokens a second and reports in checkpoints, as a real instance does.
The trainer checks every sample. With `--gateways`, instances and prompts are divided among several gateways as
shards, each with its own Redis; `gateways` in the JSON has the use of each. Processor seconds count from the first
submission to the last sample. Writes runs/bench/fleet.json after each fleet size; `longest_turns` lists the work in
the gateway's longest turns.

    python -m bench.fleet [--instances 125,250,500,1000] [--gateways 2] [--samples 100]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.fleet.control_plane import ControlPlane, Usage
from bench.fleet.trainer import FleetTrainer, StepResult
from bench.fleet.workload import MAX_TOKENS, MEDIAN, SimulatedPolicy
from bench.report import BenchProgress, Figures, numbers, option_parser, show, show_table, write
from paceline.shards import Shard

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
    samples = instances * given.samples
    options = (f"--max-queued-samples={2 * samples + 1024}", *given.gateway_option)
    with ExitStack() as stack:
        names = (
            [str(instances)] if given.gateways == 1 else [f"{instances}-{n}" for n in range(given.gateways)]
        )
        planes = [stack.enter_context(ControlPlane(FOLDER / name, options)) for name in names]
        shares = _shares(instances, given.gateways)
        hosts = max(1, given.hosts // given.gateways)
        for plane, share in zip(planes, shares, strict=True):
            await plane.start(share, min(hosts, len(share)), _host_options(given))
        return await _step(planes, shares, given)


async def _step(planes: Sequence[ControlPlane], shares: Sequence[range], given: argparse.Namespace) -> Row:
    """Measure the control planes while they are idle, and during a step."""
    samples = sum(map(len, shares)) * given.samples
    idle = [plane.usage() for plane in planes]
    await asyncio.sleep(given.idle_seconds)
    before = [plane.usage() for plane in planes]
    shards = [
        Shard(plane.gateway.address, str(number), len(share))
        for number, (plane, share) in enumerate(zip(planes, shares, strict=True))
    ]
    trainer = FleetTrainer(shards, SimulatedPolicy.create(given.longest, given.median))
    step = await trainer.step(samples, given.batch_samples)
    each = [plane.usage().since(usage) for plane, usage in zip(planes, before, strict=True)]
    resting = Usage.total([late.since(early) for late, early in zip(before, idle, strict=True)])
    return _row(planes, shares, step, each, resting, given)


def _row(
    planes: Sequence[ControlPlane],
    shares: Sequence[range],
    step: StepResult,
    each: Sequence[Usage],
    resting: Usage,
    given: argparse.Namespace,
) -> Row:
    """Return the figures of a step from the use of each plane during it and of all planes while they were idle."""
    instances, used = sum(map(len, shares)), Usage.total(each)
    samples = instances * given.samples
    metrics = [plane.metrics() for plane in planes]
    turns = [found.values.get(_LONGEST_TURN) for found in metrics]
    known_turns = [turn for turn in turns if turn is not None]
    partial_writes = sum(found["paceline_gateway_journal_chunks_total"] for found in metrics)
    submits = sorted(step.submit_seconds)
    cores = [usage.gateway_seconds / step.seconds for usage in each]
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
        # Sum over all gateways; `largest_gateway_cores` has the cores of the busiest gateway.
        "gateway_cores": sum(cores),
        "largest_gateway_cores": max(cores),
        "gateways": _gateway_rows(planes, shares, step, each),
        "idle_gateway_cores": resting.gateway_seconds / given.idle_seconds,
        "longest_turn_cpu_ms": None if not known_turns else 1000 * max(known_turns),
        "longest_turns": [turn for plane in planes for turn in plane.longest_turns()],
        "submit_p99_ms": 1000 * submits[math.ceil(0.99 * len(submits)) - 1],
        "submissions": len(submits),
        "gateway_peak_mib": max(plane.peak_memory() for plane in planes) / (1 << 20),
        "redis_bytes": used.redis_bytes,
        "result_bytes": step.result_bytes,
        "journal_bytes_vs_results": journal_bytes / step.result_bytes,
        "partial_writes": partial_writes,
        "partial_writes_per_sample": partial_writes / samples,
        "write_calls": {name: calls for name, calls in sorted(used.calls.items()) if calls},
        "acknowledged": step.acknowledged,
        "lost_acknowledgements": step.lost_acknowledgements,
        "leases_lost": sum(plane.leases_lost() for plane in planes),
        "lost_instances": sum(found["paceline_gateway_instance_losses_total"] for found in metrics),
    }


def _gateway_rows(
    planes: Sequence[ControlPlane], shares: Sequence[range], step: StepResult, each: Sequence[Usage]
) -> list[Row]:
    """Return the figures of every gateway."""
    return [
        {
            "instances": len(share),
            "samples": got,
            "gateway_seconds": usage.gateway_seconds,
            "gateway_cores": usage.gateway_seconds / step.seconds,
            "gateway_ms_per_sample": 1000 * usage.gateway_seconds / max(got, 1),
            "redis_seconds": usage.redis_seconds,
            "peak_mib": plane.peak_memory() / (1 << 20),
        }
        for plane, share, got, usage in zip(planes, shares, step.given, each, strict=True)
    ]


def _shares(instances: int, gateways: int) -> list[range]:
    """Return the numbers of the instances of each gateway."""
    bounds = [instances * number // gateways for number in range(gateways + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


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
    parser.add_argument(
        "--gateways", type=int, default=1, help="shards of each fleet: gateways, each with a Redis of its own"
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
