"""Pure parts of the weights benchmark: the figures of its rows, pauses of decoding, links, memory and progress."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.progress import PartsProgress
from bench.weights.__main__ import arguments
from bench.weights.links import ByteBucket
from bench.weights.memory import parse_rollup
from bench.weights.models import shape_of
from bench.weights.summary import (
    FOLDER,
    LOOPBACK,
    STREAM,
    THROTTLED,
    EngineTimes,
    Span,
    parse,
    pauses,
    summary,
    verdicts,
)

KEYS = [
    "folder_vs_copy",
    "stream_vs_copy",
    "stream_seconds_ratio_4_vs_1",
    "trainer_bytes_ratio_4_vs_1",
    "peak_memory_models",
    "decoding_gap_ms",
]


def transfer(transport: str, links: str, megabytes: int, instances: int, **figures: float) -> dict[str, Any]:
    return {"transport": transport, "links": links, "megabytes": megabytes, "instances": instances, **figures}


def engine(megabytes: int, gap: float, copy: float, models: float) -> dict[str, Any]:
    return {
        "megabytes": megabytes,
        "decoding_gap_ms": gap,
        "memory_copy_ms": copy,
        "peak_memory_models": models,
    }


TRANSFERS = [
    transfer(FOLDER, LOOPBACK, 100, 1, vs_copy_and_check=9.0),
    transfer(FOLDER, LOOPBACK, 1000, 4, vs_copy_and_check=8.0),
    transfer(FOLDER, LOOPBACK, 1000, 1, vs_copy_and_check=1.4),
    transfer(STREAM, LOOPBACK, 1000, 1, vs_copy_and_check=1.6, seconds=1.0, trainer_bytes=7.0),
    transfer(STREAM, THROTTLED, 1000, 4, vs_copy_and_check=7.0, seconds=12.0, trainer_bytes=1001.0),
    transfer(STREAM, THROTTLED, 1000, 1, vs_copy_and_check=6.0, seconds=10.0, trainer_bytes=1000.0),
]
ENGINES = [engine(100, 90.0, 20.0, 5.0), engine(1000, 150.0, 160.0, 0.1), engine(1000, 140.0, 160.0, 0.3)]


def test_the_summary_has_every_figure_of_the_largest_model() -> None:
    figures = summary(TRANSFERS, ENGINES)
    assert list(figures) == KEYS
    assert list(figures.values()) == [1.4, 1.6, 1.2, 1.001, 0.3, 150.0]


def test_a_goal_is_reached_missed_or_not_measured() -> None:
    reached = verdicts(summary(TRANSFERS, ENGINES), ENGINES)
    assert set(reached) == set(KEYS)
    assert {name for name, each in reached.items() if not each} == {"stream_vs_copy"}
    assert not verdicts(summary(TRANSFERS, ENGINES), [engine(1000, 161.0, 160.0, 0.1)])["decoding_gap_ms"]
    assert not verdicts(summary(TRANSFERS, ENGINES), [engine(1000, 1.0, 1.0, 2.1)])["peak_memory_models"]


def test_what_was_not_measured_is_none() -> None:
    figures = summary([], [])
    assert figures == dict.fromkeys(KEYS)
    assert verdicts(figures, []) == dict.fromkeys(KEYS)
    alone = summary([row for row in TRANSFERS if row["instances"] == 1], [])
    assert (alone["folder_vs_copy"], alone["stream_seconds_ratio_4_vs_1"]) == (1.4, None)


def times(*steps: tuple[float, float], applied: tuple[float, float]) -> EngineTimes:
    return EngineTimes([Span(*step) for step in steps], [Span(*applied)])


def test_the_gap_is_the_longest_time_without_a_step_during_the_push() -> None:
    # Long waits before the push and after the step that follows the weights are not its own.
    steps = [(0, 1), (3, 4), (4, 5), (5.5, 7.5), (10, 14), (15, 16), (19, 20)]
    found = pauses(times(*steps, applied=(8, 9)), 5.2, 9.5)
    assert (found.gap, found.apply, found.prefill) == (2500, 1000, 4000)
    assert (found.usual_step, found.usual_gap) == (1000, 1000)
    assert (found.step_while_staging, found.slowest_step) == (2000, 2000)


@pytest.mark.parametrize(
    ("steps", "applied"),
    [
        ([(6, 7), (10, 11), (11, 12)], (8, 9)),  # not before the push
        ([(0, 1), (1, 2), (6, 7), (10, 11)], (8, 9)),  # no second step after it
        ([(0, 1), (1, 2), (6, 7), (10, 11), (11, 12)], (12, 13)),  # applied later
    ],
)
def test_a_push_beside_which_nothing_decoded_has_no_gap(
    steps: list[tuple[float, float]], applied: tuple[float, float]
) -> None:
    with pytest.raises(ValueError, match="did not decode"):
        pauses(times(*steps, applied=applied), 5, 9.5)


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    found = parse(["step 1.5 2.5\n", "apply 3.0 4.0\n", "step 5.0 6"])
    assert found == EngineTimes([Span(1.5, 2.5)], [Span(3.0, 4.0)])


@given(counts=st.lists(st.integers(1, 10**6), min_size=1), rate=st.floats(1e3, 1e9))
def test_a_link_lets_no_more_pass_than_its_rate_and_burst(counts: list[int], rate: float) -> None:
    bucket, now, burst = ByteBucket(rate, 0.01), 100.0, 0.01
    for count in counts:
        now += bucket.take(count, now)
    assert bucket.passed == sum(counts)
    assert now - 100.0 == pytest.approx(max(0.0, sum(counts) / rate - burst), abs=1e-6)


def test_a_link_that_was_idle_saves_no_more_than_its_burst() -> None:
    bucket = ByteBucket(1000.0, 0.01)
    bucket.take(10, 0.0)
    assert bucket.take(1010, 50.0) == pytest.approx(1.0)


def test_private_memory_is_clean_and_dirty() -> None:
    text = (
        "55-7f ---p 00000000 00:00 0   [rollup]\nRss:  900 kB\nPss: 800 kB\nShared_Clean:  7 kB\n"
        "Private_Clean:  3 kB\nPrivate_Dirty:  5 kB\nPrivate_Hugetlb:  0 kB\n"
    )
    assert parse_rollup(text) == 8 * 1024


@pytest.mark.parametrize("megabytes", [100, 300, 1000])
def test_a_model_is_about_as_large_as_asked(megabytes: int) -> None:
    hidden, layers = shape_of(megabytes)
    assert 4 * (12 * hidden**2 * layers + 4096 * hidden) == pytest.approx(megabytes * 1e6, rel=0.1)


def test_progress_is_corrected_by_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = PartsProgress([("first", 30.0), ("second", 60.0)], lambda: now)
    progress.begin("first")
    assert progress.seconds_left() == 90.0
    now = 90.0
    progress.begin("second")
    assert progress.seconds_left() == 120.0
    now = 1000.0
    assert progress.seconds_left() == 0.0
    assert "2 of 2: second, about 120 s left" in capsys.readouterr().err


def test_parts_come_in_the_order_of_the_plan() -> None:
    progress = PartsProgress([("first", 1.0)], lambda: 0.0)
    with pytest.raises(ValueError, match="first is next"):
        progress.begin("second")


def test_sizes_are_given_by_commas() -> None:
    given = arguments(["--sizes=1,2", "--engine-sizes="])
    assert (given.sizes, given.engine_sizes, given.fleets) == ([1, 2], [], [1, 2, 4])
