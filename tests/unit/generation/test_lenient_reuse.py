"""Which cached rollout a lenient sample takes over."""

from __future__ import annotations

import math

import pytest

from services.contracts.rollout import RolloutKind
from services.generation.draft_cache.cache import DraftCache, reusable
from services.generation.draft_cache.origin import Origin
from tests.unit.generation.rollouts import rollout

HERE = Origin("r", "p", slot=0, step=9)


def cache_of(*rollouts: object) -> DraftCache:
    cache = DraftCache(1000, 1 << 30)
    cache.add(rollouts)  # type: ignore[arg-type]
    return cache


def test_the_newest_history_of_the_slot_or_the_one_that_the_delay_says() -> None:
    old, new = rollout([1], version=1), rollout([2], version=2)
    cache = cache_of(old, new, rollout([3], version=3, slot=1))
    assert reusable(cache, HERE, 5) is new
    assert reusable(cache, HERE, 5, delay=1) is old
    assert reusable(cache, HERE, 5, delay=2) is None


def test_a_pregenerated_rollout_is_never_taken_over() -> None:
    assert reusable(cache_of(rollout([1, 2], kind=RolloutKind.PREGENERATED, seed=5)), HERE, 5) is None


@pytest.mark.parametrize("logprobs", [[], [-1.0, math.nan], [-math.inf, -1.0], [0.5, -1.0]])
def test_a_rollout_without_good_logprobs_is_not_taken_over(logprobs: list[float]) -> None:
    assert reusable(cache_of(rollout([1, 2], logprobs=logprobs)), HERE, 5) is None


def test_in_a_group_that_is_all_the_same_part_of_the_samples_start_afresh() -> None:
    text = list(range(40))
    alike = cache_of(*[rollout(text, slot=slot) for slot in range(8)])
    unlike = cache_of(*[rollout([slot * 50 + i for i in range(40)], slot=slot) for slot in range(8)])

    def share(cache: DraftCache) -> float:
        reused = [reusable(cache, HERE, seed, diversity_floor=0.5) is not None for seed in range(200)]
        return sum(reused) / len(reused)

    # An eighth of all n-grams is distinct: a quarter of what the floor asks for.
    assert 0.1 < share(alike) < 0.4
    assert share(unlike) == 1.0
    assert reusable(alike, HERE, 5) is not None
