"""Rollouts that the store keeps, replaces, refuses and evicts."""

from __future__ import annotations

import pytest

from services.contracts.rollout import RolloutKind, StoredRollout
from services.drafts.store import PROMPT_OVERHEAD, Cause, DraftStore, cost
from tests.unit.drafts.rollouts import ahead, make

PLENTY = 1 << 30


def store_for(*rollouts: StoredRollout, versions: int = 2) -> DraftStore:
    """Return a store with a budget for exactly these, and these in it."""
    prompts = len({each.prompt_id for each in rollouts})
    store = DraftStore(sum(map(cost, rollouts)) + prompts * PROMPT_OVERHEAD, versions)
    assert all(store.put(each) for each in rollouts)
    assert store.bytes == store.budget_bytes
    return store


def test_what_was_put_is_fetched_by_run_and_prompt() -> None:
    store = DraftStore(PLENTY)
    mine = make("a")
    assert store.put(mine)
    assert store.put(make("b"))
    assert store.put(make("a", run="other"))
    assert store.fetch("run", "a") == [mine]
    assert store.fetch("run", "c") == []


def test_a_prompt_comes_slot_by_slot_with_its_history_first_and_oldest_first() -> None:
    store = DraftStore(PLENTY)
    late, early = make(slot=0, step=2), make(slot=0, step=1)
    coming, other = ahead(slot=0, step=3), make(slot=1)
    for each in (other, late, coming, early):
        assert store.put(each)
    assert store.fetch("run", "p") == [early, late, coming, other]


def test_history_is_left_out_where_the_whole_sample_was_generated_ahead() -> None:
    store = DraftStore(PLENTY)
    covered, begun, bare = make(slot=0, step=1), make(slot=1, step=1), make(slot=2, step=1)
    ended, beginning = ahead(slot=0, step=2, finished=True), ahead(slot=1, step=2)
    for each in (covered, begun, bare, ended, beginning):
        assert store.put(each)
    assert store.fetch("run", "p", whole=False) == [ended, begun, beginning, bare]
    assert store.fetch("run", "p") == [covered, ended, begun, beginning, bare]
    served = make(slot=0, step=2)
    assert store.put(served)
    assert store.fetch("run", "p", whole=False)[:2] == [covered, served]


def test_forks_come_and_go_with_the_rollout_that_they_fork_from() -> None:
    store = DraftStore(PLENTY)
    own, first, second = (ahead(step=2, fork=fork, length=9, finished=not fork) for fork in (0, 2, 5))
    for each in (own, second, first, make(step=1)):
        assert store.put(each)
    assert store.fetch("run", "p", whole=False) == [own, second, first]
    longer = ahead(step=2, fork=2, length=12)
    assert store.put(longer)
    assert not store.put(first), "shorter than the one that is there"
    assert {*store.fetch("run", "p", whole=False)} == {own, second, longer}
    coming = ahead(step=3)
    assert store.put(coming)
    assert store.fetch("run", "p")[1:] == [coming], "forks of an earlier step are of no use"
    assert not store.put(ahead(step=2, fork=7))
    assert store.put(ahead(step=3, fork=1))
    served = make(step=3)
    assert store.put(served)
    assert {each.kind for each in store.fetch("run", "p")} == {RolloutKind.HISTORY}


def test_the_newest_versions_of_a_slot_are_kept() -> None:
    store = DraftStore(PLENTY, history_versions=2)
    first, second, third = (make(step=step) for step in (1, 2, 3))
    for each in (first, third, second):
        store.put(each)
    assert store.fetch("run", "p") == [second, third]
    assert store.removed == {Cause.SURPLUS: 1}
    assert not store.put(first), "older than what is kept"


def test_history_replaces_the_same_version() -> None:
    store = DraftStore(PLENTY)
    store.put(make(length=10))
    again = make(length=3)
    assert store.put(again)
    assert store.fetch("run", "p") == [again]
    assert store.tokens == 3


@pytest.mark.parametrize(
    ("new", "replaces"),
    [
        (ahead(step=4, length=1), True),
        (ahead(step=2, length=50), False),
        (ahead(step=3, length=11), True),
        (ahead(step=3, length=9), False),
        (ahead(step=3, length=9, finished=True), True),
        (ahead(step=3, length=10), False),
        (ahead(step=3, length=11, seed=8), False),
        (ahead(step=3, length=10, seed=8, version=4), True),
        (ahead(step=3, length=9, version=4), False),
        (ahead(step=3, length=9, version=4, finished=True), True),
        (ahead(step=3, length=11, version=2), True),
        (ahead(step=3, length=9, version=2), False),
    ],
)
def test_what_replaces_a_pregenerated_rollout(new: StoredRollout, replaces: bool) -> None:
    store = DraftStore(PLENTY)
    old = ahead(step=3, version=3, length=10)
    store.put(old)
    assert store.put(new) is replaces
    assert store.fetch("run", "p") == [new if replaces else old]


def test_a_finished_rollout_gives_way_only_to_newer_weights() -> None:
    store = DraftStore(PLENTY)
    store.put(ahead(step=3, version=3, length=10, finished=True))
    assert not store.put(ahead(step=3, version=3, length=12))
    assert not store.put(ahead(step=3, version=2, length=12, finished=True))
    assert store.put(ahead(step=3, version=4, length=8, finished=True))


