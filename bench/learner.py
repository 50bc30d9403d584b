"""Drafters that are trained while the policy is, against one that is not (ReSpec, Figures 4, 10 and 15).

A real GRPO run of tinymath is recorded on a plain platform, with samples of its first policy beside. A drafter is
warmed up on these, and then follows the run in several ways (bench/following.py): frozen, by plain and by
reward-weighted distillation, at intervals of 1, 3 and 5 steps, and from top-k targets. Then the run is done once
more on a platform that drafts with the warmed-up head and trains it meanwhile: with coupled sampling in float32 its
reward curve is that of plain decoding up to the first floating-point tie, and its learner tells which of its
seconds were hidden. Writes runs/bench/learner.json and a picture beside it.

    python -m bench.learner [--steps 60] [--live-steps 20] [--warm-up-seconds 90 | --drafter DIR]

Acceptance length is tokens a verification, the policy's own included, with drafts of --depth tokens. A head that
was warmed up for a short time is far from what it can be: then part of what following gains over the frozen one is
mere training. Give a longer time, or a head of services.drafter.warmup, to see what following is worth.
"""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from bench.following import (
    ASYNC_3,
    ASYNC_5,
    FOLLOWERS,
    FROZEN,
    REWARD,
    Amounts,
    FollowerRecord,
    RecordedRollouts,
    follow_all,
)
from bench.learner_live import LiveComparison, compare_live
from bench.learner_picture import draw
from bench.report import console, cores, format_value, show_rows, show_table, write
from bench.systems import plain_platform
from bench.training import TrainedStep, train
from bench.trajectory import Trajectory
from examples.tinymath import tokenizer
from examples.tinymath.tasks import PRACTICE, load_problem, make_problems
from examples.tinymath.train import MODEL, Options, collect, groups, new_learner
from paceline import Exactness, SamplingParams, WeightFolder
from services.drafter.learning.data import TrainingSample
from services.drafter.learning.settings import LearningSettings
from services.local import Platform

FOLDER = Path("runs/bench/learner")
PICTURE = Path("runs/bench/learner.svg")
_LAST = 10
"""Steps at the end of the run that `final_gain_vs_frozen` is the mean of."""
_LR = 5e-4
_DRAFTER_LR = 1.5e-3
"""Less than a fresh head begins with: at that, what a good one knows is lost again to the noise of few samples."""
_WARM_UP_SEED = 977
"""Of the problems to warm up on: the run has others."""
_COLUMNS = (
    ("first steps", "first"),
    ("last steps", "last"),
    ("against frozen", "gain_vs_frozen"),
    ("first place", "first_place"),
    ("KL", "divergence"),
    ("tokens", "tokens"),
    ("update s", "update_seconds"),
    ("hidden", "hidden_share"),
)


@dataclass(frozen=True, slots=True)
class Recording:
    """The run, and samples of its first policy for other problems."""

    trajectory: Trajectory
    warm_up: tuple[TrainingSample, ...]


