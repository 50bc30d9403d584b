"""The order in which samples of a step are given out, and what a pool remembers."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from services.bubbles.pool import SIMILAR, PooledTask, StepPool, uncoupled_seed
from tests.unit.bubbles.hints import hint


def keys(items: list[PooledTask]) -> list[tuple[str, int]]:
    return [item.key for item in items]


def test_slots_of_similar_groups_take_turns_and_the_longest_come_first() -> None:
    pool = StepPool(hint({"short": 10, "long": 100, "nearly": 90}))
    order = keys(pool.take(6, "a", ()))
    assert order == [("long", 0), ("nearly", 0), ("long", 1), ("nearly", 1), ("short", 0), ("short", 1)]
    assert (pool.free, pool.open, pool.leased) == (0, 6, 6)


@given(
    lengths=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(1, 10_000), max_size=12),
    counts=st.lists(st.integers(1, 7), max_size=30),
)
def test_no_sample_comes_before_a_clearly_longer_one(lengths: dict[str, float], counts: list[int]) -> None:
    pool = StepPool(hint(lengths, slots=3))
    taken: list[PooledTask] = []
    for count in counts:
        taken += pool.take(count, "a", ())
    assert len(taken) == min(sum(counts), 3 * len(lengths))
    assert len(set(keys(taken))) == len(taken)
    for earlier, later in itertools.pairwise(taken):
        assert later.group.expected_tokens * SIMILAR <= earlier.group.expected_tokens
    left = {name: 3 - sum(item.group.prompt_id == name for item in taken) for name in lengths}
    for name, length in lengths.items():
        if left[name]:
            assert not any(length * SIMILAR > item.group.expected_tokens for item in taken)


def test_within_a_wave_an_instance_gets_its_own_items_then_its_own_prompts() -> None:
    pool = StepPool(hint({"a": 10, "b": 10, "c": 10}, slots=2))
    first = pool.take(3, "i", ())
    pool.keep(first[2], "i")
    for item in first:
        pool.put_back(item)
    assert keys(pool.take(2, "i", {"b"})) == [("c", 0), ("b", 0)]
    assert keys(pool.take(2, "j", {"c"})) == [("a", 0), ("c", 1)]


def test_a_returned_item_is_offered_again_before_later_ones_with_its_tokens() -> None:
    pool = StepPool(hint({"long": 100, "short": 10}, slots=1))
    (item,) = pool.take(1, "a", ())
    item.tokens = 40
    pool.put_back(item)
    assert pool.take(1, "b", ()) == [item]
    assert item.covered == 40


def test_a_finished_item_is_never_free_again() -> None:
    pool = StepPool(hint({"p": 10}, slots=2))
    leased, free = pool.tasks["p", 0], pool.tasks["p", 1]
    assert pool.take(1, "a", ()) == [leased]
    pool.finish(leased)
    pool.put_back(leased)
    pool.finish(free)
    pool.finish(free)
    assert (pool.open, pool.free, pool.leased) == (0, 0, 0)
    assert pool.take(9, "a", ()) == []


def test_seeds_are_the_steps_own_or_derived_ones() -> None:
    request = hint({"p": 10}, slots=2)
    own = list(request.groups[0].seeds)
    coupled = StepPool(request).tasks
    assert [coupled["p", slot].seed for slot in range(2)] == own
    uncoupled = StepPool(request, coupled=False).tasks
    assert [uncoupled["p", slot].seed for slot in range(2)] == [
        uncoupled_seed(seed, slot) for slot, seed in enumerate(own)
    ]


def test_samples_for_each_prompt_can_be_fewer_or_more_than_the_group() -> None:
    request = hint({"p": 10, "q": 10}, slots=2)
    assert sorted(StepPool(request, per_prompt=1).tasks) == [("p", 0), ("q", 0)]
    more = StepPool(request, per_prompt=3).tasks
    assert sorted(more) == [(name, slot) for name in "pq" for slot in range(3)]
    assert more["p", 1].seed == request.groups[0].seeds[1]
    assert more["p", 2].seed == uncoupled_seed(request.groups[0].seeds[0], 2)


def test_a_replaced_hint_keeps_what_is_the_same_in_both() -> None:
    old = StepPool(hint({"p": 10, "q": 10, "r": 10}, slots=1))
    leased, finished, partial = (old.tasks[name, 0] for name in "pqr")
    old.take(3, "a", ())
    leased.lease, leased.running = 7, 3
    finished.tokens = 9
    old.finish(finished)
    partial.tokens = 4
    old.put_back(partial)
    request = hint({"p": 99, "q": 10, "r": 10, "s": 10}, slots=1, name="other")
    request.groups[2].prompt_token_ids[0] = 77
    new = StepPool(request)
    new.adopt(old)
    assert new.tasks["p", 0] is leased
    assert new.tasks["q", 0] is finished
    assert new.tasks["r", 0] is not partial
    assert leased.group.expected_tokens == 99
    assert (new.open, new.free, new.leased) == (3, 2, 1)
    assert keys(new.take(9, "b", ())) == [("r", 0), ("s", 0)]
    new.put_back(leased)
    assert new.take(9, "b", ()) == [leased]


def test_nothing_is_kept_when_the_exactness_is_another() -> None:
    old = StepPool(hint({"p": 10}, slots=1))
    old.finish(old.tasks["p", 0])
    request = hint({"p": 10}, slots=1, name="other")
    request.exactness.level = 4
    new = StepPool(request)
    new.adopt(old)
    assert (new.open, new.free) == (1, 1)
