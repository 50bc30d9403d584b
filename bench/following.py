"""Drafters that follow a recorded training run, each in its own way, and what they would have been worth in it.

All begin with the same warmed-up head. For every step of the run a follower is first asked how far its drafts for
the step's samples are accepted, as it is by then; only then may it learn from them. What it learned from step s is
in use from step s + 2 on: an asynchronous update has all of step s + 1 to run beside. So every sample that it is
measured on is one that it has never seen, sampled by a policy that it has not learned from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from services.drafter.learning.data import TrainingSample
from services.drafter.learning.settings import LearningSettings, Targets
from services.drafter.learning.weighting import Weighting, weights_of

_DELAY = 2
"""Steps from the one that is learned from to the first that is drafted for with what was learned."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A way to follow: how samples weigh, and that every `interval` steps 1 / `interval` of the buffer is used."""

    name: str
    about: str
    weighting: Weighting | None
    """None: the drafter stays as it is."""
    interval: int = 1
    targets: Targets = Targets.POLICY


FROZEN = Follower("frozen", "warmed up on the first policy, then left alone (the paper's Eagle-only)", None)
NO_REWARD = Follower("no-reward KD", "every sample counts the same", Weighting.NONE)
REWARD = Follower("reward-weighted KD", "w(r) = r, normalised and clipped; Async-1", Weighting.REWARD)
ASYNC_3 = Follower("Async-3", "reward-weighted, every third step", Weighting.REWARD, 3)
ASYNC_5 = Follower("Async-5", "reward-weighted, every fifth step", Weighting.REWARD, 5)
TOP_K = Follower(
    "top-k targets",
    "reward-weighted, taught the most likely tokens alone",
    Weighting.REWARD,
    1,
    Targets.TOP_K,
)
GROUP = Follower("group-weighted KD", "weighed against the samples of the same prompt", Weighting.GROUP)
FOLLOWERS = (FROZEN, NO_REWARD, REWARD, ASYNC_3, ASYNC_5, TOP_K, GROUP)


@dataclass(frozen=True, slots=True)
class RecordedRollouts:
    """A step of the run: its samples, the weights that sampled them, and how long what came after them took."""

    step: int
    weights: Path
    rollouts: tuple[TrainingSample, ...]
    window_seconds: float
    """From its last sample to the end of the next step's rollout: what an update can hide behind."""


@dataclass(slots=True)
class FollowerRecord:
    """Acceptance of one follower, step by step."""

    acceptance_length: list[float] = field(default_factory=list)
    first_place: list[float] = field(default_factory=list)
    """Share of drafts whose first token was right."""
    divergence: list[float] = field(default_factory=list)
    """KL(policy || drafter) per token."""
    update_seconds: list[float] = field(default_factory=list)
    """Before each step, of the update that made its drafter; 0 where there was none."""
    tokens: int = 0
    """Learned from."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Number of samples that a step measures and learns from."""

    evaluated: int = 24
    """Samples that drafts are measured on."""
    learned: int = 32
    """Samples that an update of Async-1 learns from, as many as the paper's: of a longer interval likewise."""


def follow_all(
    followers: Sequence[Follower],
    steps: Sequence[RecordedRollouts],
    drafter: Path,
    settings: LearningSettings,
    amounts: Amounts,
    processes: int,
) -> dict[str, FollowerRecord]:
    """Every follower along the whole run, in so many processes of one thread each."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            # Those with the most to do first, so that the processes end together.
            order = sorted(followers, key=lambda each: (each.weighting is None, each.interval))
            found = {
                each.name: pool.submit(follow, each, tuple(steps), drafter, settings, amounts)
                for each in order
            }
            return {each.name: found[each.name].result() for each in followers}
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def follow(
    follower: Follower,
    steps: Sequence[RecordedRollouts],
    drafter: Path,
    settings: LearningSettings,
    amounts: Amounts,
) -> FollowerRecord:
    """One follower along the run."""
    import torch
    import transformers

    from services.drafter.learning.learner import Learner

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    learner = Learner(steps[0].weights, replace(settings, targets=follower.targets), drafter)
    # Every follower is measured on the same samples, whatever it draws to learn from.
    found, rng, measuring = FollowerRecord(), Random(0), Random(1)
    for place, step in enumerate(steps):
        # What was learned from the step before last is in use by now.
        found.update_seconds.append(
            _learn(learner, follower, steps[: max(place + 1 - _DELAY, 0)], amounts, rng, found)
        )
        learner.set_policy(step.weights, step.step)
        chosen = measuring.sample(step.rollouts, min(amounts.evaluated, len(step.rollouts)))
        measured = learner.evaluate(chosen)
        found.acceptance_length.append(measured.acceptance_length)
        found.first_place.append(measured.by_place[0])
        found.divergence.append(measured.kd_loss)
    return found


def _learn(
    learner: Any,
    follower: Follower,
    past: Sequence[RecordedRollouts],
    amounts: Amounts,
    rng: Random,
    found: FollowerRecord,
) -> float:
    """Return the update that is due behind the last of the `past` steps, if one is; its seconds."""
    if follower.weighting is None or not past or len(past) % follower.interval:
        return 0.0
    buffer = past[-follower.interval :]
    rollouts = [rollout for step in buffer for rollout in step.rollouts]
    chosen = rng.sample(rollouts, min(amounts.learned, len(rollouts) // follower.interval))
    weights = weights_of(chosen, follower.weighting)
    seconds = 0.0
    for step in buffer:
        mine = [i for i, rollout in enumerate(chosen) if rollout.policy_version == step.step]
        if mine:
            learner.set_policy(step.weights, step.step)
            report = learner.update([chosen[i] for i in mine], [weights[i] for i in mine])
            seconds += report.seconds
            found.tokens += report.tokens
    return seconds
