"""Steps at the time of their kind: what is the same counts the same, and what is decided counts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.accounting import TimedRound, TimedStep, accounted, step_times

seconds = st.floats(1e-4, 1e-1)
empty = st.builds(TimedStep, st.just(0), st.just(0), seconds)
steps = st.builds(TimedStep, st.integers(1, 64), st.integers(0, 200), seconds) | empty
rounds = st.lists(
    st.builds(TimedRound, st.lists(steps, min_size=1, max_size=20), st.floats(0, 1)), min_size=1, max_size=5
)


@given(rounds)
def test_where_every_step_takes_the_time_of_its_kind_the_account_is_what_was_measured(
    made: list[TimedRound],
) -> None:
    times = step_times(made)
    exact = [
        TimedRound([TimedStep(s.samples, s.drafted, times[s.kind]) for s in each.steps], each.beside)
        for each in made
    ]
    assert accounted(exact[:1], times) == pytest.approx(exact[0].seconds)


@given(rounds, rounds)
def test_the_order_of_steps_and_rounds_does_not_matter(
    one: list[TimedRound], other: list[TimedRound]
) -> None:
    times = step_times([*one, *other])
    turned = [TimedRound(each.steps[::-1], each.beside) for each in reversed(one)]
    assert accounted(turned, times) == pytest.approx(accounted(one, times))


def test_two_plans_that_do_the_same_differ_by_what_they_do_beside_the_engine() -> None:
    """Each round is disturbed by another factor, and some steps much more."""
    random = Random(0)

    def disturbed(beside: float) -> TimedRound:
        speed = random.uniform(1.0, 1.6)
        made = [TimedStep(n, 4 * n, 1e-3 * n * speed * random.choice((1, 1, 1, 5))) for n in range(20, 0, -1)]
        return TimedRound(made, beside)

    plans = {beside: [disturbed(beside) for _ in range(9)] for beside in (0.0, 0.1)}
    times = step_times([each for made in plans.values() for each in made])
    assert accounted(plans[0.1], times) - accounted(plans[0.0], times) == pytest.approx(0.1)


def test_a_step_more_costs_its_time_even_where_only_one_round_makes_it() -> None:
    plain = [TimedRound([TimedStep(4, 0, 2e-3)] * 10) for _ in range(3)]
    tried = [*plain[:2], TimedRound([*plain[0].steps, TimedStep(4, 8, 5e-3)])]
    times = step_times([*plain, *tried])
    assert accounted(tried, times) - accounted(plain, times) == pytest.approx(5e-3 / 3)


def test_plain_steps_are_of_a_kind_of_their_own_and_close_numbers_of_rows_are_of_one() -> None:
    assert TimedStep(8, 0, 1.0).kind != TimedStep(8, 1, 1.0).kind
    assert TimedStep(64, 640, 1.0).kind == TimedStep(64, 642, 1.0).kind
    assert TimedStep(64, 640, 1.0).kind != TimedStep(64, 720, 1.0).kind
    assert TimedStep(64, 640, 1.0).kind != TimedStep(63, 640, 1.0).kind


def test_a_kind_of_few_steps_borrows_from_those_that_are_nearly_it() -> None:
    common = [TimedStep(32, 32 * drafts, 1e-2) for drafts in (4, 5) for _ in range(10)]
    rare, disturbed = TimedStep(32, 146, 1e-2), TimedStep(31, 140, 9e-1)
    times = step_times([TimedRound([*common, rare]), TimedRound([disturbed])])
    assert times[rare.kind] == times[disturbed.kind] == 1e-2


def test_a_kind_of_many_steps_borrows_nothing() -> None:
    times = step_times([TimedRound([TimedStep(32, 128, 1e-2)] * 15 + [TimedStep(32, 136, 2e-2)] * 40)])
    assert times[TimedStep(32, 128, 0.0).kind] == 1e-2


@pytest.mark.parametrize(
    ("rare", "other"),
    [
        (TimedStep(32, 128, 2e-2), TimedStep(32, 0, 1e-2)),
        (TimedStep(32, 128, 2e-2), TimedStep(16, 64, 1e-2)),
        (TimedStep(32, 128, 2e-2), TimedStep(32, 320, 1e-2)),
        (TimedStep(1, 0, 2e-2), TimedStep(0, 0, 1e-2)),
        (TimedStep(0, 0, 2e-2), TimedStep(1, 0, 1e-2)),
    ],
)
def test_a_kind_borrows_nothing_from_what_is_not_alike(rare: TimedStep, other: TimedStep) -> None:
    """Plain steps, half as many samples, twice as many rows, none at all."""
    times = step_times([TimedRound([other] * 50), TimedRound([rare])])
    assert times[rare.kind] == 2e-2


def test_what_cannot_be_accounted_for_is_refused() -> None:
    with pytest.raises(ValueError, match="without a round"):
        accounted([], {})
    with pytest.raises(KeyError):
        accounted([TimedRound([TimedStep(1, 0, 1.0)])], {})
