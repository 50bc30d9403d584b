"""Bubbles filled with drafts: BubbleSpec's tables for tinymath, and what coupled noise makes of them.

A real GRPO run is recorded once on a plain platform (bench/trajectory.py), with prompts that are new in every
step, so that nothing but pre-generation can help. Each system then replays it (bench/replay.py): the same weights,
prompts and seeds, and the trainer's recorded time as a wait. Step 0 is not counted: nothing could be generated
ahead of it. With more than one round every other one goes through the systems backwards. Writes
runs/bench/bubbles.json.

    python -m bench.bubbles [--instances 2 4] [--steps 6] [--rounds 1] [--intra] [--per-prompt 4 8 16]

Instances share the machine's cores out: on two cores each of two instances has one, and four share them in pairs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import columns
from bench.comparison import Comparison
from bench.coverage import Coverage
from bench.replay import Covering, ReplayedStep, ReplaySetup, nothing_covered, replay
from bench.report import console, cores, show_table, write
from bench.systems import BUBBLESPEC, IN_STEP, INTRA, OVERLAP, PLAIN, System, plain_platform, platform_of
from bench.ties import Judge, Tie, judge_all
from bench.trajectory import Trajectory, record
from examples.tinymath.train import MODEL, Options
from services.local import Platform

FOLDER = Path("runs/bench/bubbles")
_LR = 1.5e-4
"""Less than the demo has, which is to learn something in ten steps."""
WARM_UP = 1
"""Steps at the beginning that are not counted."""
GOALS = {"step_reduction": 0.8, "step_time_reduction": 0.4, "tokens_differing_share": 1e-5}
_SPEED = (
    ("rollout s", "rollout_seconds"),
    ("step s", "step_seconds"),
    ("less time", "step_time_reduction"),
    ("fewer steps", "decode_steps_reduction"),
    ("steps avg", "decode_steps_mean"),
    ("max", "decode_steps_max"),
    ("length avg", "response_length_mean"),
    ("max", "response_length_max"),
    ("acc. length", "acceptance_length"),
    ("draft length", "draft_length"),
    ("rate", "acceptance_rate"),
)
"""As the paper's Table 2."""
_FILLED = (
    ("bubble s avg", "bubble_seconds_mean"),
    ("max", "bubble_seconds_max"),
    ("generated ahead", "pregenerated_tokens"),
    ("length avg", "draft_length_mean"),
    ("max", "draft_length_max"),
    ("coverage", "coverage"),
    ("reused", "reused_share"),
    ("halt s", "halt_delay_seconds"),
    ("update halt s", "update_halt_seconds"),
)
"""As its Tables 3 and 8, with what came of it."""
_COMPARED = (BUBBLESPEC, IN_STEP, OVERLAP)

Runs = Mapping[str, list[ReplayedStep]]
"""The counted steps of each system, all rounds in a row."""