def main() -> None:
    """Measure, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = _arguments()
    options = Options(
        steps=given.steps,
        prompts=given.prompts,
        samples=given.samples,
        pool=given.pool,
        max_tokens=given.max_tokens,
        threads=len(cores()),
        lr=given.lr,
        seed=given.seed,
    )
    settings = LearningSettings(
        depth=given.depth, layers=tuple(given.layers), batch_tokens=given.batch_tokens, top_k=given.top_k
    )
    recording = _record(options, given.instances, given.warm_up_prompts)
    if given.drafter:
        drafter, warmed = Path(given.drafter).absolute(), {"drafter": given.drafter}
    else:
        drafter, warmed = _warm_up(recording, settings, given.warm_up_seconds)
    steps = recorded_steps(recording.trajectory)
    followers = [each for each in FOLLOWERS if each.name in given.followers]
    amounts = Amounts(given.evaluated, given.learned)
    following = replace(settings, lr=given.drafter_lr)
    runs = follow_all(followers, steps, drafter, following, amounts, len(cores()))
    table = figures(runs, steps)
    show_table(f"learner: acceptance length of drafts of {given.depth} tokens", _COLUMNS, table)
    live = None
    if given.live_steps:
        live = compare_live(
            recording.trajectory, given.live_steps, drafter, given.instances, following, FOLDER / "live", _say
        )
    result = _result(given, recording.trajectory, runs, table, live) | {"warm_up": warmed}
    if live:
        result["first_step"] = {
            "engine": live.acceptance_length[0],
            "evaluation": _as_the_engine_counts(steps[0], drafter, settings),
        }
    rewards = [step.reward for step in recording.trajectory.steps]
    if not draw(runs, rewards, live.rewards if live else [], PICTURE):
        console().print("no picture: matplotlib is not installed")
    names = ("final_gain_vs_frozen", "hidden_share", "reward_curve_first_difference_step")
    show_rows("learner", ("figure", "value"), [(name, format_value(result[name])) for name in names])
    write("learner", result)


def _record(options: Options, instances: int, warm_up_prompts: int) -> Recording:
    """Trains on a plain platform, and samples for the warm-up before."""
    folder = FOLDER / "weights"
    shutil.rmtree(folder, ignore_errors=True)
    weights = WeightFolder(folder, MODEL.absolute(), keep=options.steps + 2)
    learner = new_learner(MODEL, options)
    steps: list[TrainedStep] = []
    with (
        Platform(plain_platform(MODEL, instances, FOLDER / "trajectory")) as platform,
        platform.client() as client,
    ):
        with client.run("warm-up", seed=options.seed) as run:
            problems = make_problems(_WARM_UP_SEED, warm_up_prompts, PRACTICE)
            sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
            asked = groups(problems, options)
            samples = collect(run.rollout(0, asked, sampling), lambda *_: None)
            prompts = {group.prompt_id: group.prompt_token_ids for group in asked}
            warm_up = tuple(_rollout(sample, prompts[sample.prompt_id], 0, None) for sample in samples)
        with client.run("trajectory", seed=options.seed, weights=weights) as run:
            for step in train(run, learner, options, weights, Exactness()):
                steps.append(step)
                _say("recorded", step)
    last = sorted(folder.glob("v[0-9]*"))[-1].absolute()
    return Recording(Trajectory(options, tuple(steps), last), warm_up)


def _rollout(sample: Any, prompt: Iterable[Any], step: int, reward: float | None) -> TrainingSample:
    return TrainingSample(
        run_id="trajectory",
        batch_id=str(step),
        prompt_id=sample.prompt_id,
        slot=sample.slot,
        policy_version=step,
        prompt=tuple(int(token) for token in prompt),
        response=tuple(sample.token_ids.tolist()),
        reward=reward,
        seed=sample.seed,
    )


def _warm_up(recording: Recording, settings: LearningSettings, seconds: float) -> tuple[Path, dict[str, Any]]:
    """Return the head that all followers begin with, and what it can."""
    import torch

    from services.drafter.learning.learner import Learner
    from services.drafter.warmup import split, warm_up

    torch.set_num_threads(len(cores()))
    learner = Learner(MODEL, settings)
    learned, held = split(recording.warm_up, 0.1, seed=0)
    best, path, began = 0.0, None, time.perf_counter()
    for passed in warm_up(learner, learned, held, [1.0] * len(learned), passes=100, seconds=seconds):
        length = passed.evaluation.acceptance_length
        console().print(f"warm-up: pass {passed.number}, acceptance length {length:.3f}", highlight=False)
        if passed.is_best:
            best, path = length, learner.save(FOLDER / "drafters", 1).path
    assert path is not None, "there was a pass"
    tokens = sum(rollout.drafted for rollout in learned)
    return path.absolute(), {
        "acceptance_length": best,
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
    }


def recorded_steps(trajectory: Trajectory) -> list[RecordedRollouts]:
    """Return the steps of a run as the followers see them, with the reward of each sample."""
    steps = trajectory.steps
    # An update that is still running when the run ends has nothing more to hide behind.
    following = [after.rollout_seconds for _, after in pairwise(steps)] + [0.0]
    found = []
    for place, (step, next_rollout) in enumerate(zip(steps, following, strict=True)):
        prompts = {group.prompt_id: group.prompt_token_ids for group in step.groups}
        rollouts = tuple(
            _rollout(
                sample,
                prompts[key.prompt_id],
                place,
                load_problem(key.prompt_id).reward(tokenizer.decode(sample.token_ids.tolist())),
            )
            for key, sample in step.samples.items()
        )
        window = step.update_seconds + step.push_seconds + next_rollout
        found.append(RecordedRollouts(place, step.weights, rollouts, window))
    return found


def _as_the_engine_counts(step: RecordedRollouts, drafter: Path, settings: LearningSettings) -> float:
    """Return the acceptance length of a drafter over all samples of a step, by the learner's evaluation."""
    from services.drafter.learning.learner import Learner

    found = Learner(step.weights, settings, drafter).evaluate(step.rollouts)
    return 1 + found.accepted / found.verifications


