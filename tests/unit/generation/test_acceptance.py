"""Acceptance learned by counting: starts at the prior, ends at what was seen, and forgets."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.generation.drafting.acceptance import AcceptanceTable

counts = st.integers(1, 20).flatmap(lambda tried: st.tuples(st.just(tried), st.integers(0, tried)))


def test_before_anything_is_seen_the_prior_holds() -> None:
    assert list(AcceptanceTable([0.1, 0.5, 0.9]).probabilities) == [0.1, 0.5, 0.9]


@given(st.lists(st.tuples(st.integers(0, 2), counts), max_size=200))
def test_every_probability_is_one_and_an_unseen_bucket_keeps_its_prior(
    seen: list[tuple[int, tuple[int, int]]],
) -> None:
    priors = [0.2, 0.5, 0.8]
    table = AcceptanceTable(priors)
    for bucket, (tried, kept) in seen:
        before = table.probabilities[bucket]
        table.observe(bucket, tried, kept)
        after = table.probabilities[bucket]
        assert 0 < after < 1
        assert (after >= before) if kept == tried else True
        assert (after <= before) if kept == 0 else True
    for bucket in set(range(3)) - {bucket for bucket, _ in seen}:
        assert table.probabilities[bucket] == priors[bucket]


@given(st.floats(0.02, 0.98), st.integers(0, 1000))
def test_with_many_tokens_the_prior_is_forgotten(truth: float, seed: int) -> None:
    random = Random(seed)
    table = AcceptanceTable([0.5])
    for _ in range(3000):
        table.observe(0, 1, int(random.random() < truth))
    assert abs(table.probabilities[0] - truth) < 0.06


def test_what_was_long_ago_weighs_less_than_what_is_now() -> None:
    table = AcceptanceTable([0.5])
    for _ in range(100):
        table.observe(0, 1000, 1000)
    for _ in range(20):
        table.observe(0, 1000, 0)
    assert table.probabilities[0] < 0.1
