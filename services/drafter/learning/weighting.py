"""Weights of samples in distillation: w(r) > 0 as a function of the reward (ReSpec, section 5.3.1). Pure.

The paper's default is w(r) = r, "in practice we normalize and clip". Here weights are clipped to [LOWEST,
HIGHEST] and then divided by their mean over the samples of an update: neither loss nor learning rate depends on
the scale of rewards, a wrong answer still teaches the behaviour of the policy, and one sample cannot dominate
the gradient.

- REWARD: w = r / mean r. Rewards below 0 count as 0.
- GROUP: relative to the samples of the same prompt, w = 1 + (r - mean) / std of its group: samples that GRPO
  reinforces count more, however hard their prompt is. A group of equal rewards has weight 1.
- NONE: w = 1, plain distillation ("no-reward KD").

A sample without a finite reward has weight 1 before the division. If rewards do not distinguish samples (all
equal, all 0, or none known), all weights are 1.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeGuard

from services.drafter.learning.data import TrainingSample

LOWEST, HIGHEST = 0.1, 4.0
"""Bounds of weights before the division by their mean, which keeps their ratio of at most 40."""
_SAME = 1e-6
"""Rewards of a group are equal if their standard deviation is below this share of the largest."""


class Weighting(enum.StrEnum):
    """Choice of w(r)."""

    REWARD = "reward"
    GROUP = "group"
    NONE = "none"

    @property
    def needs_rewards(self) -> bool:
        """Return True if the weight of a sample depends on its reward."""
        return self is not Weighting.NONE


def weights_of(rollouts: Sequence[TrainingSample], weighting: Weighting) -> list[float]:
    """Return w(r) of each sample, in order."""
    return weigh([rollout.reward for rollout in rollouts], [rollout.group for rollout in rollouts], weighting)


def weigh(rewards: Sequence[float | None], groups: Sequence[Hashable], weighting: Weighting) -> list[float]:
    """Return a weight for each reward: positive, finite, of mean 1.

    Args:
        rewards: rewards of any scale; None or not finite for unknown ones.
        groups: group of each reward, within which GROUP compares.

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
    """Return r / mean r over the known rewards; 1 if there is none above 0."""
    known = [max(reward, 0.0) for reward in rewards if _is_known(reward)]
    highest = max(known, default=0.0)
    if highest <= 0:
        return [1.0] * len(rewards)
    # As shares of the highest, since a sum of huge rewards would overflow.
    mean = sum(reward / highest for reward in known) / len(known)
    return [max(reward, 0.0) / highest / mean if _is_known(reward) else 1.0 for reward in rewards]


def _relative(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[float]:
    """Return 1 + (reward - mean) / standard deviation, within each group."""
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
