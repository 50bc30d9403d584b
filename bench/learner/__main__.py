"""Compare drafters that train along with the policy with a frozen one (ReSpec, Figures 4, 10 and 15).

A real GRPO run is recorded on a plain platform, together with samples of its first policy. A head is warmed up on
these samples and then follows the run in several ways (bench/learner/following.py): frozen, synchronously, at
intervals of 1, 3 and 5 steps, by plain distillation, from top-k targets, and with samples weighted by reward. One
more follower trains as much on samples of the first policy. A head after a short warm-up is far from its
optimum, so that part of a follower's gain over the frozen head comes from longer training alone. Measured
acceptance and training seconds are replayed through the table of step times of Qwen3-8B on an H100
(bench/learner/replay.py). With several seeds this is repeated with a run of each seed, for means and spreads.

    python -m bench.learner [--model DIR] [--steps 60] [--seeds 1] [--minutes 8]

Parts are kept under runs/bench/learner, and a call resumes with the first missing part. Each model adds its figures
to runs/bench/learner.json. Acceptance length is tokens per verification, including the policy's own token, with
drafts of --depth tokens.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.learner.following import ASYNC_1, ASYNC_3, ASYNC_5, FOLLOWERS, FROZEN, REWARD, FollowerRecord
from bench.learner.recording import LearnerSubject, recorded_steps
from bench.learner.replay import (
    against,
    efficiency,
    h100_update_seconds,
    product_rate,
    replayed,
    update_tokens,
)
from bench.learner.session import LearnerSession, OutOfTimeError, name_of, read
from bench.learner.tables import figures, gain, over_seeds, tables, weighting_verdict
from bench.report import console, format_value, show_rows, write

_BATCHES = (16, 128)
"""Samples of a simulated instance: ReSpec's number, and a large one."""


def arguments() -> argparse.Namespace:
    """Parse the options."""
    return read(__doc__ or "")


def main() -> None:
    """Measure the followers, then show and write the figures."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    session = LearnerSession(arguments())
    try:
        found = _measured(session)
    except OutOfTimeError:
        console().print("learner: out of time; call again to continue")
        return
    path = Path("runs/bench/learner.json")
    models = json.loads(path.read_text()).get("models", {}) if path.exists() else {}
    models[name_of(session.given.model)] = found
    result = _result(models)
    shown = [(name, format_value(value)) for name, value in result.items() if not isinstance(value, dict)]
    for name, table in result["tables"].items():
        show_rows(f"learner: {name}", table["columns"], table["rows"])
    show_rows("learner", ("figure", "value"), shown)
    write("learner", result)


def _measured(session: LearnerSession) -> dict[str, Any]:
    """Return all figures of the model. OutOfTimeError if a later call must continue."""
    given = session.given
    followers = [each for each in FOLLOWERS if each.name in given.followers]
    subjects: list[LearnerSubject] = []
    runs: list[dict[str, FollowerRecord]] = []
    for place in range(given.seeds):
        seed, left = given.seed + place, len(followers) * (given.seeds - place)
        subject = session.subject(seed)
        subjects.append(subject)
        runs.append(
            {each.name: session.follow(subject, each, seed, left - i) for i, each in enumerate(followers)}
        )
    rate = product_rate()
    seeds = [_of_seed(session, subject, run, rate) for subject, run in zip(subjects, runs, strict=True)]
    found: dict[str, Any] = {
        "figures": over_seeds([each["figures"] for each in seeds]),
        "seeds": {str(given.seed + place): each for place, each in enumerate(seeds)},
        "about": {each.name: each.about for each in followers},
        "parameters": _parameters(subjects[0].model),
        "product_rate": rate,
        "reward_gains": [gain(run[REWARD.name], run[ASYNC_1.name]) for run in runs if REWARD.name in run],
        "options": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()
        },
    }
    return found


def _of_seed(
    session: LearnerSession, subject: LearnerSubject, runs: dict[str, FollowerRecord], rate: float
) -> dict[str, Any]:
    """Return the figures of one recorded run; `rate` is the machine's matrix-product rate."""
    steps = subject.trajectory.steps
    return {
        "figures": figures(runs, recorded_steps(subject.trajectory)),
        "followers": {name: asdict(run) for name, run in runs.items()},
        "warm_up": subject.warmed,
        "rewards": [step.reward for step in steps],
        "kl_per_step": [step.moved_kl for step in steps],
        "tokens_of_trajectory": subject.trajectory.tokens,
        **(_replays(session, subject, runs, rate) if FROZEN.name in runs else {}),
    }


def _replays(
    session: LearnerSession, subject: LearnerSubject, runs: dict[str, FollowerRecord], rate: float
) -> dict[str, Any]:
    """Return simulated rollouts by samples an instance, and the share of `rate` that the updates reach."""
    depth = session.given.depth
    policy, head = _parameters(subject.model), _parameters(subject.drafter)
    shares = {
        name: efficiency(run, policy, head, depth, rate)
        for name, run in runs.items()
        if any(run.update_seconds)
    }
    intervals = {each.name: each.interval for each in FOLLOWERS}
    replays = {}
    for samples in _BATCHES:
        console().print(
            f"learner: rollouts of 8 instances of {samples} samples are simulated", highlight=False
        )
        training = {
            name: h100_update_seconds(shares[name], depth, update_tokens(intervals[name], samples))
            if name in shares
            else 0.0
            for name in runs
        }
        replays[str(samples)] = {
            name: {**asdict(each), "seconds": each.seconds, "slow_seconds": each.slow_seconds}
            for name, each in replayed(runs, samples, depth, training).items()
        }
    return {"efficiency": shares, "replays": replays}


def _result(models: dict[str, Any]) -> dict[str, Any]:
    """Return the result to write: all models, with the figures of the largest first."""
    largest = max(models.values(), key=lambda each: each["parameters"])
    replays = [each["replays"][str(_BATCHES[0])] for each in largest["seeds"].values() if "replays" in each]
    followed = bool(replays) and ASYNC_1.name in replays[0]
    most = max(models.values(), key=lambda each: len(each["reward_gains"]))
    own = largest["figures"].get(ASYNC_1.name, {})
    return {
        "subject_seeds": len(largest["seeds"]),
        **(against(replays, ASYNC_1.name) if followed else {}),
        "final_gain_vs_frozen": own.get("gain_vs_frozen"),
        "final_gain_spread": own.get("gain_spread"),
        **(weighting_verdict(most["reward_gains"]) if most["reward_gains"] else {}),
        "async_intervals": {
            str(each.interval): largest["figures"][each.name]["last"]
            for each in (ASYNC_1, ASYNC_3, ASYNC_5)
            if each.name in largest["figures"]
        },
        "tables": tables(models),
        "models": models,
    }


def _parameters(folder: Path) -> float:
    """Return the number of parameters of a float32 checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 4


if __name__ == "__main__":
    main()
