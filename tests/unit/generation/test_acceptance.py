"""Acceptance learned by counting: begins at the prior, moves all buckets together, ends at what was seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.acceptance import AcceptanceTable

# As of a drafter that sorts by matches in a row, and is sure of long matches.
EDGES = (0, 1, 2, 3, 4, 6, 8, 16)
PRIORS = (0.35, 0.55, 0.7, 0.8, 0.85, 0.92, 0.95, 0.96)
ERROR_RATES = (0.02, 0.15, 0.4, 0.95)

counts = st.integers(1, 20).flatmap(lambda tried: st.tuples(st.just(tried), st.integers(0, tried)))
observations = st.lists(st.tuples(st.integers(0, 2), counts), max_size=60)
some_priors = st.lists(st.floats(0.02, 0.98), min_size=3, max_size=3)


def bucket_of(matched: int) -> int:
    return bisect_right(EDGES, matched) - 1


def stream(wrong: float, tokens: int, random: Random, matched: int = 16) -> Iterator[tuple[int, int]]:
    """(bucket, kept) of each token of a draft of which a share is wrong, wherever it is."""
    for _ in range(tokens):
        kept = random.random() >= wrong
        yield bucket_of(matched), int(kept)
        matched = matched + 1 if kept else 0


def learned(table: AcceptanceTable, seen: Iterator[tuple[int, int]]) -> AcceptanceTable:
    for bucket, kept in seen:
        table.observe(bucket, 1, kept)
    return table


def promised(table: AcceptanceTable, tokens: int = 16, matched: int = 16) -> float:
    """Tokens expected to be kept of a draft."""
    chances = table.probabilities[[bucket_of(matched + place) for place in range(tokens)]]
    return float(np.multiply.accumulate(chances).sum())


def kept_of(wrong: float, tokens: int = 16) -> float:
    return sum((1 - wrong) ** place for place in range(1, tokens + 1))


def observed(priors: Sequence[float], seen: Sequence[tuple[int, tuple[int, int]]]) -> AcceptanceTable:
    table = AcceptanceTable(priors)
    for bucket, (tried, kept) in seen:
        table.observe(bucket, tried, kept)
    return table


def test_before_anything_is_seen_the_prior_holds() -> None:
    assert list(AcceptanceTable([0.1, 0.5, 0.9]).probabilities) == [0.1, 0.5, 0.9]


@pytest.mark.parametrize("prior", [0.0, 1.0, float("nan")])
def test_a_prior_that_nothing_could_move_is_refused(prior: float) -> None:
    with pytest.raises(ValueError, match="prior"):
        AcceptanceTable([0.5, prior])


@given(some_priors, observations)
def test_more_of_the_same_kind_moves_a_bucket_to_it(
    priors: list[float], seen: list[tuple[int, tuple[int, int]]]
) -> None:
    table = AcceptanceTable(priors)
    for bucket, (tried, kept) in seen:
        before = table.probabilities[bucket]
        table.observe(bucket, tried, kept)
        after = table.probabilities
        assert (after > 0).all()
        assert (after < 1).all()
        assert after[bucket] >= before - 1e-6 or kept < tried
        assert after[bucket] <= before + 1e-6 or kept > 0


@given(st.floats(0.02, 0.98), observations, st.integers(1, 20))
def test_buckets_that_are_told_apart_by_nothing_move_together(
    prior: float, seen: list[tuple[int, tuple[int, int]]], tried: int
) -> None:
    table = observed([prior] * 4, seen)
    before = table.probabilities
    table.observe(0, tried, tried)
    better = table.probabilities
    assert (better >= before - 1e-6).all()
    table.observe(1, 2 * tried, 0)
    assert (table.probabilities[2:] <= better[2:] + 1e-6).all()


@given(some_priors, observations, st.randoms(use_true_random=False))
def test_the_order_in_which_tokens_come_does_not_matter(
    priors: list[float], seen: list[tuple[int, tuple[int, int]]], random: Random
) -> None:
    mixed = seen.copy()
    random.shuffle(mixed)
    one, other = observed(priors, seen), AcceptanceTable(priors)
    for bucket, (tried, kept) in mixed:
        other.observe(bucket, tried, kept)
        # Nor does it when it is asked.
        assert len(other.probabilities) == len(priors)
    assert other.probabilities == pytest.approx(one.probabilities, abs=1e-4)


@given(st.floats(0.02, 0.98), st.integers(0, 1000))
def test_with_many_tokens_the_prior_is_forgotten(truth: float, seed: int) -> None:
    random = Random(seed)
    table = AcceptanceTable([0.5, 0.9])
    for _ in range(3000):
        table.observe(0, 1, int(random.random() < truth))
        table.observe(1, 1, int(random.random() < 1 - truth))
    assert table.probabilities == pytest.approx([truth, 1 - truth], abs=0.06)


@pytest.mark.parametrize("wrong", ERROR_RATES)
def test_what_is_promised_is_what_comes_soon_after_the_start(wrong: float) -> None:
    # As many tokens as two steps of 32 samples that decode plainly.
    promises = []
    for seed in range(40):
        random = Random(seed)
        samples = [stream(wrong, 2, random) for _ in range(32)]
        promises.append(promised(learned(AcceptanceTable(PRIORS), (each for one in samples for each in one))))
    assert np.mean(promises) == pytest.approx(kept_of(wrong), rel=0.25, abs=0.15)


@pytest.mark.parametrize("wrong", ERROR_RATES)
def test_predictions_of_a_stream_are_calibrated(wrong: float) -> None:
    random = Random(7)
    table = learned(AcceptanceTable(PRIORS), stream(wrong, 300, random))
    sure: dict[int, list[float]] = {}
    for bucket, kept in stream(wrong, 3000, random):
        sure.setdefault(bucket, []).append(kept - table.probabilities[bucket])
        table.observe(bucket, 1, kept)
    errors = [each for bucket in sure.values() for each in bucket]
    assert abs(np.mean(errors)) < 0.02
    assert all(abs(np.mean(each)) < 0.06 for each in sure.values() if len(each) >= 200)


def test_a_stream_that_is_as_the_priors_say_leaves_them_where_they_are() -> None:
    random = Random(3)
    table = AcceptanceTable(PRIORS)
    for _ in range(150):
        for bucket, prior in enumerate(PRIORS):
            table.observe(bucket, 1, int(random.random() < prior))
    assert table.probabilities == pytest.approx(PRIORS, abs=0.08)


def test_where_a_match_says_nothing_buckets_that_were_never_seen_do_not_promise_more() -> None:
    table = AcceptanceTable(PRIORS)
    for bucket in range(4):
        table.observe(bucket, 60, 36)
    assert table.probabilities[4:].max() < 0.75


def surprise(table: AcceptanceTable, seen: Iterator[tuple[int, int]]) -> float:
    """Mean negative log-likelihood of tokens, each predicted from those before it."""
    losses = []
    for bucket, kept in seen:
        chance = table.probabilities[bucket]
        losses.append(-np.log(chance if kept else 1 - chance))
        table.observe(bucket, 1, kept)
    return float(np.mean(losses))


@pytest.mark.parametrize(("before", "after"), [(0.02, 0.4), (0.4, 0.02), (0.95, 0.15)])
def test_a_change_of_policy_is_learned_and_sooner_when_it_is_known(before: float, after: float) -> None:
    tables = [learned(AcceptanceTable(PRIORS), stream(before, 4000, Random(1))) for _ in range(2)]
    tables[1].fade(0.2)
    unaware, aware = (surprise(each, stream(after, 500, Random(2), 0)) for each in tables)
    assert aware < unaware
    for table in tables:
        learned(table, stream(after, 40_000, Random(3), 0))
        assert promised(table, matched=0) == pytest.approx(kept_of(after), rel=0.2)


def test_a_bucket_that_is_not_seen_any_more_goes_with_the_others() -> None:
    table = AcceptanceTable(PRIORS)
    table.observe(len(PRIORS) - 1, 300, 300)
    assert learned(table, stream(0.6, 200_000, Random(5), 0)).probabilities[-1] < 0.6


@given(some_priors, observations)
def test_what_is_forgotten_whole_is_the_prior_again(
    priors: list[float], seen: list[tuple[int, tuple[int, int]]]
) -> None:
    table = observed(priors, seen)
    assert len(table.probabilities) == len(priors)
    table.fade(0.0)
    assert table.probabilities == pytest.approx(priors, abs=1e-4)


def test_what_was_long_ago_weighs_less_than_what_is_now() -> None:
    table = AcceptanceTable([0.5])
    for _ in range(100):
        table.observe(0, 1000, 1000)
    for _ in range(20):
        table.observe(0, 1000, 0)
    assert table.probabilities[0] < 0.1
