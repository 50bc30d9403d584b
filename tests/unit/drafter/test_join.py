"""Samples and rewards find each other, in whatever order they come."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.learner import FedBatchEnd, FedRewards, FedSample, decode_entry, encode_entry
from services.drafter.feed.collector import HeldEntries, RewardJoin


def sample(slot: int = 0, batch: str = "b", prompt_id: str = "p") -> FedSample:
    return FedSample(("run", batch), prompt_id, slot, 1, 3, (1, 2), (3, 4, 5))


def rewards(*slots: int, batch: str = "b") -> FedRewards:
    return FedRewards(("run", batch), {("p", slot): float(slot) for slot in slots})


def test_entries_are_read_as_they_were_written() -> None:
    for fed in (
        FedSample(("r", "b:1"), 'p"é', 3, 2**64 - 1, 7, (0, 2**32 - 1), (1,)),
        FedSample(("r", "b"), "p", 0, None, 0, (), (9,)),
        FedRewards(("r", "b"), {("p", 0): -1.5, ("q", 2): 0.1}),
        FedBatchEnd(("r", "b")),
    ):
        fields = {name.encode(): value for name, value in encode_entry(fed).items()}
        assert decode_entry(fields) == fed


def test_what_is_no_entry_is_said_to_be_none() -> None:
    good = {name.encode(): value for name, value in encode_entry(sample()).items()}
    for bad in (
        {},
        {b"sample": b"[]"},
        {b"rewards": b"3"},
        {b"ended": b'["r"]'},
        good | {b"response": b""},
        good | {b"prompt": b"123"},
        good | {b"sample": b"no json"},
    ):
        try:
            decode_entry(bad)
        except ValueError:
            continue
        raise AssertionError(bad)


def test_a_reward_that_comes_late_is_waited_for_and_no_longer() -> None:
    join = RewardJoin(wait=10, settle=1)
    assert join.add("1", sample(0), 0) == []
    assert join.add("2", sample(1), 5) == []
    (neutral,) = join.expire(11)
    assert (neutral.reward, neutral.entries, neutral.slot) == (None, ("1",), 0)
    (joined,) = join.add("3", rewards(0, 1), 12)
    assert (joined.reward, joined.entries) == (1.0, ("2", "3"))
    assert join.entries.take_done() == [], "its other reward is in use"
    join.entries.release(joined.entries)
    assert join.entries.take_done() == ["2", "3"], "the reward that came too late holds nothing"
    assert join.tally == {"neutral": 1, "rewarded": 1, "repeated": 1}


def test_a_reward_may_come_before_its_sample_but_waits_no_longer_than_a_sample() -> None:
    join = RewardJoin(wait=10, settle=1)
    assert join.add("1", rewards(0, 1), 0) == []
    (joined,) = join.add("2", sample(0), 9)
    assert joined.reward == 0.0
    join.expire(11)
    assert join.entries.take_done() == []
    join.entries.release(joined.entries)
    assert join.entries.take_done() == ["2", "1"]
    assert join.tally["unmatched"] == 1


def test_a_repetition_is_dropped() -> None:
    join = RewardJoin(wait=10, settle=1)
    join.add("1", sample(), 0)
    assert join.add("2", sample(), 0) == []
    join.add("3", rewards(0), 1)
    assert join.add("4", rewards(0), 1) == []
    assert join.entries.take_done() == ["2", "4"]


def test_a_step_is_over_once_when_nothing_of_it_waits_or_comes() -> None:
    join = RewardJoin(wait=100, settle=1)
    join.add("1", sample(0), 0)
    join.add("2", sample(1), 0)
    join.add("3", rewards(0), 1)
    assert list(join.ended_batches(50)) == [], "one sample waits"
    join.add("4", rewards(1), 50)
    assert list(join.ended_batches(50.5)) == [], "more may come"
    assert list(join.ended_batches(51)) == [("run", "b")]
    join.add("5", sample(2), 60)
    join.add("6", rewards(2), 60)
    assert list(join.ended_batches(70)) == [], "a batch is one step"


def test_where_rewards_are_not_needed_nothing_waits_for_them() -> None:
    join = RewardJoin(wait=100, settle=1, needs_rewards=False)
    (first,) = join.add("1", sample(0), 0)
    assert (first.reward, first.entries, join.waiting) == (None, ("1",), 0)
    assert join.add("2", sample(0), 1) == [], "a repetition"
    join.add("3", sample(1), 2)
    assert join.ended_batches(50) == [], "the longest sample may take long"
    assert join.add("4", FedBatchEnd(("run", "b")), 50) == []
    assert join.ended_batches(50) == [("run", "b")], "at once"
    join.add("5", rewards(0, 1), 60)
    assert join.ended_batches(200) == [], "once"
    assert join.entries.take_done() == ["2", "5"]
    assert join.take_ends() == ("4",), "until its samples are used, whoever reads them again needs it"
    assert join.take_ends() == ()


def test_a_batch_whose_end_nobody_reports_is_over_with_its_rewards_or_in_time() -> None:
    join = RewardJoin(wait=100, settle=1, needs_rewards=False)
    join.add("1", sample(0), 0)
    join.add("2", sample(0, batch="c"), 0)
    join.add("3", rewards(0), 5)
    assert join.ended_batches(6) == [("run", "b")]
    assert join.ended_batches(99) == []
    assert join.ended_batches(100) == [("run", "c")]


def test_where_rewards_are_needed_the_end_of_a_batch_is_not_that_of_a_step() -> None:
    join = RewardJoin(wait=100, settle=1)
    join.add("1", sample(0), 0)
    join.add("2", FedBatchEnd(("run", "b")), 0)
    assert join.ended_batches(50) == []
    assert join.entries.take_done() == ["2"]


@given(st.integers(1, 8), st.randoms(use_true_random=False), st.data())
def test_every_sample_comes_out_once_and_every_entry_is_done_with(
    count: int, order: random.Random, data: st.DataObject
) -> None:
    """Whatever order things come in, how often, and which rewards are missing."""
    given_rewards = data.draw(st.lists(st.integers(0, 9), max_size=12))
    entries = [sample(slot) for slot in range(count)] * data.draw(st.integers(1, 2))
    entries += [rewards(slot) for slot in given_rewards]
    order.shuffle(entries)
    join = RewardJoin(wait=10, settle=1)
    out = []
    for number, fed in enumerate(entries):
        out += join.add(str(number), fed, float(number))
    out += join.expire(1000.0)
    assert sorted(each.slot for each in out) == list(range(count))
    for each in out:
        first = next((reward for reward in given_rewards if reward == each.slot), None)
        assert each.reward in (None, first)
        join.entries.release(each.entries)
    assert len(join.entries) == 0
    assert sorted(join.entries.take_done(), key=int) == [str(number) for number in range(len(entries))]
    assert list(join.ended_batches(2000.0)) == [("run", "b")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30))
def test_an_entry_is_done_with_when_all_that_came_of_it_is(holds: list[tuple[int, int]]) -> None:
    held = HeldEntries()
    owed: dict[str, int] = {}
    for entry, count in holds:
        name = f"e{len(owed)}-{entry}"
        owed[name] = count
        held.hold(name, count)
    assert set(held.take_done()) == {name for name, count in owed.items() if not count}
    for name, count in owed.items():
        for left in reversed(range(count)):
            held.release([name])
            assert held.take_done() == ([name] if left == 0 else [])
    held.release(["never held"])
    assert held.take_done() == []
