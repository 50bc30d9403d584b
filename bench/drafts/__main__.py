"""Drafts from what was generated before: the suffix index, and the reuse of earlier rollouts (SPEC-RL).

Index: speed, memory and acceptance, compared with the suffix cache of arctic-inference where
`arctic_inference.suffix_decoding` can be imported (PYTHONPATH), else its figures are null. Reuse: a real GRPO run,
recorded once on a plain platform with prompts that come back every epoch, is replayed under each exactness level
(bench/drafts/history.py). Only epochs after the first count. Writes runs/bench/drafts.json.

    python -m bench.drafts [--epochs 2] [--pool 64] [--only index reuse]
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.drafts import history
from bench.drafts.comparison import measure as measure_index
from bench.report import console, format_value, show_rows, show_table, write
from bench.systems import plain_platform
from bench.ties import Judge, judge_all
from bench.trajectory import Trajectory, record
from examples.tinymath.train import MODEL, Options

FOLDER = Path("runs/bench/drafts")
_PARTS = ("index", "reuse")
GOALS = {
    "batch_step_speedup_vs_arctic": ">= 3",
    "bytes_per_token_ratio_vs_arctic": "<= 1",
    "acceptance_ratio_vs_arctic": ">= 1",
    "reuse_coupled_history": ">= 0.5",
    "reuse_lenient": "",
    "build_share_of_rollout": "<= 0.01",
    "tokens_differing_share": "<= 1e-5",
}
_REUSE = (
    ("steps/token", "steps_per_token"),
    ("fewer steps", "decode_steps_reduction"),
    ("less time", "rollout_time_reduction"),
    ("rate", "acceptance_rate"),
    ("reused", "reused_share"),
    ("whole", "full_reuse_share"),
    ("wasted rows", "wasted_rows_per_token"),
    ("lossless", "lossless"),
)


def main() -> None:
    """Measure, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = _arguments()
    options = Options(
        steps=given.epochs * given.pool // given.prompts,
        prompts=given.prompts,
        samples=given.samples,
        pool=given.pool,
        max_tokens=given.max_tokens,
        seed=given.seed,
    )
    result: dict[str, Any] = {}
    if "index" in given.only:
        result |= measure_index()
    if "reuse" in given.only:
        config = plain_platform(MODEL, given.instances, FOLDER / "trajectory")
        trajectory = record(config, options, FOLDER / "weights", partial(_say, "recorded"))
        result |= _reuse(trajectory, given.instances)
    goals = [(name, format_value(result.get(name)), goal) for name, goal in GOALS.items()]
    show_rows("drafts", ("figure", "value", "goal"), goals)
    write("drafts", {**result, "goals": GOALS, "options": vars(given)})


def _reuse(trajectory: Trajectory, instances: int) -> dict[str, Any]:
    runs = history.run_all(trajectory, instances, FOLDER / "platform", _say)
    table = history.figures(trajectory.options, runs)
    exact, coupled = history.compare(trajectory, runs)
    ties = [
        tie
        for compared, base in ((exact, "plain"), (coupled, "plain, coupled noise"))
        for tie in judge_all(compared.differences, trajectory, [step.samples for step in runs[base]], Judge())
    ]
    show_table("reuse: replayed, epochs after the first", _REUSE, table)
    return {
        "reuse_coupled_history": table["coupled_history"]["reused_share"],
        "reuse_lenient": table["lenient e^0.5"]["reused_share"],
        "exact_step_reduction": table["exact"]["decode_steps_reduction"],
        "build_share_of_rollout": table["exact"]["build_share_of_rollout"],
        "tokens_differing_share": exact.differing_share,
        "tokens_differing_share_coupled_history": coupled.differing_share,
        "differences": [{**asdict(tie), "near_tie": tie.near} for tie in ties],
        "reuse": table,
    }


def _say(label: str, step: Any) -> None:
    console().print(f"{label}: step {step.step}, rollout {step.rollout_seconds:.2f} s", highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pool", type=int, default=64, help="problems; a multiple of --prompts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.pool % given.prompts:
        parser.error("--pool must be a multiple of --prompts: epochs begin with a step")
    return given


if __name__ == "__main__":
    main()
