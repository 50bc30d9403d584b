"""What is published, what is taken back, and what neither."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.config import DrafterConfig
from services.drafter.process import Overlap
from services.drafter.publishing.decisions import (
    Canary,
    CanaryStatus,
    GateVerdict,
    LiveAcceptance,
    gate_verdict,
    is_refused,
)

CONFIG = DrafterConfig(
    model=Path("model"),
    folder=Path("folder"),
    publish_margin=0.02,
    publish_first=1.2,
    publish_samples=8,
    publish_cooldown=2,
)
lengths = st.floats(1, 8)


@pytest.mark.parametrize(
    ("candidate", "current", "rollouts", "since", "verdict"),
    [
        (2.0, 1.9, 8, None, GateVerdict.PUBLISH),
        (1.93, 1.9, 8, None, GateVerdict.REJECT),
        (2.0, 1.9, 7, None, GateVerdict.WAIT),
        (2.0, 1.9, 8, 2, GateVerdict.WAIT),
        (2.0, 1.9, 8, 3, GateVerdict.PUBLISH),
        (1.3, None, 8, None, GateVerdict.PUBLISH),
        (1.1, None, 8, None, GateVerdict.REJECT),
        (nan, 1.9, 8, None, GateVerdict.REJECT),
        (nan, None, 8, None, GateVerdict.REJECT),
        (2.0, nan, 8, None, GateVerdict.REJECT),
    ],
)
def test_verdicts(
    candidate: float, current: float | None, rollouts: int, since: int | None, verdict: GateVerdict
) -> None:
    judgement = gate_verdict(candidate, current, rollouts, since, CONFIG)
    assert judgement.verdict is verdict
    assert judgement.reason


@given(lengths, lengths)
def test_of_two_drafters_at_most_one_is_published_in_place_of_the_other(one: float, other: float) -> None:
    first, second = gate_verdict(one, other, 8, None, CONFIG), gate_verdict(other, one, 8, None, CONFIG)
    assert not (first.verdict is second.verdict is GateVerdict.PUBLISH)
    assert (first.verdict is GateVerdict.PUBLISH) == (one >= other * 1.02)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_checkpoint_is_refused_by_those_who_read_it(loaded: int, refused: int, pending: int) -> None:
    assert is_refused(loaded, refused, pending) == (refused > 0 and refused >= loaded + pending)


def live(drafts: int, length: int, rate: float) -> LiveAcceptance:
    return LiveAcceptance(drafts, drafts * length, round(drafts * length * rate))


def test_a_collapse_is_certain_before_it_is_said() -> None:
    canary = Canary(2, live(1000, 4, 0.7), since=0.0, config=CONFIG)
    assert canary.observe(live(5, 4, 0.0), 1)[0] is CanaryStatus.WATCHING, "too few"
    assert canary.observe(live(25, 4, 0.38), 1)[0] is CanaryStatus.WATCHING, "that may be chance"
    assert canary.observe(live(25, 4, 0.05), 1)[0] is CanaryStatus.COLLAPSED
    assert canary.observe(live(500, 4, 0.3), 1)[0] is CanaryStatus.COLLAPSED
    assert canary.observe(live(500, 4, 0.5), 1)[0] is CanaryStatus.WATCHING


def test_longer_drafts_of_a_better_drafter_are_no_collapse() -> None:
    canary = Canary(2, live(1000, 2, 0.9), since=0.0, config=CONFIG)
    better = live(1000, 8, 0.45)
    assert better.acceptance_length > live(1000, 2, 0.9).acceptance_length
    assert canary.observe(better, 1)[0] is not CanaryStatus.COLLAPSED


def test_the_canary_ends() -> None:
    config = CONFIG.model_copy(update={"canary_tokens": 1000, "canary_seconds": 60.0})
    canary = Canary(2, live(1000, 4, 0.7), since=100.0, config=config)
    assert canary.observe(live(100, 4, 0.7), 159)[0] is CanaryStatus.WATCHING
    assert canary.observe(live(250, 4, 0.7), 101)[0] is CanaryStatus.PASSED
    assert canary.observe(LiveAcceptance(), 160)[0] is CanaryStatus.PASSED


def test_with_nothing_to_compare_with_only_an_utter_failure_is_one() -> None:
    canary = Canary(1, LiveAcceptance(), since=0.0, config=CONFIG)
    assert canary.observe(live(1000, 4, 0.05), 1)[0] is not CanaryStatus.COLLAPSED
    assert canary.observe(live(1000, 4, 0.001), 1)[0] is CanaryStatus.COLLAPSED


@given(st.integers(1, 5000), st.integers(1, 8), st.floats(0, 1))
def test_no_drafter_collapses_that_does_as_the_one_before(drafts: int, length: int, rate: float) -> None:
    it = live(drafts, length, rate)
    said, _ = Canary(2, it, 0.0, CONFIG).observe(it, 1)
    assert said is not CanaryStatus.COLLAPSED or it.rate < 0.02


@given(st.integers(0, 500), st.integers(1, 8), st.floats(0, 1))
def test_the_interval_holds_the_rate(drafts: int, length: int, rate: float) -> None:
    it = live(drafts, length, rate)
    assert it.rate <= it.highest_rate + 1e-12
    assert it.highest_rate <= 1


def test_live_figures_add_up() -> None:
    assert live(10, 4, 0.5) + LiveAcceptance(1, 4, 4) == LiveAcceptance(11, 44, 24)
    assert LiveAcceptance().acceptance_length == 1.0


def test_a_second_is_hidden_when_something_else_was_under_way() -> None:
    overlap = Overlap(gap=10)
    assert overlap.share == 1
    overlap.note(2, training=True, busy=True)
    assert (overlap.hidden, overlap.not_hidden) == (2, 0)
    # Between two steps: the trainer's time, which is known when the next one begins.
    overlap.note(3, training=True, busy=False)
    assert overlap.hidden == 2
    overlap.note(1, training=False, busy=True)
    assert (overlap.hidden, overlap.not_hidden) == (5, 0)
    # After the last step nothing comes any more.
    overlap.note(4, training=True, busy=False)
    overlap.note(7, training=False, busy=False)
    assert (overlap.hidden, overlap.not_hidden) == (5, 4)
    overlap.note(2, training=True, busy=False)
    assert overlap.not_hidden == 6


@given(st.lists(st.tuples(st.floats(0, 20), st.booleans(), st.booleans()), max_size=30))
def test_no_second_of_training_is_lost_or_counted_twice(notes: list[tuple[float, bool, bool]]) -> None:
    overlap = Overlap(gap=10)
    for seconds, training, busy in notes:
        overlap.note(seconds, training=training, busy=busy)
    overlap.note(inf, training=False, busy=False)
    total = sum(seconds for seconds, training, _ in notes if training)
    assert overlap.hidden + overlap.not_hidden == pytest.approx(total)
