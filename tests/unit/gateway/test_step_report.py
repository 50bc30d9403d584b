"""Records of steps, weights and rewards in the decision log: bounded, and complete in their sums."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from paceline.report.facts import RunStep, number_attempts, read_facts
from paceline.times import STEP_PARTS
from services.gateway.api.reports import RewardBook
from services.gateway.feeds.step_report import (
    BINS,
    SHOWN,
    IdleTimeBook,
    InstanceShare,
    StepReport,
    TimedSample,
    step_record,
    time_parts,
)
from services.gateway.instances.updater import update_record
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.sample import GatewaySample, GenerationSpan
from services.platform.redis.decision_log import DecisionRecord
from tests.unit.report.facts_of_a_run import entry

SECONDS = st.floats(0, 50, allow_nan=False)
METRICS = GatewayMetrics(CollectorRegistry())


def ended(begin: float, end: float, *spans: GenerationSpan, **measured: float) -> TimedSample:
    sample = GatewaySample(0, 0, 0, 1, spans=list(spans))
    for name, value in measured.items():
        setattr(sample, name, value)
    return TimedSample(sample, "prompt", 10, begin, end)


def test_a_curve_counts_the_samples_at_each_time_in_bins_that_widen() -> None:
    curve = InstanceShare(100.0)
    curve.add(100.0, 101.5, 1)
    curve.add(100.0, 116.0, 2)
    curve.add(108.0, 116.0, 3)
    counts = curve.counts(116.0)
    assert len(counts) <= BINS
    assert curve.width * BINS >= 16
    at = {second: counts[int(second / curve.width)] for second in (0, 1, 3, 9, 15)}
    assert at == {0: 2, 1: 2, 3: 1, 9: 2, 15: 2}
    assert (curve.begin, curve.end, curve.samples, curve.tokens) == (100.0, 116.0, 3, 6)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=40))
def test_a_curve_is_never_negative_and_never_counts_more_than_there_are(
    times: list[tuple[float, float]],
) -> None:
    curve = InstanceShare(0.0)
    for begin, length in times:
        curve.add(begin, begin + length, 1)
    assert all(0 <= count <= len(times) for count in curve.counts(200.0))


def test_the_time_of_a_sample_is_split_into_what_it_was_spent_on() -> None:
    span = GenerationSpan("a", 0, 10, 101.0, 110.0)
    measured = {
        "first_step_at": 102.0,
        "generation_seconds": 7.0,
        "prefill_seconds": 1.0,
        "verify_seconds": 2.0,
        "plain_seconds": 3.5,
    }
    still = time_parts(ended(100.0, 110.0, span, **measured))
    assert still == pytest.approx(
        {"queue": 2, "prefill": 1, "plain": 3.5, "verified": 2, "moves": 0, "between": 1.5}
    )
    other = GenerationSpan("b", 5, 10, 105.0, 110.0)
    moved = time_parts(ended(100.0, 110.0, span, other, **measured))
    assert moved == pytest.approx(
        {"queue": 2, "prefill": 1, "plain": 3.5, "verified": 2, "moves": 1, "between": 0.5}
    )


# A clock that was set back, and steps that exceed their time by rounding once they are scaled down.
@example(0.0, -3.0, [1.0, 1.0, 1.0, 1.0], True)
@example(1.0, 8.0, [25.0, 0.0, 0.0, 0.0], True)
@given(SECONDS, SECONDS, st.lists(SECONDS, min_size=4, max_size=4), st.booleans())
def test_the_parts_of_a_sample_add_up_to_its_time_whatever_instances_say(
    first: float, whole: float, said: list[float], moved: bool
) -> None:
    names = ("generation_seconds", "prefill_seconds", "verify_seconds", "plain_seconds")
    spans = [GenerationSpan(name, 0, 1, 0.0, whole) for name in ("a", "b")[: 1 + moved]]
    measured = dict(zip(names, said, strict=True))
    parts = time_parts(ended(0.0, whole, *spans, first_step_at=first, **measured))
    assert tuple(parts) == STEP_PARTS
    assert sum(parts.values()) == pytest.approx(max(0.0, whole), abs=1e-6)
    # A counter refuses negative seconds, however small.
    METRICS.step_over(whole, parts, [], 0, None)


def report_of(instances: int, samples: int) -> StepReport:
    book, report = IdleTimeBook(), None
    book.begin("run", 3, samples, 100.0)
    for number in range(samples):
        end = 101.0 + number / samples * 20
        span = GenerationSpan(f"instance-{number % instances}", 0, 10, 100.0, end)
        report = book.end("run", 3, ended(100.0, end, span, first_step_at=100.5))
    assert report is not None
    return report


def test_an_entry_of_a_step_has_what_the_report_page_shows() -> None:
    report = report_of(2, 8)
    record = step_record(report, report.bubbles(["instance-0", "instance-1", "idle"]), 5)
    details = record.details
    assert (record.kind, record.run_id, details["step"], details["version"]) == ("step", "run", 3, 5)
    assert (details["samples"], details["tokens"], details["instances"]) == (8, 80, 3)
    rows = {name: row for name, *row in details["rows"]}
    assert rows["idle"] == [None, None, 0, 0, pytest.approx(18.5), []]
    assert rows["instance-1"][2:4] == [4, 40]
    assert max(details["all"]) == 8
    assert [each["ended"] for each in details["last"]] == [118.5, 116.0, 113.5]
    assert sum(details["last"][0]["parts"].values()) == pytest.approx(18.5, abs=1e-3)


def begun(book: IdleTimeBook, step: int, begin: float, end: float, version: int = 0) -> StepReport:
    """Return the report of a step of one sample."""
    book.begin("run", step, 1, begin, version=version)
    report = book.end("run", step, ended(begin, end))
    assert report is not None
    return report


def test_a_step_knows_how_long_it_waited_for_the_trainer_and_for_weights() -> None:
    book = IdleTimeBook()
    assert begun(book, 0, 100.0, 110.0).waits == {}
    book.updated("run", 108.0, 111.0)
    book.updated("another", 111.0, 119.0)
    book.updated("run", 115.0, 118.0)
    report = begun(book, 1, 120.0, 130.0, version=1)
    assert report.waits == {"trainer": 6.0, "weights": 4.0}
    assert report.parts().keys() == {*STEP_PARTS, "trainer", "weights"}
    assert sum(report.parts().values()) == pytest.approx(20.0)
    # The updates before the step are no matter of the next one.
    assert begun(book, 2, 131.0, 132.0, version=1).waits == {"trainer": 1.0, "weights": 0.0}


def test_steps_that_overlap_wait_for_nothing_and_the_time_between_two_trainers_counts_as_none() -> None:
    book = IdleTimeBook()
    begun(book, 4, 100.0, 110.0, version=4)
    book.begin("run", 5, 1, 111.0, version=5)
    assert begun(book, 6, 112.0, 113.0, version=5).waits == {}
    report = book.end("run", 5, ended(111.0, 120.0))
    assert report is not None
    assert report.waits == {"trainer": 1.0, "weights": 0.0}
    # Another batch of the step, then a trainer that was restarted from the step, and one from an earlier step.
    assert begun(book, 5, 125.0, 126.0, version=5).waits == {"trainer": 5.0, "weights": 0.0}
    assert begun(book, 5, 900.0, 901.0, version=6).waits == {}
    assert begun(book, 3, 2000.0, 2001.0, version=7).waits == {}
    assert begun(book, 4, 2003.0, 2004.0, version=8).waits == {"trainer": 2.0, "weights": 0.0}


def test_a_step_that_was_given_up_leaves_no_time_of_a_trainer() -> None:
    book = IdleTimeBook()
    begun(book, 0, 100.0, 110.0)
    book.begin("run", 1, 2, 111.0)
    book.drop("run", 1, 2)
    assert begun(book, 1, 900.0, 901.0).waits == {}


def single(
    book: IdleTimeBook, step: int, begin: float, end: float, *, hinted: bool = True
) -> list[StepReport]:
    """Begin and end a single sample; return the reports of the steps that were over then."""
    counts, reports = book.begin_single("run", step, begin, hinted=hinted)
    report = book.end("run", step, ended(begin, end), ahead=4) if counts else None
    return reports if report is None else [*reports, report]


def test_a_step_of_single_samples_lasts_until_the_run_goes_on() -> None:
    book = IdleTimeBook()
    assert single(book, 3, 100.0, 104.0) == []
    assert single(book, 3, 105.0, 110.0, hinted=False) == []
    (report,) = single(book, 4, 120.0, 121.0, hinted=False)
    assert (report.step, report.samples, report.begun_at, report.ended_at) == (3, 2, 100.0, 110.0)
    assert (report.pregenerated, report.waits) == (8, {})
    assert book.pass_on("another") == []
    (report,) = book.pass_on("run")
    assert (report.step, report.pregenerated) == (4, None)
    assert report.waits == {"trainer": 10.0, "weights": 0.0}
    # The weights that end a step are what the next one waits for.
    book.updated("run", 122.0, 125.0)
    assert single(book, 5, 130.0, 131.0) == []
    assert book.pass_on("run")[0].waits == {"trainer": 6.0, "weights": 3.0}
    # A trainer that was started again.
    assert single(book, 0, 900.0, 901.0) == []
    assert [each.waits for each in book.pass_on("run")] == [{}]


def test_a_step_that_the_run_has_passed_ends_with_its_last_sample_and_counts_no_late_one() -> None:
    book = IdleTimeBook()
    for _ in range(2):
        assert book.begin_single("run", 3, 100.0, hinted=False) == (True, [])
    assert book.begin_single("run", 4, 101.0, hinted=False) == (True, [])
    assert book.end("run", 3, ended(100.0, 102.0)) is None
    assert book.begin_single("run", 3, 103.0, hinted=False) == (True, [])
    assert book.end("run", 3, ended(103.0, 104.0)) is None
    # A client that leaves takes its sample with it.
    report = book.drop("run", 3, 1, single=True)
    assert report is not None
    assert (report.step, report.samples) == (3, 2)
    assert book.begin_single("run", 3, 105.0, hinted=False) == (False, [])
    assert book.end("run", 4, ended(101.0, 107.0)) is None
    assert [each.step for each in book.pass_on("run")] == [4]


def test_a_resumed_sample_joins_its_step_but_begins_none_under_later_weights() -> None:
    book, steps = IdleTimeBook(), list[RunStep]()
    for step in range(4):
        begin = 100.0 + 10 * step
        # What the update has aborted comes first, with the number of the former step.
        assert book.begin_single("run", step - 1, begin, hinted=False, version=step, resumed=True) == (
            False,
            [],
        )
        assert book.begin_single("run", step, begin + 1, hinted=False, version=step) == (True, [])
        assert book.begin_single("run", step, begin + 2, hinted=False, version=step, resumed=True)[0]
        for end in (3.0, 5.0):
            assert book.end("run", step, ended(begin + 1, begin + end)) is None
        (report,) = book.pass_on("run")
        book.updated("run", begin + 6, begin + 8)
        assert report.waits == ({"trainer": 4.0, "weights": 2.0} if step else {})
        record = step_record(report, report.bubbles([]), report.version)
        steps += read_facts([entry(record)]).steps
    number_attempts(steps)
    assert [(each.step, each.samples, each.attempt) for each in steps] == [(step, 2, 1) for step in range(4)]


def test_single_samples_of_a_run_that_submits_batches_belong_to_no_step() -> None:
    book = IdleTimeBook()
    book.begin("run", 3, 1, 100.0)
    for step in (2, 3, 4):
        assert single(book, step, 101.0, 102.0) == []
    report = book.end("run", 3, ended(100.0, 110.0))
    assert report is not None
    assert report.samples == 1
    book = IdleTimeBook()
    begun(book, 3, 100.0, 110.0)
    for step in (3, 4):
        assert single(book, step, 111.0, 112.0) == []
        assert book.pass_on("run") == []
    assert begun(book, 4, 120.0, 121.0).samples == 1
    # Nor after a step of single samples that was idle, or in work, when it began to submit them.
    book = IdleTimeBook()
    assert single(book, 2, 100.0, 101.0) == []
    (report,) = book.begin("run", 3, 1, 103.0)
    assert (report.step, report.samples) == (2, 1)
    batch = book.end("run", 3, ended(103.0, 110.0))
    assert batch is not None
    assert batch.waits == {"trainer": 2.0, "weights": 0.0}
    assert single(book, 3, 111.0, 112.0) == book.pass_on("run") == []
    book = IdleTimeBook()
    assert book.begin_single("run", 2, 100.0, hinted=False) == (True, [])
    assert begun(book, 3, 101.0, 102.0).samples == 1
    assert book.end("run", 2, ended(100.0, 103.0)) is not None
    assert single(book, 4, 111.0, 112.0) == book.pass_on("run") == []
    # And if it begins to submit them within a step, the step ends with them.
    book = IdleTimeBook()
    assert single(book, 3, 100.0, 101.0) == []
    assert begun(book, 3, 102.0, 103.0).samples == 2


def test_a_single_sample_that_leaves_a_step_of_batches_takes_only_itself() -> None:
    book = IdleTimeBook()
    assert book.begin_single("run", 3, 100.0, hinted=False) == (True, [])
    book.begin("run", 3, 2, 101.0)
    for end in (105.0, 110.0):
        assert book.end("run", 3, ended(101.0, end)) is None
    report = book.drop("run", 3, 1, single=True)
    assert report is not None
    assert (report.samples, report.ended_at) == (2, 110.0)
    assert begun(book, 4, 113.0, 114.0).waits == {"trainer": 3.0, "weights": 0.0}


def test_a_step_whose_samples_were_all_given_up_is_not_reported() -> None:
    book = IdleTimeBook()
    assert single(book, 1, 100.0, 104.0) == []
    assert [each.step for each in book.begin_single("run", 2, 110.0, hinted=False)[1]] == [1]
    assert book.drop("run", 2, 1, single=True) is None
    assert single(book, 3, 190.0, 191.0) == []
    (report,) = book.pass_on("run")
    assert (report.step, report.waits) == (3, {}), "when the one before ended is unknown"


def test_a_run_that_has_ended_is_forgotten() -> None:
    book = IdleTimeBook()
    begun(book, 5, 100.0, 110.0)
    assert book.forget("run") == []
    assert single(book, 0, 900.0, 901.0) == []
    (report,) = book.forget("run")
    assert (report.step, report.samples, report.waits) == (0, 1, {})
    assert begun(book, 0, 950.0, 951.0).waits == {}


def test_steps_of_single_samples_are_bounded_however_many_runs_there_are() -> None:
    book, reports = IdleTimeBook(), 0
    for number in range(5000):
        name = f"run-{number}"
        reports += len(book.begin_single(name, 0, 100.0, hinted=False)[1])
        assert book.end(name, 0, ended(100.0, 101.0)) is None
    assert 0 < 5000 - reports <= 1001


def test_many_runs_pass_only_the_idle_steps_that_were_used_least_recently() -> None:
    book = IdleTimeBook()
    for number in range(3000):
        assert book.begin_single(f"busy-{number}", 0, 100.0, hinted=False) == (True, [])
    for number in range(8):
        assert single(book, 7, 100.0 + number, 100.5 + number) == [], "the others have work"
    for number in range(3000):
        assert book.end(f"busy-{number}", 0, ended(100.0, 109.0)) is None
    passed = list[StepReport]()
    for number in range(1100):
        reports = single(book, 7, 110.0 + number, 110.5 + number)
        assert len(reports) <= 2, "the event loop is not held up"
        passed += reports
    assert [each.run_id for each in passed] == [f"busy-{number}" for number in range(2000)]
    (report,) = book.pass_on("run")
    assert report.samples == 8 + 1100


def test_an_entry_of_a_large_fleet_is_bounded_and_shows_the_busiest_and_the_idlest() -> None:
    report = report_of(1000, 5000)
    bubbles = report.bubbles([])
    details = step_record(report, bubbles, 1).details
    shown = [row[0] for row in details["rows"]]
    assert len(shown) == SHOWN
    assert {min(bubbles, key=bubbles.__getitem__), max(bubbles, key=bubbles.__getitem__)} <= set(shown)
    assert details["instances"] == 1000
    fields = step_record(report, bubbles, 1).to_fields()
    assert "left_out" not in json.loads(fields["details"])


def test_rewards_of_a_step_are_summed_up_and_written_once() -> None:
    posted: list[DecisionRecord] = []
    book = RewardBook(posted.append)
    book.add("run", 2, [1.0, 0.0])
    book.add("run", 2, [0.5])
    book.add("run", 3, [])
    book.write()
    book.write()
    assert [(each.kind, each.run_id, each.details) for each in posted] == [
        ("reward", "run", {"step": 2, "count": 3, "sum": 1.5, "low": 0.0, "high": 1.0})
    ]


def test_an_entry_of_a_version_has_the_known_times_of_its_update() -> None:
    record = update_record({"started": 10.0, "staged": 12.0, "applying": 13.0}, 4, "run", 14.0)
    assert record.details == {
        "version": 4,
        "started": 10.0,
        "staged": 12.0,
        "applying": 13.0,
        "published": 14.0,
    }
    assert update_record({}, 5, "", 20.0).details == {"version": 5, "published": 20.0}
