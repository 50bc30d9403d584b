"""Measure the overhead of the platform: one workload through gateway, gRPC and instance, and on the bare engine.

Both engines use the same core, the first one; client and gateway use the others. Both engines stay up for the whole
run and take turns, round by round, while the other is idle. The ratio divides the two medians. Speculation is off
on both. Writes runs/bench/gateway.json.

    python -m bench.gateway [--rounds 7] [--model DIR]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import paceline
from bench.gateway.bare_engine import KV_BYTES, RUN_SEED, BareEngine, Workload, engine_cores
from bench.report import Figures, say, show, write
from services.local.config import PlatformConfig
from services.local.machine import cpu_environment
from services.local.platform import Platform
from services.platform.launching import cpu_list

_GOAL = 1.08


def main() -> None:
    """Measure both sides, then show and write the figures."""
    arguments = _arguments()
    workload = _workload(arguments.prompts, arguments.samples, arguments.max_tokens)
    options = PlatformConfig(
        model=arguments.model,
        instances=1,
        folder=Path("runs/bench/gateway"),
        instance_options=("--dtype", "float32", "--speculation", "off", *_engine_options()),
        environment=cpu_environment(engine_cores()),
        pin=False,
        reallocator=False,
    )
    with (
        Platform(options, report=say) as platform,
        BareEngine(arguments.model) as bare,
        platform.client() as client,
        client.run("bench", seed=RUN_SEED) as run,
    ):
        rounds = [
            (bare.round(workload, step), _platform_round(run, workload, step))
            for step in range(arguments.rounds + 1)
        ]
    # The first round of each side warms up caches and connections.
    direct, through = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    figures: Figures = {
        "direct_seconds": direct,
        "platform_seconds": through,
        "overhead_ratio": through / direct,
        "goal": _GOAL,
        "samples": len(workload.keys),
        "rounds": arguments.rounds,
    }
    show("gateway: wall time of one step of rollouts", figures)
    write("gateway", figures)


def _platform_round(run: paceline.Run, workload: Workload, step: int) -> float:
    groups = [
        paceline.Group(name, tokens, samples=workload.samples) for name, tokens in workload.prompts.items()
    ]
    began = time.perf_counter()
    count = sum(1 for _ in run.rollout(step, groups, paceline.SamplingParams(max_tokens=workload.max_tokens)))
    took = time.perf_counter() - began
    assert count == len(workload.keys)
    return took


def _workload(prompts: int, samples: int, max_tokens: int) -> Workload:
    from examples.tinymath.tasks import make_problems
    from examples.tinymath.tokenizer import prompt_ids

    problems = make_problems(seed=1, n=prompts)
    return Workload({problem.id: prompt_ids(problem.question) for problem in problems}, samples, max_tokens)


def _engine_options() -> tuple[str, ...]:
    return ("--kv-cache-memory-bytes", str(KV_BYTES), "--threads-bind", cpu_list(engine_cores()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
