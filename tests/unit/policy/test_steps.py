"""Steps put together from reports."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.knobs import Acceptance, StepTotals
from services.policy.steps import MAX_STEPS, StepEnd, StepStatistics, step_ended

SETTLE, INTERVAL = 2.0, 0.5


def totals(drafts: int = 5, plain: int = 0, accepted: int = 7) -> StepTotals:
    reasons = Counter({"drafts": drafts, "plain_is_best": plain})
    return StepTotals(
        +reasons, predicted_gain=drafts * 0.5, drafts={"reference": Acceptance(drafts, 10, accepted)}
    )


def test_a_step_ends_when_nothing_changes_for_a_while() -> None:
    book = StepStatistics(SETTLE, INTERVAL)
    book.report(("i0", 1), [(("r", 0), totals(3))], 0.0)
    book.report(("i0", 1), [(("r", 0), totals(5))], 1.0)
    book.report(("i0", 1), [(("r", 0), totals(5))], 2.0)
    assert not book.ended(2.9)
    (ended,) = book.ended(3.0)
    assert (ended.run_id, ended.step, ended.totals) == ("r", 0, totals(5))
    assert not book.ended(100.0), "it is told once"


def test_a_later_step_ends_the_one_before_it_but_not_another_run_s() -> None:
    book = StepStatistics(SETTLE, INTERVAL)
    book.report(("i0", 1), [(("r", 0), totals()), (("other", 0), totals())], 0.0)
    book.report(("i0", 1), [(("r", 1), totals())], 0.1)
    assert [(each.run_id, each.step) for each in book.ended(0.5)] == [("r", 0)]


def test_instances_and_processes_of_one_name_are_added_up() -> None:
    book = StepStatistics(SETTLE, INTERVAL)
    for instance in (("i0", 1), ("i0", 2), ("i1", 1)):
        book.report(instance, [(("r", 0), totals(2, 1, 3))], 0.0)
    (ended,) = book.ended(SETTLE)
    assert ended.totals.reasons == {"drafts": 6, "plain_is_best": 3}
    assert ended.totals.acceptance == Acceptance(6, 30, 9)
    assert ended.instances == 3


def test_what_comes_late_is_told_as_well_and_only_that() -> None:
    book = StepStatistics(SETTLE, INTERVAL)
    book.report(("i0", 1), [(("r", 0), totals(2))], 0.0)
    book.ended(SETTLE)
    book.report(("i0", 1), [(("r", 0), totals(5))], 3.0)
    assert not book.ended(4.0)
    (late,) = book.ended(5.0)
    assert late.totals.engine_steps == 3


def test_it_remembers_the_latest_steps_only() -> None:
    book = StepStatistics(SETTLE, INTERVAL)
    for step in range(500):
        book.report(("i0", 1), [(("r", step), totals())], float(step))
    assert len(book.ended(1e6)) == MAX_STEPS


def test_steps_that_instances_repeat_end_once_however_many_there_are() -> None:
    book, told = StepStatistics(SETTLE, INTERVAL), Counter[tuple[str, int]]()
    latest = range(8)
    for report in range(100):
        now = 0.5 * report
        for number in range(2 * MAX_STEPS // len(latest)):
            # The last step of each run still changes in the first half.
            steps = [((f"r{number}", step), totals(5 + (step == 7) * min(report, 50))) for step in latest]
            book.report((f"i{number}", 1), steps, now + 0.01 * number)
        for ended in book.ended(now + 0.2):
            told[ended.run_id, ended.step] += ended.totals.engine_steps
    assert len(told) == 2 * MAX_STEPS
    assert all(count == (55 if step == 7 else 5) for (_, step), count in told.items())


@given(
    st.lists(
        st.tuples(st.sampled_from(["i0", "i1"]), st.integers(0, 3), st.integers(1, 20), st.floats(0, 3)),
        max_size=30,
    )
)
def test_what_is_told_adds_up_to_what_was_reported(reports: list[tuple[str, int, int, float]]) -> None:
    book, now, told = StepStatistics(SETTLE, INTERVAL), 0.0, Counter[int]()
    counts: dict[tuple[str, int], int] = {}
    for name, step, more, wait in reports:
        now += wait
        counts[name, step] = counts.get((name, step), 0) + more
        book.report((name, 1), [(("r", step), totals(counts[name, step]))], now)
        for ended in book.ended(now):
            told[ended.step] += ended.totals.engine_steps
    for ended in book.ended(now + 2 * SETTLE):
        told[ended.step] += ended.totals.engine_steps
    wanted = Counter[int]()
    for (_, step), count in counts.items():
        wanted[step] += count
    assert told == wanted


def test_a_step_with_samples_that_had_no_room_says_so() -> None:
    decision = step_ended(StepEnd("r", 4, StepTotals(Counter({"off": 9}), lacking_steps=7), 1), 5.0)
    assert decision.reason.endswith("; the suffix index had no room for some samples in 7")
    assert decision.details["lacking_steps"] == 7


def test_a_step_without_drafts_is_explained_too() -> None:
    book = StepStatistics(SETTLE, INTERVAL)
    book.report(("i0", 1), [(("r", 4), StepTotals(Counter({"off": 9})))], 0.0)
    (ended,) = book.ended(SETTLE)
    decision = step_ended(ended, 5.0)
    assert decision.reason == (
        "step 4: 0 of 9 engine steps verified drafts; speculation is switched off in 9"
    )
    assert decision.predicted_gain == 0.0
