"""The benchmark's columns follow from the samples' provenance and the fleet's counters."""

from __future__ import annotations

import pytest

from bench import columns
from bench.scrape import Metrics
from paceline import DraftSource
from tests.unit.bench.steps import sample, span, step


def test_decode_steps_and_lengths_are_means_over_steps_of_a_steps_figure() -> None:
    one = step(sample(0, [1] * 10, decode_steps=10), sample(1, [1] * 30, decode_steps=6))
    two = step(sample(0, [1] * 20, decode_steps=4), sample(1, [1] * 20, decode_steps=2))
    found = columns.columns([one, two])
    assert (found["decode_steps_mean"], found["decode_steps_max"]) == ((8 + 3) / 2, (10 + 4) / 2)
    assert (found["response_length_mean"], found["response_length_max"]) == (20, (30 + 20) / 2)
    assert found["steps_per_token"] == 22 / 80
    assert found["step_seconds"] == 6.5


def test_speculation_is_told_of_all_drafts_together() -> None:
    first = sample(
        0,
        [1] * 9,
        drafted=8,
        accepted=6,
        verify_steps=2,
        draft_sources=(DraftSource("pregenerated", 4, 4), DraftSource("suffix", 4, 2)),
    )
    second = sample(
        1, [1], drafted=4, accepted=0, verify_steps=1, draft_sources=(DraftSource("suffix", 4, 0),)
    )
    found = columns.columns([step(first, second)])
    assert (found["acceptance_length"], found["draft_length"]) == (3.0, 4.0)
    assert found["acceptance_rate"] == 0.5
    assert found["drafters"] == {
        "pregenerated": {"drafted": 4, "acceptance_rate": 1.0},
        "suffix": {"drafted": 8, "acceptance_rate": 0.25},
    }


def test_without_drafts_there_is_no_rate() -> None:
    found = columns.columns([step(sample(0, [1], decode_steps=1))])
    assert found["acceptance_rate"] is None
    assert found["acceptance_length"] is None
    assert found["draft_length_mean"] is None


def test_a_bubble_is_the_time_that_an_instance_waits_for_the_last_one() -> None:
    early = sample(0, [1], instance_spans=span("a", 10.0, 11.0))
    late = sample(1, [1], instance_spans=span("b", 10.0, 14.0))
    found = columns.columns([step(early, late)])
    assert (found["bubble_seconds_mean"], found["bubble_seconds_max"]) == (1.5, 3.0)


def test_coverage_is_what_there_was_over_what_was_needed() -> None:
    counted = {
        name: Metrics(
            {
                columns.PREGENERATED_TOKENS: 40.0,
                "paceline_generation_halt_delay_seconds_sum": 0.4,
                "paceline_generation_halt_delay_seconds_count": 2.0,
            }
        )
        for name in ("a", "b")
    }
    samples = sample(0, [1] * 60, cached_tokens=30, reused_prefix=20), sample(1, [1] * 40)
    found = columns.columns([step(*samples, covered=(30, 20), metrics=counted)])
    assert found["coverage"] == 0.5
    assert found["reused_share"] == 0.2
    assert (found["draft_length_mean"], found["draft_length_max"]) == (25, 30)
    assert found["pregenerated_tokens"] == 80.0
    assert found["halt_delay_seconds"] == pytest.approx(0.2)
    assert found["yield_seconds"] is None


def test_a_reduction_compares_step_by_step() -> None:
    plain = [step(sample(0, [1] * n, decode_steps=n)) for n in (10, 100, 20)]
    other = [step(sample(0, [1] * n, decode_steps=d)) for n, d in ((10, 5), (100, 10), (20, 20))]
    assert columns.reduction(plain, other, columns.mean_decode_steps) == 0.5
