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
import sys
import time
from pathlib import Path

import httpx
import psutil

from bench.comparison import Comparison
from bench.facade.ways import FacadeWorkload, Ways
from bench.intervals import median_interval
from bench.report import Figures, cores, say, show, show_table, write
from paceline import AsyncClient
from services.local.config import PlatformConfig
from services.local.machine import cpu_environment
from services.local.platform import Platform
from services.platform.launching import cpu_list

_GOAL = 1.15
_KV_BYTES = 512 << 20
_COLUMNS = (
    ("seconds", "seconds"),
    ("vs grpc", "ratio"),
    ("from", "ratio_low"),
    ("to", "ratio_high"),
    ("facade, ms a sample", "facade_ms_per_sample"),
)


def main() -> None:
    """Measure the ways, then show and write the figures."""
    arguments = _arguments()
    options = PlatformConfig(
        model=arguments.model,
        instances=1,
        folder=Path("runs/bench/facade"),
        instance_options=("--dtype", "float32", "--speculation", "off", *_engine_options()),
        environment=cpu_environment(cores()[:1]),
        pin=False,
        reallocator=False,
        bubbles=False,
        http_port=0,
    )
    work = _workload(arguments.prompts, arguments.samples, arguments.max_tokens)
    with Platform(options, report=say) as platform:
        figures = asyncio.run(_measure(platform, work, arguments.rounds))
    show_table("facade: the same samples, seconds a round", _COLUMNS, figures["ways"])
    show("facade", {name: value for name, value in figures.items() if name != "ways"})
    write("facade", figures)


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
        began = time.perf_counter()
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
            _progress(number + 1, rounds + 1, time.perf_counter() - began)
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


def _progress(done: int, rounds: int, took: float) -> None:
    left = took / done * (rounds - done)
    print(f"round {done} of {rounds}, about {left:.0f} s left", file=sys.stderr, flush=True)


def _workload(prompts: int, samples: int, max_tokens: int) -> FacadeWorkload:
    from examples.tinymath.tasks import make_problems
    from examples.tinymath.tokenizer import prompt_ids

    problems = make_problems(seed=1, n=prompts)
    return FacadeWorkload([prompt_ids(problem.question) for problem in problems], samples, max_tokens)


def _engine_options() -> tuple[str, ...]:
    return ("--kv-cache-memory-bytes", str(_KV_BYTES), "--threads-bind", cpu_list(cores()[:1]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=20, help="at least 6")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
