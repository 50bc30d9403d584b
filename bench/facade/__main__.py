"""Measure the overhead of HTTP over gRPC: the same samples by Generate calls, as a batch, and by each HTTP dialect.

Gateway, Redis, facade and one vLLM instance are real processes; nothing is simulated. The engine has the first core
to itself, and everything else shares the others. Every round runs each way once, in a rotating order and with the
round's seed, and all ways must return the same tokens. The first round warms up and is not counted. Writes
runs/bench/facade.json; `overhead_vs_grpc` is the median over the rounds of the slowest dialect's time divided by
the time of Generate calls.

    python -m bench.facade [--rounds 20] [--model DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import httpx
import psutil

from bench.comparison import Comparison
from bench.facade.ways import FacadeWorkload, Ways
from bench.intervals import median_interval
from bench.one_instance import one_instance, overhead_arguments, prompts
from bench.report import BenchProgress, Figures, say, show, show_table, write
from paceline import AsyncClient
from services.local.platform import Platform

_GOAL = 1.15
_COLUMNS = (
    ("seconds", "seconds"),
    ("vs grpc", "ratio"),
    ("from", "ratio_low"),
    ("to", "ratio_high"),
    ("facade, ms a sample", "facade_ms_per_sample"),
)


def main() -> None:
    """Measure the ways, then show and write the figures."""
    given = arguments()
    options = one_instance(given.model, Path("runs/bench/facade"), bubbles=False, http_port=0)
    work = FacadeWorkload([*prompts(given.prompts).values()], given.samples, given.max_tokens)
    with Platform(options, report=say) as platform:
        figures = asyncio.run(_measure(platform, work, given.rounds))
    ways = show_table("facade: the same samples, seconds a round", _COLUMNS, figures["ways"])
    show("facade", {name: value for name, value in figures.items() if name != "ways"})
    write("facade", {**figures, "tables": {"ways": ways}})


async def _measure(platform: Platform, work: FacadeWorkload, rounds: int) -> Figures:
    (facade,) = [child for child in platform.processes if child.spec.name == "facade"]
    process = psutil.Process(facade.pid)
    comparison = Comparison()
    headers = {"Authorization": f"Bearer {platform.config.token}"}
    async with (
        AsyncClient(platform.gateway_address) as client,
        httpx.AsyncClient(base_url=platform.http_address, headers=headers, timeout=600) as http,
    ):
        ways = Ways(client, http, work).all()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        busy = dict.fromkeys(ways, 0.0)
        progress = BenchProgress(rounds + 1, "facade")
        for number in range(rounds + 1):
            # Each way takes each place in the order equally often.
            place = number % len(ways)
            order = [*ways][place:] + [*ways][:place]
            found = {}
            for name in order:
                cpu, started = _cpu_seconds(process), time.perf_counter()
                found[name] = await ways[name](number)
                if number:
                    seconds[name].append(time.perf_counter() - started)
                    busy[name] += _cpu_seconds(process) - cpu
            for name in ways:
                comparison.add(name, number, found["grpc"], found[name])
            progress.advance(f"round {number + 1} of {rounds + 1}")
    return figures_of(work, seconds, busy, comparison)


def figures_of(
    work: FacadeWorkload, seconds: dict[str, list[float]], busy: dict[str, float], comparison: Comparison
) -> Figures:
    samples = len(work.prompts) * work.samples
    ways = {}
    for name, taken in seconds.items():
        ratios = [own / base for own, base in zip(taken, seconds["grpc"], strict=True)]
        interval = median_interval(ratios)
        ways[name] = {
            "seconds": statistics.median(taken),
            "ratio": interval.median,
            "ratio_low": interval.low,
            "ratio_high": interval.high,
            "facade_ms_per_sample": 1000 * busy[name] / len(taken) / samples,
        }
    return {
        "overhead_vs_grpc": max(way["ratio"] for name, way in ways.items() if name.startswith("http")),
        "goal": _GOAL,
        "samples": samples,
        "rounds": len(seconds["grpc"]),
        "tokens_compared": comparison.compared,
        "tokens_that_differ": len(comparison.differences),
        "simulated": "nothing",
        "ways": ways,
    }


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def arguments() -> argparse.Namespace:
    """Parse the options."""
    return overhead_arguments(__doc__, 20)


if __name__ == "__main__":
    main()
