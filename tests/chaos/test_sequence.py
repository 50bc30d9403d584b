"""What a sequence of kills and stalls promises: it can be repeated, and it spares nobody."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.sequence import LONGEST_PAUSE, LONGEST_STALL, Kind, sequence

SEEDS = st.integers(0, 2**32)
PROCESSES = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@given(SEEDS, st.integers(0, 50), PROCESSES)
def test_a_seed_always_has_the_same_events_and_more_of_them_begin_with_these(
    seed: int, count: int, processes: list[str]
) -> None:
    events = sequence(seed, count, processes)
    assert len(events) == count
    assert sequence(seed, count + 5, processes)[:count] == events


@given(SEEDS, PROCESSES)
def test_every_process_gets_its_turn_before_any_gets_another(seed: int, processes: list[str]) -> None:
    events = sequence(seed, 3 * len(processes), processes)
    assert Counter(event.process for event in events) == Counter(3 * processes)
    for begin in range(0, len(events), len(processes)):
        assert {event.process for event in events[begin : begin + len(processes)]} == set(processes)


def test_kills_and_stalls_are_equally_frequent_and_some_stalls_outlast_a_registration() -> None:
    events = sequence(1, 1000, ["a", "b"])
    kinds = Counter(event.kind for event in events)
    assert min(kinds[Kind.KILL], kinds[Kind.STALL]) > 400
    assert 50 < sum(event.seconds > 3.0 for event in events) < 300
    assert max(event.pause for event in events) <= LONGEST_PAUSE
    assert max(event.seconds for event in events) <= LONGEST_STALL
