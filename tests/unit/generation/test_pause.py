"""Drafters that never pay are asked now and then, those that pay at times always."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.drafting.pause import Pause


def asked(pause: Pause, outcomes: list[bool], samples: int = 16) -> list[bool]:
    """In which of some steps drafters are asked, if asking in step i would draft anything or not."""
    found = []
    for drafted in outcomes:
        found.append(pause.over(samples))
        if found[-1]:
            pause.asked(samples, drafted)
    return found


def test_what_never_pays_is_asked_in_every_ninth_step() -> None:
    pause = Pause()
    assert all(asked(pause, [False] * 9))
    asked(pause, [False] * 100)
    steps = asked(pause, [False] * 900)
    assert sum(steps) == 100


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_what_pays_at_least_in_every_eighth_step_is_always_asked(gaps: list[int]) -> None:
    outcomes = [drafted for gap in gaps for drafted in [*[False] * gap, True]]
    assert all(asked(Pause(), outcomes))


@given(st.integers(0, 500), st.integers(1, 60))
def test_what_begins_to_pay_is_found_within_nine_steps(before: int, after: int) -> None:
    pause = Pause()
    asked(pause, [False] * before)
    steps = asked(pause, [True] * (8 + after))
    assert all(steps[8:])


def test_a_batch_that_has_shrunk_is_asked_for() -> None:
    pause = Pause()
    asked(pause, [False] * 200, samples=16)
    while pause.over(16):
        pause.asked(16, False)
    assert not pause.over(13)
    assert pause.over(11)


def test_news_end_it() -> None:
    pause = Pause()
    asked(pause, [False] * 200)
    pause.end()
    assert all(asked(pause, [False] * 8))
