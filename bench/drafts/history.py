"""Reuse of earlier rollouts under each exactness level: a trajectory whose prompts come back, replayed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.columns import mean_decode_steps, reduction
from bench.comparison import Comparison
from bench.replay import ReplayedStep, ReplaySetup, replay
from bench.reuse import replayed, reused_share
from bench.systems import HISTORY, PLAIN, System, platform_of
from bench.trajectory import Trajectory
from examples.tinymath.train import MODEL, Options
from paceline import Exactness, ExactnessLevel
from services.local import Platform

EXACT, COUPLED = Exactness(), Exactness(ExactnessLevel.COUPLED_HISTORY)
LENIENT = {
    "lenient 1": Exactness.lenient(1.0),
    **{f"lenient e^{power}": Exactness.lenient(math.exp(power)) for power in (0.2, 0.5, 0.8)},
}
DELAYED = "lenient e^0.5, delayed"
LEVELS: Mapping[str, Exactness] = {
    "exact": EXACT,
    "coupled_history": COUPLED,
    **LENIENT,
    DELAYED: Exactness.lenient(math.exp(0.5), reuse_delay=1),
}
BASES = {"plain": EXACT, "plain, coupled noise": COUPLED}
"""Without drafts: what `exact` and the lenient levels, and what `coupled_history`, are compared with."""

Runs = dict[str, list[ReplayedStep]]
Say = Callable[[str, ReplayedStep], None]


def run_all(trajectory: Trajectory, instances: int, folder: Path, say: Say) -> Runs:
    """Replay the trajectory under every level; the trainer's updates are left out."""
    return {
        **_run(PLAIN, BASES, trajectory, instances, folder, say),
        **_run(HISTORY, LEVELS, trajectory, instances, folder, say),
    }


def _run(
    system: System,
    levels: Mapping[str, Exactness],
    trajectory: Trajectory,
    instances: int,
    folder: Path,
    say: Say,
) -> Runs:
    runs = {}
    with Platform(platform_of(system, MODEL, instances, folder)) as platform:
        for name, exactness in levels.items():
            manner = ReplaySetup(f"history-{time.time_ns():x}", exactness, wait=False)
            runs[name] = replay(platform, trajectory, manner, watch=partial(say, name))
    return runs


def compare(
    trajectory: Trajectory, runs: Mapping[str, Sequence[ReplayedStep]]
) -> tuple[Comparison, Comparison]:
    """Return the tokens of `exact` and of `coupled_history` beside plain decoding's of the same noise.

    Those of the plain replay must be the trajectory's besides.
    """
    exact, coupled = Comparison(), Comparison()
    for recorded, plain, step in zip(trajectory.steps, runs["plain"], runs["exact"], strict=True):
        exact.add("plain", step.step, recorded.responses, plain.responses)
        exact.add("exact", step.step, plain.responses, step.responses)
    for plain, step in zip(runs["plain, coupled noise"], runs["coupled_history"], strict=True):
        coupled.add("coupled_history", step.step, plain.responses, step.responses)
    return exact, coupled


def figures(options: Options, runs: Mapping[str, Sequence[ReplayedStep]]) -> dict[str, dict[str, Any]]:
    """Return the table: a row for each replay, over the epochs in which there was something to reuse."""
    size = epoch_steps(options)
    table = {}
    for name, steps in runs.items():
        counted = slice(2 * size if name == DELAYED else size, None)
        base = runs["plain, coupled noise" if "coupled" in name else "plain"]
        table[name] = {
            **replayed(steps[counted]),
            "decode_steps_reduction": reduction(base[counted], steps[counted], mean_decode_steps),
            "rollout_time_reduction": reduction(base[counted], steps[counted], _rollout_seconds),
            "reused_share_by_epoch": [
                reused_share(step.samples for step in steps[begin : begin + size])
                for begin in range(0, len(steps), size)
            ],
        }
    return table


def epoch_steps(options: Options) -> int:
    """Return the steps of an epoch."""
    return options.pool // options.prompts


def _rollout_seconds(step: ReplayedStep) -> float:
    return step.rollout_seconds
