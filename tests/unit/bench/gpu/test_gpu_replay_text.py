"""Texts of a replay: their parts repeat, and references leave them, as often as is asked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.sizes import TextDrift, TextRepeats, reference_of, text_of

LENGTH, VOCABULARY = 20_000, 151_936


def seen_before(text: list[int], size: int) -> float:
    """Return the share of tokens that end a run of `size` tokens that occurs earlier in the text."""
    known, found = set[tuple[int, ...]](), 0
    for end in range(size, len(text) + 1):
        run = tuple(text[end - size : end])
        found += run in known
        known.add(run)
    return found / len(text)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_a_share_of_the_text_is_copied_from_earlier_in_it(share: float) -> None:
    text = text_of(LENGTH, VOCABULARY, TextRepeats(share, 24.0), seed=1)
    # A copy is known from its second token on; fresh tokens of so large a vocabulary hardly ever are.
    assert seen_before(text, 2) == pytest.approx(share * 23 / 24, abs=0.05)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(5, 1000), st.integers(0, 5))
def test_a_longer_text_begins_with_a_shorter_one(short: int, more: int, vocabulary: int, seed: int) -> None:
    repeats = TextRepeats(0.4, 6.0)
    text = text_of(short, vocabulary, repeats, seed)
    assert len(text) == short
    assert text_of(short + more, vocabulary, repeats, seed)[:short] == text
    assert all(3 <= token < vocabulary for token in text)


@pytest.mark.parametrize("drift", [TextDrift(33.0, 4.0), TextDrift(10.0, 1.0)])
def test_a_reference_leaves_the_text_and_comes_back(drift: TextDrift) -> None:
    text = text_of(LENGTH, VOCABULARY, TextRepeats(), seed=1)
    reference = reference_of(text, VOCABULARY, drift, seed=7)
    away = [own != other for own, other in zip(text, reference, strict=True)]
    assert sum(away) / LENGTH == pytest.approx(drift.away / (drift.every + drift.away), rel=0.15)
    leaves = sum(not before and now for before, now in pairwise(away))
    assert LENGTH / leaves == pytest.approx(drift.every + drift.away, rel=0.15)
    assert reference != reference_of(text, VOCABULARY, drift, seed=8)


@given(st.lists(st.integers(3, 6), max_size=50), st.integers(0, 5))
def test_a_reference_is_of_the_vocabulary_and_as_long_as_the_text(text: list[int], seed: int) -> None:
    reference = reference_of(text, 7, TextDrift(2.0, 2.0), seed)
    assert len(reference) == len(text)
    assert all(3 <= token < 7 for token in reference)
