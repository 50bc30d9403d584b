"""The cache of rollouts: what is found, what replaces what, and what goes when memory is short."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.draft_cache.cache import (
    PROMPT_OVERHEAD,
    ROLLOUT_OVERHEAD,
    DraftCache,
    ShardQuery,
    is_better,
)
from services.generation.draft_cache.origin import NOWHERE, Origin
from tests.unit.generation.rollouts import rollout

VOCAB = 1000
PLENTY = 1 << 30
HERE = Origin("r", "p", slot=0, step=5)


def cache_of(*rollouts: StoredRollout, budget: int = PLENTY) -> DraftCache:
    cache = DraftCache(VOCAB, budget)
    cache.add(rollouts)
    return cache


def ahead(tokens: list[int], **fields: Any) -> StoredRollout:
    return rollout(tokens, kind=RolloutKind.PREGENERATED, **fields)


def tokens_of(found: StoredRollout | None) -> list[int] | None:
    return None if found is None else found.tokens.tolist()


# -- what is found --------------------------------------------------------------------------------------------


def test_a_sample_follows_a_rollout_of_its_own_seed_and_slot() -> None:
    cache = cache_of(
        ahead([1, 2], seed=7),
        rollout([1, 2, 3], seed=7, version=2),
        rollout([1, 2, 3, 4, 5], seed=8, version=3),
        rollout([1, 2, 3, 4, 5, 6], seed=7, slot=1),
        rollout([1, 2, 3, 4, 5, 6], seed=7, prompt_id="q"),
        rollout([1, 2, 3, 4, 5, 6], seed=7, run_id="s"),
    )
    assert tokens_of(cache.same_seed(HERE, 7)) == [1, 2, 3]
    assert cache.same_seed(HERE, 9) is None
    assert cache.same_seed(NOWHERE, 7) is None


def test_forks_are_found_in_order_and_are_no_rollouts_of_their_sample() -> None:
    cache = cache_of(
        ahead([1, 2, 9, 9, 9], seed=7, fork=3),
        ahead([1, 2, 3], seed=7),
        ahead([1, 9], seed=7, fork=2),
        ahead([1, 8], seed=8, fork=2, slot=1),
    )
    assert tokens_of(cache.same_seed(HERE, 7)) == [1, 2, 3]
    assert [each.tokens.tolist() for each in cache.forks(HERE, 7)] == [[1, 9], [1, 2, 9, 9, 9]]
    assert cache.forks(HERE, 8) == []
    assert cache.forks(NOWHERE, 7) == []
    # The next step's take their place.
    cache.add_shards({("r", "p"): (ShardQuery(6), [ahead([4], seed=7, step=6)])})
    assert cache.forks(HERE, 7) == []


@pytest.mark.parametrize(
    ("finished", "size", "followed"), [(True, 2, True), (True, 4, True), (False, 2, False), (False, 3, True)]
)
def test_a_newer_rollout_is_followed_unless_it_is_a_shorter_beginning(
    finished: bool, size: int, followed: bool
) -> None:
    old, new = rollout([1, 2, 3], seed=7, version=2), ahead([4] * size, seed=7, version=5, finished=finished)
    assert cache_of(old, new).same_seed(HERE, 7) is (new if followed else old)
    assert cache_of(old, new).same_seed(HERE, 7, version=5) is new
    assert cache_of(old, new).same_seed(HERE, 7, version=4) is None
    assert is_better(new, old) is followed
    assert not is_better(old, new)
    assert not is_better(new, new)


def test_the_history_of_a_slot_is_counted_from_its_newest_version() -> None:
    cache = cache_of(
        rollout([1], version=3),
        rollout([2], version=9),
        rollout([3], version=4),
        rollout([4], version=11, slot=1),
        ahead([5], version=12),
    )
    found = [tokens_of(cache.of_slot(HERE, delay)) for delay in range(4)]
    assert found == [[2], [3], [1], None]


def test_a_pregenerated_rollout_is_nobodys_history() -> None:
    assert cache_of(ahead([1, 2])).of_slot(HERE) is None


def test_a_group_has_one_rollout_for_each_slot_that_has_that_many() -> None:
    cache = cache_of(
        rollout([1], version=1), rollout([2], version=2), rollout([3], version=2, slot=1), ahead([4], slot=2)
    )
    assert sorted(each.tokens[0] for each in cache.group(HERE)) == [2, 3]
    assert [each.tokens[0] for each in cache.group(HERE, 1)] == [1]


def test_the_record_of_a_prompt_is_of_its_pregenerated_rollouts_as_they_are_now() -> None:
    cache = cache_of(rollout([1, 2]), ahead([3], logprobs=[]), ahead([4], logprobs=[-0.5], prompt_id="q"))
    assert cache.recorded(HERE, [9]) is None
    assert cache.recorded(NOWHERE, [9]) is None
    without = cache.nbytes
    cache.add([ahead([5, 6], logprobs=[-0.5, -0.25], slot=1)])
    first = cache.recorded(HERE, [9])
    assert first is not None
    assert first.find([9], [5, 6]).tolist() == [-0.5, -0.25]
    assert cache.recorded(HERE, [9]) is first
    cache.add([ahead([5, 6, 7], logprobs=[-1, -1, -1], slot=1)])
    again = cache.recorded(HERE, [9])
    assert again is not None
    assert again.find([9], [5, 6, 7]).tolist() == [-1, -1, -1]
    counted = cache.nbytes
    cache.add_shards({("r", "p"): (ShardQuery(9), [])})
    assert cache.recorded(HERE, [9]) is None
    assert cache.nbytes < without < counted


# -- what replaces what ---------------------------------------------------------------------------------------


def test_a_longer_pregenerated_rollout_takes_the_place_of_a_shorter_one_of_the_step() -> None:
    cache = cache_of(ahead([1, 2, 3]))
    assert cache.add([ahead([1, 2])]) == []
    assert cache.add([ahead([1, 2, 3])]) == []
    longer = ahead([1, 2, 3, 4])
    assert cache.add([longer]) == [longer]
    assert cache.add([ahead([9], step=2)]) != []
    assert cache.add([ahead([1, 2, 3, 4, 5], step=1)]) == []
    assert [each.tokens.tolist() for each in cache.all(HERE.prompt)] == [[9]]


def test_history_takes_the_place_of_the_same_version_only() -> None:
    cache = cache_of(rollout([1, 2, 3], version=1))
    assert cache.add([rollout([4], version=2)]) != []
    refreshed = rollout([1, 2, 3], version=1, logprobs=[-2.0] * 3)
    # The same tokens are no news for an index, but their log-probabilities are kept.
    assert cache.add([refreshed]) == []
    assert cache.of_slot(HERE, 1) is refreshed


def test_what_is_not_sound_is_left_out() -> None:
    unsound = [
        rollout([]),
        rollout([5, VOCAB]),
        rollout([1], run_id=""),
        rollout([1], prompt_id=""),
        rollout([1, 2], logprobs=[-1.0]),
    ]
    cache = DraftCache(VOCAB, PLENTY)
    assert cache.add(unsound) == []
    assert cache.add_shards({("r", "p"): (ShardQuery(1), unsound)}) == []
    assert cache.all(HERE.prompt) == []


# -- shards ---------------------------------------------------------------------------------------------------


def test_a_shard_says_for_which_step_a_prompt_was_fetched_even_without_rollouts() -> None:
    cache = DraftCache(VOCAB, PLENTY)
    assert cache.fetched_for(("r", "p")) is None
    cache.add_shards({("r", "p"): (ShardQuery(5), [rollout([1])]), ("r", "q"): (ShardQuery(6), [])})
    assert (cache.fetched_for(("r", "p")), cache.fetched_for(("r", "q"))) == (ShardQuery(5), ShardQuery(6))
    cache.add([rollout([1], prompt_id="own")])
    assert cache.fetched_for(("r", "own")) is None


def test_a_shard_is_all_the_history_there_is_and_leaves_what_is_pregenerated_here() -> None:
    own = ahead([1, 2, 3, 4], step=6, slot=1)
    passed = ahead([7], step=5, slot=2)
    cache = cache_of(rollout([1], version=1), rollout([2], version=2), own, passed)
    newer = rollout([3], version=3)
    shorter = ahead([1, 2], step=6, slot=1)
    shard = [rollout([2], version=2), newer, shorter]
    assert cache.add_shards({("r", "p"): (ShardQuery(6), shard)}) == shard
    found = {(each.kind, each.slot, each.version) for each in cache.all(("r", "p"))}
    assert found == {
        (RolloutKind.HISTORY, 0, 2),
        (RolloutKind.HISTORY, 0, 3),
        (RolloutKind.PREGENERATED, 1, 1),
    }
    assert cache.same_seed(Origin("r", "p", 1, 6), 1) is own


def test_a_shard_that_did_not_arrive_whole_only_adds_to_what_is_here() -> None:
    cache = cache_of(rollout([1], version=1))
    cache.add_shards({("r", "p"): (ShardQuery(5), [rollout([1], version=1)])})
    newer = rollout([2], version=2)
    assert cache.add_shards({("r", "p"): (None, [newer])}) == [newer]
    assert [each.version for each in cache.all(("r", "p"))] == [1, 2]
    assert cache.fetched_for(("r", "p")) == ShardQuery(5)


# -- memory ---------------------------------------------------------------------------------------------------


def test_the_prompt_that_was_used_least_recently_goes_first() -> None:
    one = rollout([1] * 100).nbytes + ROLLOUT_OVERHEAD + PROMPT_OVERHEAD
    cache = DraftCache(VOCAB, 3 * one)
    for prompt in "abc":
        cache.add_shards({("r", prompt): (ShardQuery(1), [rollout([1] * 100, prompt_id=prompt)])})
    assert cache.same_seed(Origin("r", "a"), 1) is not None
    cache.add([rollout([1] * 100, prompt_id="d")])
    assert [prompt for prompt in "abcd" if cache.all(("r", prompt))] == ["a", "c", "d"]
    # It is fetched again when it is needed again.
    assert cache.fetched_for(("r", "b")) is None


def test_without_memory_nothing_is_kept_and_nothing_fails() -> None:
    cache = cache_of(rollout(), budget=0)
    assert (len(cache), cache.nbytes) == (0, 0)


rollouts = st.builds(
    lambda prompt, slot, version, kind, step, size: rollout(
        [1] * size, prompt_id=prompt, slot=slot, version=version, kind=kind, step=step
    ),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(RolloutKind),
    st.integers(1, 3),
    st.integers(1, 50),
)


@given(
    st.lists(rollouts | st.tuples(st.integers(1, 3), st.lists(rollouts, max_size=4))), st.integers(0, 8000)
)
def test_bytes_are_those_of_what_is_held_and_within_the_budget(arrivals: list[Any], budget: int) -> None:
    cache = DraftCache(VOCAB, budget)
    for arrival in arrivals:
        if isinstance(arrival, StoredRollout):
            cache.add([arrival])
        else:
            step, shard = arrival
            own = [each for each in shard if each.prompt_id == "a"]
            cache.add_shards({("r", "a"): (ShardQuery(step), own)})
        held = [each for prompt in "ab" for each in cache.all(("r", prompt))]
        assert cache.nbytes <= budget
        assert cache.nbytes == PROMPT_OVERHEAD * len(cache) + sum(
            each.nbytes + ROLLOUT_OVERHEAD for each in held
        )
