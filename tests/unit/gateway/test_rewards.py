"""Rewards of finished samples, and reports that adapt the lenience of a run."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from paceline.v1 import rollout_pb2
from services.gateway.api.reports import known_rewards
from services.gateway.journal.record import BatchHead, BatchRecord
from services.gateway.state.lenience import RunLenience


def recorded(done: set[int]) -> BatchRecord:
    """Group a (2 samples), b (3), c (1): indexes 0-1, 2-4, 5."""
    request = rollout_pb2.SubmitRolloutsRequest()
    for prompt_id, samples in (("a", 2), ("b", 3), ("c", 1)):
        request.groups.add(prompt_id=prompt_id, samples=samples)
    record = BatchRecord(request, BatchHead("", 0.0, 6, None), term=1)
    for index in done:
        record.end(index, b"sample")
    return record


def names(done: set[int], *wanted: tuple[str, int]) -> list[tuple[str, int]]:
    rewards = [rollout_pb2.Reward(prompt_id=prompt_id, slot=slot) for prompt_id, slot in wanted]
    return [(reward.prompt_id, reward.slot) for reward in known_rewards(recorded(done), rewards)]


def test_rewards_of_samples_that_ended_are_known() -> None:
    everything = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
    assert names(set(range(6)), *everything) == everything
    assert names({1, 4}, *everything) == [("a", 1), ("b", 2)]


def test_rewards_of_what_is_not_in_the_batch_are_not() -> None:
    assert names(set(range(6)), ("a", 2), ("x", 0), ("c", 1), ("", 0)) == []


def test_a_report_moves_l_once_however_often_it_comes() -> None:
    start = RunLenience(1.5)
    once = start.after("b0", 0.05, 0.01)
    assert once.lenience < 1.5
    assert once.after("b0", 0.05, 0.01) is once
    twice = once.after("b1", 0.05, 0.01)
    assert twice.lenience < once.lenience
    assert twice.after("b0", 0.05, 0.01) is twice, "not even after another one"


def test_the_memory_of_reports_is_bounded() -> None:
    state = RunLenience(1.5)
    for number in range(1000):
        state = state.after(f"b{number}", 0.01, 0.01)
    assert len(state.reported) <= 64
    assert state.reported[-1] == "b999"


@given(st.floats(1, 100), st.lists(st.text(max_size=5), max_size=5))
def test_what_is_kept_comes_back(lenience: float, reported: list[str]) -> None:
    state = RunLenience(lenience, tuple(reported))
    assert RunLenience.from_json(state.to_json()) == state