def test_history_of_a_step_takes_the_place_of_what_was_generated_for_it() -> None:
    store = DraftStore(PLENTY)
    store.put(ahead(slot=0, step=3))
    sibling, coming = ahead(slot=1, step=3), ahead(slot=2, step=4)
    store.put(sibling)
    store.put(coming)
    ended = make(slot=0, step=3)
    assert store.put(ended)
    assert store.put(make(slot=2, step=3))
    assert store.fetch("run", "p")[:2] == [ended, sibling]
    assert coming in store.fetch("run", "p")
    assert store.removed == {Cause.SERVED: 1}


def test_a_draft_that_comes_after_its_sample_has_ended_is_refused() -> None:
    store = DraftStore(PLENTY)
    store.put(make(step=3))
    assert not store.put(ahead(step=3))
    assert store.put(ahead(step=4))


def test_what_is_larger_than_the_budget_is_refused_and_costs_nobody() -> None:
    small = make("a")
    store = store_for(small)
    assert not store.put(make("b", length=11))
    assert store.fetch("run", "a") == [small]
    assert store.evicted == 0


def test_first_goes_what_was_generated_for_steps_that_have_passed() -> None:
    passed, superseded, newest = ahead("a", step=2), make("b", step=1), make("b", step=3)
    coming = ahead("c", step=4)
    store = store_for(coming, passed, superseded, newest)
    store.put(make("d", step=3, length=5))
    assert store.removed == {Cause.PASSED: 1}
    assert set(store) > {coming, superseded, newest}


def test_what_was_generated_for_the_running_step_has_not_passed() -> None:
    early, superseded, newest, late = (
        ahead("a", step=3),
        make("b", step=1),
        make("b", step=3),
        ahead("c", step=3),
    )
    store = store_for(early, superseded, newest, late)
    store.put(make("b", slot=1, step=3, length=1))
    assert store.removed == {Cause.SUPERSEDED: 1}
    assert {early, late} < set(store)


def test_then_goes_history_of_which_there_is_a_newer_version() -> None:
    cold, superseded, newest = make("a", step=1), make("b", step=1), make("b", step=2)
    store = store_for(cold, superseded, newest)
    store.put(make("b", slot=1, length=1, step=2))
    assert store.removed == {Cause.SUPERSEDED: 1}
    assert set(store) > {cold, newest}


def test_then_go_whole_prompts_the_least_recently_used_first() -> None:
    one, two = make("a", slot=0), make("a", slot=1)
    fetched, other = make("b"), make("c")
    store = store_for(fetched, one, two, other)
    store.fetch("run", "b")
    assert store.put(make("d", length=1))
    assert store.removed == {Cause.COLD: 2}, "a whole prompt, though one rollout would have done"
    assert store.fetch("run", "a") == []
    assert store.fetch("run", "b") == [fetched]


def test_a_prompt_that_fills_the_store_alone_goes_on_with_its_latest() -> None:
    store = store_for(make(slot=0), make(slot=1), make(slot=2))
    latest = make(slot=3)
    assert store.put(latest)
    assert latest in store.fetch("run", "p")
    assert len(store.fetch("run", "p")) == 3


def test_an_old_version_that_finds_no_room_pushes_out_nothing_newer() -> None:
    newest, other = make("a", step=2), make("b", step=2)
    store = store_for(newest, other)
    assert not store.put(make("a", step=1, length=1))
    assert list(store) in ([newest, other], [other, newest])


@pytest.mark.parametrize(
    ("criteria", "left"),
    [
        ({}, set()),
        ({"run_id": "run"}, {"y1"}),
        ({"run_id": "run", "prompt_ids": ["a"]}, {"b1", "b2", "b3", "y1"}),
        ({"prompt_ids": {"b"}}, {"a1", "a2", "y1"}),
        ({"before_version": 2}, {"a2", "b2", "b3"}),
        ({"kind": RolloutKind.PREGENERATED}, {"a1", "a2", "b1", "b2", "y1"}),
        ({"run_id": "run", "kind": RolloutKind.HISTORY, "before_version": 2}, {"a2", "b2", "b3", "y1"}),
        ({"run_id": "nobody"}, {"a1", "a2", "b1", "b2", "b3", "y1"}),
    ],
)
def test_evicting_removes_what_matches_all_that_is_given(criteria: dict, left: set[str]) -> None:
    store = DraftStore(PLENTY)
    rollouts = {
        "a1": make("a", step=1),
        "a2": make("a", step=2),
        "b1": make("b", step=1),
        "b2": make("b", step=2),
        "b3": ahead("b", step=3),
        "y1": make("y", step=1, run="other"),
    }
    for each in rollouts.values():
        assert store.put(each)
    assert store.evict(**criteria) == len(rollouts) - len(left)
    assert set(store) == {rollouts[name] for name in left}
    assert store.evicted == 0, "nothing to do with the budget"


def test_an_emptied_store_is_charged_nothing() -> None:
    store = DraftStore(PLENTY)
    for each in (make("a"), make("a", step=2), ahead("a", slot=1, step=3)):
        store.put(each)
    store.evict()
    assert (store.bytes, store.tokens, store.prompts, store.rollouts.total()) == (0, 0, 0, 0)
