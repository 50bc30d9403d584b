"""How much each sample counts in distillation: w(r) > 0 of its reward (ReSpec, section 5.3.1). Pure.

The paper's default is w(r) = r, "in practice we normalize and clip". Here weights have mean 1 over the samples that
are weighted together, so that neither the loss nor the learning rate depends on the scale of rewards, and lie in
[LOWEST, HIGHEST] before the mean is taken: a wrong answer still says what the policy does, and one lucky sample
among many does not make up the whole gradient.

- REWARD: w = r / mean r. Rewards below 0 count as 0.
- GROUP: relative to the samples of the same prompt, w = 1 + (r - mean) / std of its group: what GRPO reinforces
  counts more, however hard the prompt is. A group whose rewards all agree has weight 1.
- NONE: w = 1, plain distillation ("no-reward KD").

A sample without a reward, or with one that is not finite, has weight 1 before the mean is taken: nothing is known
for or against it. Where no reward tells samples apart (all equal, all 0, none given) all weights are 1.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeGuard

from services.drafter.rollout import Rollout

LOWEST, HIGHEST = 0.1, 4.0
"""Weights before their mean is made 1; their ratio, 40 at most, stays after it."""
_SAME = 1e-6
"""Rewards of a group agree if their standard deviation is below this share of the largest."""


class Weighting(enum.StrEnum):
    """Which w(r)."""

    REWARD = "reward"
    GROUP = "group"
    NONE = "none"


def weights_of(rollouts: Sequence[Rollout], weighting: Weighting) -> list[float]:
    """w(r) of each rollout, in order."""
    return weigh([rollout.reward for rollout in rollouts], [rollout.group for rollout in rollouts], weighting)


def weigh(rewards: Sequence[float | None], groups: Sequence[Hashable], weighting: Weighting) -> list[float]:
    """A weight for each reward: positive, finite, of mean 1.

    Args:
        rewards: of any scale; None or not finite: not known.
        groups: what is compared under GROUP, one for each reward.

    Raises:
        ValueError: not as many groups as rewards.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards, but {len(groups)} groups")
    if weighting is Weighting.NONE:
        return [1.0] * len(rewards)
    raw = _relative(rewards, groups) if weighting is Weighting.GROUP else _proportional(rewards)
    clipped = [min(max(weight, LOWEST), HIGHEST) for weight in raw]
    mean = sum(clipped) / max(len(clipped), 1)
    return [weight / mean for weight in clipped]


def _proportional(rewards: Sequence[float | None]) -> list[float]:
    """r / mean r over the known ones; where they say nothing, 1."""
    known = [max(reward, 0.0) for reward in rewards if _is_known(reward)]
    highest = max(known, default=0.0)
    if highest <= 0:
        return [1.0] * len(rewards)
    # As shares of the highest: a sum of huge rewards would overflow.
    mean = sum(reward / highest for reward in known) / len(known)
    return [max(reward, 0.0) / highest / mean if _is_known(reward) else 1.0 for reward in rewards]


def _relative(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[float]:
    """1 + the reward less its group's mean, over its group's standard deviation."""
    members: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if _is_known(reward):
            members[group].append((place, reward))
    weights = [1.0] * len(rewards)
    for known in members.values():
        scale = max(abs(reward) for _, reward in known)
        if scale == 0:
            continue
        shares = [reward / scale for _, reward in known]
        mean = math.fsum(shares) / len(shares)
        std = math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / len(shares))
        if std > _SAME:
            for (place, _), share in zip(known, shares, strict=True):
                weights[place] = 1.0 + (share - mean) / std
    return weights


def _is_known(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)
