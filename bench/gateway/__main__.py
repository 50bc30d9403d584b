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
from bench.gateway.bare_engine import RUN_SEED, BareEngine, Workload
from bench.one_instance import one_instance, overhead_arguments, prompts
from bench.report import Figures, say, show, write
from services.local.platform import Platform

_GOAL = 1.08


def main() -> None:
    """Measure both sides, then show and write the figures."""
    given = arguments()
    workload = Workload(prompts(given.prompts), given.samples, given.max_tokens)
    options = one_instance(given.model, Path("runs/bench/gateway"))
    with (
        Platform(options, report=say) as platform,
        BareEngine(given.model) as bare,
        platform.client() as client,
        client.run("bench", seed=RUN_SEED) as run,
    ):
        rounds = [
            (bare.round(workload, step), _platform_round(run, workload, step))
            for step in range(given.rounds + 1)
        ]
    # The first round of each side warms up caches and connections.
    direct, through = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    figures: Figures = {
        "direct_seconds": direct,
        "platform_seconds": through,
        "overhead_ratio": through / direct,
        "goal": _GOAL,
        "samples": len(workload.keys),
        "rounds": given.rounds,
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


def arguments() -> argparse.Namespace:
    """Parse the options."""
    return overhead_arguments(__doc__, 7)


if __name__ == "__main__":
    main()
