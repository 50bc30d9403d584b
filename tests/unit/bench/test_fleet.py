"""Responses that the fleet benchmark replays, and when its instances report them."""

from __future__ import annotations

import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.workload import MAX_TOKENS, Reporting, SimulatedPolicy

POLICY = SimulatedPolicy.create()


def test_lengths_are_the_same_in_every_process_and_have_a_long_tail() -> None:
    assert SimulatedPolicy.create() == POLICY
    ordered = sorted(POLICY.lengths)
    assert 300 < statistics.median(ordered) < 340
    assert 400 < statistics.mean(ordered) < 460
    assert 1500 < ordered[len(ordered) * 99 // 100] <= ordered[-1] == MAX_TOKENS


@given(seed=st.integers(0, 2**64 - 1), cuts=st.lists(st.integers(0, MAX_TOKENS), max_size=4))
def test_a_response_is_the_same_in_however_many_parts_it_is_read(seed: int, cuts: list[int]) -> None:
    length = POLICY.length(seed)
    bounds = [0, *sorted(min(cut, length) for cut in cuts), length]
    parts = [POLICY.slice(seed, begin, end) for begin, end in itertools.pairwise(bounds)]
    tokens, logprobs = POLICY.slice(seed, 0, length)
    assert [token for part, _ in parts for token in part] == tokens
    assert [logprob for _, part in parts for logprob in part] == logprobs
    assert len(tokens) == len(logprobs) == length


def test_a_checkpoint_is_due_after_its_tokens_its_seconds_or_at_the_end() -> None:
    quick, slow = Reporting.checkpoints(1024, 1), Reporting.checkpoints(50, 1)
    assert quick.due(10.0, unreported=0, remaining=2000) == 10.5
    assert quick.due(10.0, unreported=256, remaining=2000) == 10.25
    assert slow.due(10.0, unreported=0, remaining=2000) == 15.0
    assert slow.due(10.0, unreported=0, remaining=50) == 11.0
    assert Reporting.checkpoints(50, 10).due(10.0, 0, 2000) == 10.5
    assert Reporting.stream(50, 1).due(10.0, 0, 2000) == 10.05