def figures(runs: dict[str, FollowerRecord], steps: Sequence[RecordedRollouts]) -> dict[str, dict[str, Any]]:
    """Return a row for each follower."""
    frozen = runs.get(FROZEN.name)
    return {
        name: {
            "first": mean(run.acceptance_length[:_LAST]),
            "last": mean(run.acceptance_length[-_LAST:]),
            "gain_vs_frozen": gain(run, frozen) if frozen else None,
            "first_place": mean(run.first_place[-_LAST:]),
            "divergence": mean(run.divergence[-_LAST:]),
            "tokens": run.tokens,
            "update_seconds": sum(run.update_seconds),
            "hidden_share": hidden_share(run, steps),
        }
        for name, run in runs.items()
    }


def gain(run: FollowerRecord, frozen: FollowerRecord) -> float:
    """Return the acceptance length over the last steps divided by the frozen drafter's, minus 1."""
    return mean(run.acceptance_length[-_LAST:]) / mean(frozen.acceptance_length[-_LAST:]) - 1


def hidden_share(run: FollowerRecord, steps: Sequence[RecordedRollouts]) -> float | None:
    """Share of update seconds that fit between the step's last sample and the end of the next rollout.

    As if the learner had a device of its own: its seconds are measured alone, and the run's are the recorded ones.
    An update that takes longer than that would be late for the step that it is counted for.
    """
    total = sum(run.update_seconds)
    pairs = zip(run.update_seconds[2:], steps, strict=False)
    return sum(min(seconds, step.window_seconds) for seconds, step in pairs) / total if total else None


def _result(
    given: argparse.Namespace,
    trajectory: Trajectory,
    runs: dict[str, FollowerRecord],
    table: dict[str, dict[str, Any]],
    live: LiveComparison | None,
) -> dict[str, Any]:
    reward = table.get(REWARD.name, {})
    return {
        "final_gain_vs_frozen": reward.get("gain_vs_frozen"),
        "hidden_share": live.hidden_share if live else None,
        "reward_curve_first_difference_step": live.first_difference_step if live else None,
        "reward_curve_steps_compared": live.steps if live else 0,
        "live": asdict(live) if live else "not run (--live-steps 0)",
        "async_intervals": {
            each.interval: table[each.name]["last"]
            for each in (REWARD, ASYNC_3, ASYNC_5)
            if each.name in table
        },
        "figures": table,
        "followers": {name: asdict(run) for name, run in runs.items()},
        "about": {each.name: each.about for each in FOLLOWERS},
        "rewards": [step.reward for step in trajectory.steps],
        "kl_per_step": [step.moved_kl for step in trajectory.steps],
        "rollout_seconds": [step.rollout_seconds for step in trajectory.steps],
        "trainer_seconds": [step.update_seconds for step in trajectory.steps],
        "tokens_of_trajectory": trajectory.tokens,
        "options": vars(given),
    }


def _say(label: str, step: TrainedStep) -> None:
    console().print(
        f"{label}: step {step.step}, reward {step.reward:.3f}, rollout {step.rollout_seconds:.2f} s, "
        f"update {step.update_seconds:.2f} s, KL {step.moved_kl:.1e}",
        highlight=False,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--live-steps", type=int, default=20, help="of the run on drafts; 0: without it")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pool", type=int, default=48, help="problems in all; each epoch goes through them")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--lr", type=float, default=_LR, help="of the recorded run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up-prompts", type=int, default=64)
    parser.add_argument("--warm-up-seconds", type=float, default=90.0)
    parser.add_argument("--drafter", help="folder of a head that is warmed up already, to begin with")
    names = [each.name for each in FOLLOWERS]
    parser.add_argument("--followers", nargs="+", choices=names, default=names[:-1])
    parser.add_argument(
        "--evaluated", type=int, default=24, help="samples of a step that drafts are measured on"
    )
    parser.add_argument("--learned", type=int, default=32, help="samples of an update")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 5])
    parser.add_argument(
        "--drafter-lr",
        type=float,
        default=_DRAFTER_LR,
        help="of following; the warm-up has the learner's own",
    )
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
