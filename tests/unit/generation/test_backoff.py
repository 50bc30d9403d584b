"""Drafters that are not worth the asking are asked now and then, those that are on the whole always."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.speculation import DraftBackoff


def asked(backoff: DraftBackoff, saved: Iterable[float], samples: int = 16) -> list[bool]:
    """In which of some steps drafters are asked, if step i would save so many times what asking takes."""
    found = []
    for each in saved:
        found.append(backoff.should_draft(samples))
        if found[-1]:
            backoff.record_drafted_step(samples, each * 0.01, 0.01)
    return found


def test_what_never_pays_is_asked_in_every_thirty_third_step() -> None:
    backoff = DraftBackoff()
    assert all(asked(backoff, [0.0] * 9))
    asked(backoff, [0.0] * 100)
    assert sum(asked(backoff, [0.0] * 3300)) == 100


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_what_pays_well_at_least_in_every_eighth_step_is_always_asked(gaps: list[int]) -> None:
    saved = [each for gap in gaps for each in [*[0.0] * gap, 8.0]]
    assert all(asked(DraftBackoff(), saved))


@given(st.floats(0, 0.9), st.integers(0, 100))
def test_what_saves_less_than_the_asking_takes_is_left_out(saved: float, before: int) -> None:
    backoff = DraftBackoff()
    asked(backoff, [5.0] * before)
    asked(backoff, [saved] * 200)
    assert sum(asked(backoff, [saved] * 900)) <= 150


@given(st.lists(st.floats(0, 20), min_size=8, max_size=8))
def test_what_is_worth_it_on_the_whole_is_always_asked(cycle: list[float]) -> None:
    # A cycle of eight steps can be a debt of eight at most before it pays.
    cycle = [*cycle[:-1], cycle[-1] + max(0.0, 16.0 - sum(cycle))]
    assert all(asked(DraftBackoff(), cycle * 20))


@given(st.integers(0, 500), st.integers(1, 60), st.floats(1.0, 100.0))
def test_what_begins_to_pay_is_found_within_thirty_three_steps(before: int, after: int, saved: float) -> None:
    backoff = DraftBackoff()
    asked(backoff, [0.0] * before)
    assert all(asked(backoff, [saved] * (32 + after))[32:])


def test_drafts_of_which_nobody_says_what_they_save_are_always_asked_for() -> None:
    backoff = DraftBackoff()
    for _ in range(100):
        assert backoff.should_draft(4)
        backoff.record_drafted_step(4, inf, 1.0)


def test_asking_that_takes_no_time_pays_whatever_is_saved() -> None:
    backoff = DraftBackoff()
    for _ in range(100):
        assert backoff.should_draft(4)
        backoff.record_drafted_step(4, 1e-9)


def test_a_batch_that_has_shrunk_is_asked_for() -> None:
    backoff = DraftBackoff()
    asked(backoff, [0.0] * 200, samples=16)
    while backoff.should_draft(16):
        backoff.record_drafted_step(16, 0.0)
    assert not backoff.should_draft(9)
    assert backoff.should_draft(7)


def test_news_end_it() -> None:
    backoff = DraftBackoff()
    asked(backoff, [0.0] * 200)
    backoff.reset()
    assert all(asked(backoff, [0.0] * 8))


def test_a_sample_that_comes_is_asked_for_once() -> None:
    backoff = DraftBackoff()
    asked(backoff, [0.0] * 200)
    backoff.draft_next()
    assert asked(backoff, [0.0] * 9) == [True, *[False] * 8]