def main() -> None:
    """Measure, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = _arguments()
    options = Options(
        steps=given.steps,
        prompts=given.prompts,
        samples=given.samples,
        pool=given.steps * given.prompts,
        max_tokens=given.max_tokens,
        # The trainer has a machine of its own, like this one.
        threads=len(cores()),
        lr=given.lr,
        seed=given.seed,
    )
    config = plain_platform(MODEL, given.instances[0], FOLDER / "trajectory")
    trajectory = record(config, options, FOLDER / "weights", lambda step: _say("recorded", step))
    comparison = Comparison()
    fleets = {
        count: _measure(trajectory, _systems(given, place), count, given.rounds, comparison)
        for place, count in enumerate(given.instances)
    }
    tables = {count: _figures(runs) for count, runs in fleets.items()}
    for count, table in tables.items():
        show_table(f"bubbles: {count} instances, means over steps", _SPEED, table)
        show_table(f"bubbles: {count} instances, what was generated ahead", _FILLED, table)
    plain = [step.samples for step in trajectory.steps]
    ties = judge_all(comparison.differences, trajectory, plain, Judge())
    write("bubbles", _result(given, trajectory, tables, comparison, ties))


def _systems(given: argparse.Namespace, place: int) -> list[System]:
    """Return the systems to compare on the fleet at `place`; variants on the first one only."""
    chosen = [PLAIN, *(system for system in _COMPARED if system.name in given.systems)]
    if place == 0:
        chosen += [INTRA] if given.intra else []
        chosen += [BUBBLESPEC.per_prompt(samples) for samples in given.per_prompt]
    return chosen


def _measure(
    trajectory: Trajectory, systems: Sequence[System], instances: int, rounds: int, comparison: Comparison
) -> Runs:
    """Return the steps that count of each system, after all its tokens were compared with the trajectory's."""
    runs: dict[str, list[ReplayedStep]] = {system.name: [] for system in systems}
    for number in range(rounds):
        for system in systems if number % 2 == 0 else reversed(systems):
            config = platform_of(system, MODEL, instances, FOLDER / f"{instances}-instances")
            with Platform(config) as platform, _covering(platform) as covering:
                manner = ReplaySetup(f"bubbles-{time.time_ns():x}", hint=system.bubbles)
                label = f"{system.name}, {instances} instances"
                steps = replay(platform, trajectory, manner, covering, partial(_say, label))
            for recorded, step in zip(trajectory.steps, steps, strict=True):
                comparison.add(label, step.step, recorded.responses, step.responses)
            runs[system.name] += steps[WARM_UP:]
    return runs


def _covering(platform: Platform) -> AbstractContextManager[Covering]:
    return Coverage(platform) if platform.config.bubbles else nullcontext(nothing_covered)


def _figures(runs: Runs) -> dict[str, dict[str, Any]]:
    """Return the columns of each system, and how much less it needs than plain decoding."""
    plain = runs[PLAIN.name]
    return {
        name: {
            **columns.columns(steps),
            "decode_steps_reduction": columns.reduction(plain, steps, columns.mean_decode_steps),
            "max_decode_steps_reduction": columns.reduction(plain, steps, columns.max_decode_steps),
            "rollout_time_reduction": columns.reduction(plain, steps, lambda step: step.rollout_seconds),
            "step_time_reduction": columns.reduction(plain, steps, columns.rollout_and_update),
        }
        for name, steps in runs.items()
    }


def _result(
    given: argparse.Namespace,
    trajectory: Trajectory,
    tables: Mapping[int, Mapping[str, Mapping[str, Any]]],
    comparison: Comparison,
    ties: Sequence[Tie],
) -> dict[str, Any]:
    """Return the JSON result; the first fleet's figures are the headline."""
    best = tables[given.instances[0]].get(OVERLAP.name, {})
    return {
        "step_reduction": best.get("decode_steps_reduction"),
        "step_time_reduction": best.get("step_time_reduction"),
        "tokens_differing_share": comparison.differing_share,
        "goals": GOALS,
        "tokens_compared": comparison.compared,
        "differences": [{**asdict(tie), "near_tie": tie.near} for tie in ties],
        "differences_all_near_ties": all(tie.near for tie in ties),
        **{f"instances_{count}": table for count, table in tables.items()},
        "systems": {system.name: system.about for place in (0, 1) for system in _systems(given, place)},
        "options": vars(given),
        "tokens_of_trajectory": trajectory.tokens,
        "recorded_update_seconds": [step.update_seconds for step in trajectory.steps],
        "kl_per_step": [step.moved_kl for step in trajectory.steps],
        "warm_up_steps": WARM_UP,
    }


def _say(label: str, step: Any) -> None:
    console().print(
        f"{label}: step {step.step}, rollout {step.rollout_seconds:.2f} s, update {step.update_seconds:.2f} s",
        highlight=False,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=_LR, help="of the recorded run")
    names = [system.name for system in _COMPARED]
    parser.add_argument("--systems", nargs="*", choices=names, default=names, help="beside plain")
    parser.add_argument("--intra", action="store_true", help="also beside the step's last samples (Table 9)")
    parser.add_argument(
        "--per-prompt", type=int, nargs="*", default=[], help="bubblespec with so many a prompt (Table 8)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
