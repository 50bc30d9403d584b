"""Train drafters along a recorded run, each in its own way, and measure their acceptance in it.

All followers begin with the same warmed-up head. At every step of the run, the acceptance of a follower's drafts
for the step's samples is measured first; only then may it learn from them. An asynchronous follower uses what it
learned from step s from step s + 2 on, because its update can run during all of step s + 1. A synchronous one uses
it in step s + 1, which waits for the update. A follower is therefore always measured on samples that it has never
seen, of a policy that it has not learned from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from services.drafter.learning.data import LearningSettings, TrainingSample, Weighting, weights_of


@dataclass(frozen=True, slots=True)
class Follower:
    """Way to follow: how samples weigh, and that every `interval` steps 1 / `interval` of the buffer is used."""

    name: str
    about: str
    weighting: Weighting | None
    """None: the drafter does not change."""
    interval: int = 1
    acceptance_share: float | None = None
    """None: the value of the settings."""
    delay: int = 2
    """Steps from the step that is learned from to the first step drafted with the result."""
    first_policy: bool = False
    """Learn from other samples of the first policy, as much as a follower does."""


FROZEN = Follower("frozen", "warmed up on the first policy, then left alone (the paper's Eagle-only)", None)
MORE = Follower(
    "more warm-up",
    "learns as much and as often as Async-1, from samples of the first policy",
    Weighting.NONE,
    first_policy=True,
)
SYNC = Follower("Sync", "every step, and the next step waits for the update", Weighting.NONE, delay=1)
ASYNC_1 = Follower("Async-1", "every step, beside the next one", Weighting.NONE)
ASYNC_3 = Follower("Async-3", "every third step, from a third of the samples", Weighting.NONE, 3)
ASYNC_5 = Follower("Async-5", "every fifth step, from a fifth of the samples", Weighting.NONE, 5)
DIVERGENCE = Follower(
    "divergence alone", "Async-1, by plain distillation", Weighting.NONE, acceptance_share=0.0
)
REWARD = Follower("reward-weighted", "Async-1 with w(r) = r, normalised and clipped", Weighting.REWARD)
FOLLOWERS = (FROZEN, ASYNC_1, SYNC, ASYNC_3, ASYNC_5, MORE, DIVERGENCE, REWARD)


@dataclass(frozen=True, slots=True)
class RecordedRollouts:
    """A step of the run: its samples, the weights that sampled them, and the time available to an update."""

    step: int
    weights: Path
    rollouts: tuple[TrainingSample, ...]
    window_seconds: float
    """Seconds from the last sample of the step to the end of the next rollout, which can hide an update."""


@dataclass(slots=True)
class FollowerRecord:
    """Acceptance of one follower, step by step."""

    acceptance_length: list[float] = field(default_factory=list)
    by_place: list[list[float]] = field(default_factory=list)
    """Acceptance of each draft position given that all previous ones were accepted, by step."""
    divergence: list[float] = field(default_factory=list)
    """KL(policy || drafter) per token."""
    update_seconds: list[float] = field(default_factory=list)
    """Seconds on one core of the update that made each step's drafter; 0 where there was none."""
    tokens: int = 0
    """Response tokens learned from."""
    read: int = 0
    """Tokens of the samples learned from, prompts included."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Number of samples that a step measures and learns from."""

    evaluated: int = 24
    """Samples that acceptance is measured on."""
    learned: int = 32
    """Samples that an update of Async-1 learns from, as many as the paper's; the same for longer intervals."""


def follow(
    follower: Follower,
    steps: Sequence[RecordedRollouts],
    first: Sequence[TrainingSample],
    head: Path,
    into: Path,
    settings: LearningSettings,
    seed: int = 0,
) -> FollowerRecord:
    """Run one follower along the recorded run, on one core, and return its record.

    Args:
        follower: the way to follow.
        steps: steps of the run.
        first: other samples of the first policy.
        head: checkpoint that all followers begin with.
        into: folder for the follower's result.
        settings: settings of the updates.
        seed: seed of the choice of samples to learn from.
    """
    import torch
    import transformers

    from services.drafter.learning.learner import Learner

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    own = replace(settings, seed=seed)
    if follower.acceptance_share is not None:
        own = replace(own, acceptance_share=follower.acceptance_share)
    amounts, learner = Amounts(), Learner(steps[0].weights, own, head)
    # Every follower is measured on the same samples, regardless of the samples that it draws to learn from.
    found, rng, measuring = FollowerRecord(), Random(seed), Random(1)
    for place, step in enumerate(steps):
        past = steps[: max(place + 1 - follower.delay, 0)]
        found.update_seconds.append(learn(learner, follower, past, first, amounts, rng, found))
        learner.set_policy(step.weights, step.step)
        chosen = measuring.sample(step.rollouts, min(amounts.evaluated, len(step.rollouts)))
        measured = learner.evaluate(chosen)
        found.acceptance_length.append(measured.acceptance_length)
        found.by_place.append(list(measured.by_place))
        found.divergence.append(measured.kd_loss)
    learner.save(into / follower.name, 1)
    return found


def learn(
    learner: Any,
    follower: Follower,
    past: Sequence[RecordedRollouts],
    first: Sequence[TrainingSample],
    amounts: Amounts,
    rng: Random,
    found: FollowerRecord,
) -> float:
    """Do the update that is due after the last of the `past` steps, if any; return its seconds."""
    if follower.weighting is None or not past or len(past) % follower.interval:
        return 0.0
    buffer = past[-follower.interval :]
    rollouts = [rollout for step in buffer for rollout in step.rollouts]
    count = min(amounts.learned, len(rollouts) // follower.interval)
    policies = {step.step: step.weights for step in buffer}
    if follower.first_policy:
        rollouts, policies = list(first), {first[0].policy_version: past[0].weights}
    chosen = rng.sample(rollouts, min(count, len(rollouts)))
    weights = weights_of(chosen, follower.weighting)
    seconds = 0.0
    for version, folder in policies.items():
        mine = [i for i, rollout in enumerate(chosen) if rollout.policy_version == version]
        if mine:
            learner.set_policy(folder, version)
            began = time.process_time()
            report = learner.update([chosen[i] for i in mine], [weights[i] for i in mine])
            seconds += time.process_time() - began
            found.tokens += report.tokens
            found.read += sum(chosen[i].length for i in mine)
    return seconds
