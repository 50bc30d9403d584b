"""Which cached rollout a LENIENT sample takes over. Pure."""

from __future__ import annotations

import numpy as np

from services.drafts.diversity import reuse_allowed
from services.drafts.rollout import Rollout
from services.generation.rollouts.cache import DraftCache
from services.generation.rollouts.origin import Origin


def reusable(
    cache: DraftCache, origin: Origin, seed: int, delay: int = 0, diversity_floor: float | None = None
) -> Rollout | None:
    """The rollout that a sample takes over, if there is one that it may.

    Args:
        cache: where it is looked for; only in the slot's history, a pre-generated rollout is nobody's sample.
        origin: of the sample.
        seed: of the sample; it decides who reuses in a group that has become too much alike.
        delay: how many newer versions of the slot's history are passed over.
        diversity_floor: least share of distinct n-grams in the group's cached rollouts; None: any.
    """
    rollout = cache.of_slot(origin, delay)
    if rollout is None or not has_logprobs(rollout):
        return None
    if diversity_floor is not None:
        group = [each.tokens.tolist() for each in cache.group(origin, delay)]
        if not reuse_allowed(group, diversity_floor, seed):
            return None
    return rollout


def has_logprobs(rollout: Rollout) -> bool:
    """Whether it is known what its policy said of each of its tokens."""
    logprobs = rollout.logprobs
    return len(logprobs) == len(rollout.tokens) and bool(np.all(np.isfinite(logprobs) & (logprobs <= 0)))
