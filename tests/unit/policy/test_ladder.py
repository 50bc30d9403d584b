"""The draft-length ladder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.knob_store import Rung
from services.contracts.knobs import Acceptance, LadderKnobs
from services.policy.steps import climb, start

KNOBS = LadderKnobs(lengths=(2, 4, 8))


def full(cap: int, share: float, verifications: int = 100) -> Acceptance:
    """Drafts of the whole cap whose block efficiency is this share of its ceiling."""
    accepted = round(share * (cap + 1) * verifications) - verifications
    return Acceptance(verifications, cap * verifications, max(0, accepted))


def after(shares: list[float], rung: Rung) -> Rung:
    for share in shares:
        rung = climb(KNOBS, rung, full(rung.cap, share)).rung
    return rung


def test_the_cap_moves_after_as_many_steps_as_patience_asks() -> None:
    assert after([0.96], Rung(4)).cap == 4
    assert after([0.96, 0.96], Rung(4)) == Rung(8)
    assert after([0.8], Rung(4)).cap == 4
    assert after([0.8, 0.8], Rung(4)) == Rung(2)


def test_one_step_in_between_starts_the_count_anew() -> None:
    assert after([0.96, 0.9, 0.96], Rung(4)) == Rung(4, 1)
    assert after([0.96, 0.8, 0.96], Rung(4)) == Rung(4, 1)


def test_the_paper_s_thresholds_are_the_defaults() -> None:
    # Qwen2.5-7B went up from 5 where its block efficiency was near 6; Llama stayed at 5 with 5.4.
    knobs = LadderKnobs(lengths=(3, 5, 7))
    once = climb(knobs, Rung(5), Acceptance(1000, 5000, 4700))
    assert climb(knobs, once.rung, Acceptance(1000, 5000, 4700)).moved
    llama = climb(knobs, Rung(5), Acceptance(1000, 5000, 4400))
    assert not llama.moved
    assert llama.rung.streak == 0


def test_drafts_that_do_not_come_near_the_cap_do_not_raise_it() -> None:
    short = Acceptance(100, 100, 100)
    assert climb(KNOBS, Rung(8, 1), short).rung == Rung(8)
    assert climb(KNOBS, Rung(4, 1), short).rung.cap == 4


def test_a_step_with_hardly_a_verification_says_nothing() -> None:
    move = climb(KNOBS, Rung(4, 1), full(4, 1.0, verifications=5))
    assert (move.rung, move.moved) == (Rung(4, 1), False)
    assert "nothing" in move.reason


def test_it_starts_on_the_ladder_and_comes_back_to_it() -> None:
    assert start(KNOBS, 7) == Rung(4)
    assert start(KNOBS, 1) == Rung(2)
    assert climb(KNOBS, Rung(7, 1), full(4, 0.9)).rung == Rung(4)


acceptances = st.integers(0, 400).flatmap(
    lambda n: st.integers(0, 16 * n).flatmap(
        lambda drafted: st.builds(Acceptance, st.just(n), st.just(drafted), st.integers(0, drafted))
    )
)


@given(st.sampled_from(KNOBS.lengths), st.integers(-1, 1), st.lists(acceptances, max_size=12))
def test_the_cap_stays_on_the_ladder_and_moves_one_rung_at_a_time(
    cap: int, streak: int, steps: list[Acceptance]
) -> None:
    rung = Rung(cap, streak)
    for step in steps:
        move = climb(KNOBS, rung, step)
        before, now = KNOBS.lengths.index(rung.cap), KNOBS.lengths.index(move.rung.cap)
        assert abs(before - now) == int(move.moved)
        assert abs(move.rung.streak) < KNOBS.patience
        rung = move.rung


@given(acceptances, st.integers(1, 100), st.sampled_from(KNOBS.lengths))
def test_more_accepted_never_lowers_the_cap(step: Acceptance, more: int, cap: int) -> None:
    better = Acceptance(step.verifications, step.drafted, min(step.drafted, step.accepted + more))
    for streak in (-1, 0, 1):
        rung = Rung(cap, streak)
        assert climb(KNOBS, rung, better).rung.cap >= climb(KNOBS, rung, step).rung.cap
