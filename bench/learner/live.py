"""A recorded run done once more on a platform that drafts with an EAGLE-3 head and trains it meanwhile.

Prompts, seeds and the trainer are those of the recorded run. As long as every sample is the same, so are the
rewards and the weights; the first sample that differs is judged (bench/ties.py): two scores so close that rounding
decides. From there on the two runs learn from different samples, and nothing more can be compared.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.comparison import Comparison
from bench.learner.recording import LearnerSubject
from bench.scrape import scrape
from bench.systems import KV_BYTES
from bench.ties import Judge, judge_all
from bench.training import TrainedStep, train
from examples.tinymath.train import Options, new_learner
from paceline import Exactness, WeightFolder
from services.drafter.learning.data import LearningSettings
from services.local import Platform, PlatformConfig

_SECONDS = "paceline_drafter_training_seconds_total"


@dataclass(frozen=True, slots=True)
class LiveComparison:
    """Comparison of the run that drafts with the plain run."""

    steps: int
    """That were done on both sides."""
    first_difference_step: int | None
    """The first step whose mean reward is not the plain run's; None: it is the same curve to the end."""
    first_token_difference_step: int | None
    """The first step with a sample that is not the plain run's."""
    differences: list[dict[str, Any]]
    """Of that step, each with what the judge found."""
    differences_all_near_ties: bool
    tokens_compared: int
    """Up to and with that step."""
    rewards: list[float]
    acceptance_length: list[float]
    """By step: accepted tokens a verification, and one; 1 where nothing was drafted."""
    drafted: int
    accepted: int
    drafter_versions: list[int]
    """Published when each step was over."""
    hidden_share: float | None
    """Of the learner's seconds, those beside generation or the trainer's work; None: it did not train."""
    rollout_seconds: list[float]


def compare_live(
    subject: LearnerSubject,
    steps: int,
    instances: int,
    settings: LearningSettings,
    say: Callable[[str, TrainedStep], None],
) -> LiveComparison:
    """Run the first `steps` steps of the recorded run with the drafter at work."""
    trajectory = subject.trajectory
    options = replace(trajectory.options, steps=min(steps, trajectory.options.steps))
    found, versions, share = _run(options, subject, instances, settings, say)
    comparison = Comparison()
    token_step: int | None = None
    for plain, step in zip(trajectory.steps, found, strict=False):
        comparison.add("eagle3", step.step, plain.responses, step.responses)
        if comparison.differences:
            token_step = step.step
            break
    truth = [step.samples for step in trajectory.steps]
    ties = judge_all(comparison.differences, trajectory, truth, Judge())
    rewards = [step.reward for step in found]
    by_reward = (i for i, reward in enumerate(rewards) if reward != trajectory.steps[i].reward)
    work = [[sample.provenance for sample in step.samples.values()] for step in found]
    return LiveComparison(
        steps=len(found),
        first_difference_step=next(by_reward, None),
        first_token_difference_step=token_step,
        differences=[{**asdict(tie), "near_tie": tie.near} for tie in ties],
        differences_all_near_ties=all(tie.near for tie in ties),
        tokens_compared=comparison.compared,
        rewards=rewards,
        acceptance_length=[
            1 + sum(p.accepted for p in each) / max(sum(p.verify_steps for p in each), 1) for each in work
        ],
        drafted=sum(p.drafted for each in work for p in each),
        accepted=sum(p.accepted for each in work for p in each),
        drafter_versions=versions,
        hidden_share=share,
        rollout_seconds=[step.rollout_seconds for step in found],
    )


def _run(
    options: Options,
    subject: LearnerSubject,
    instances: int,
    settings: LearningSettings,
    say: Callable[[str, TrainedStep], None],
) -> tuple[list[TrainedStep], list[int], float | None]:
    """Return the steps, the drafter's version after each, and the hidden share of training seconds."""
    weights_folder = subject.folder / "live" / "weights"
    shutil.rmtree(weights_folder, ignore_errors=True)
    weights = WeightFolder(weights_folder, subject.model, keep=options.steps + 2)
    learner = new_learner(subject.model, options)
    steps, versions = [], []
    with (
        Platform(_platform(subject, instances, settings)) as platform,
        platform.client() as client,
        client.run("trajectory", seed=options.seed, weights=weights) as run,
    ):
        for step in train(run, learner, options, weights, Exactness()):
            steps.append(step)
            versions.append(client.versions().drafter_version)
            say("live", step)
        return steps, versions, _hidden_share(platform)


def _platform(subject: LearnerSubject, instances: int, settings: LearningSettings) -> PlatformConfig:
    """Nothing drafts but the head, always, as many tokens as it was trained for: it is the head that is to be seen.

    Whether that pays is for the planner to say, which is left out here.
    """
    return PlatformConfig(
        model=subject.model,
        instances=instances,
        folder=subject.folder / "live",
        instance_options=(
            "--dtype=float32",
            f"--kv-cache-memory-bytes={KV_BYTES}",
            "--speculation=fixed",
            "--drafters=reference",
            "--draft-floor=0",
            "--survival-floor=0",
            f"--draft-window={settings.depth}",
            f"--eagle3-tokens={settings.depth}",
        ),
        draft_stores=0,
        bubbles=False,
        policy=False,
        reallocator=False,
        learner=True,
        drafter=subject.drafter,
        learner_options=(
            f"--depth={settings.depth}",
            f"--batch-tokens={settings.batch_tokens}",
            f"--lr={settings.lr}",
        ),
    )


def _hidden_share(platform: Platform) -> float | None:
    seconds = scrape(platform)["drafter"]
    hidden, other = (seconds[f'{_SECONDS}{{hidden="{value}"}}'] for value in ("true", "false"))
    return hidden / (hidden + other) if hidden + other else None
