"""Decoding of given samples, replayed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from services.drafter.learning.objective import nothing, replay


def _walk(right: np.ndarray) -> tuple[int, list[int], list[int]]:
    """Return the decoding of certain places, step by step: verifications, offered, accepted."""
    depth, count = right.shape
    done = verifications = 0
    offered, accepted = [0] * depth, [0] * depth
    while done < count:
        verifications += 1
        kept = 0
        while kept < min(depth, count - done):
            offered[kept] += 1
            if not right[kept, done + kept]:
                break
            accepted[kept] += 1
            kept += 1
        done += kept + 1
    return verifications, offered, accepted


certain = st.tuples(st.integers(1, 4), st.integers(1, 12)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 1.0]))
)
small = st.tuples(st.integers(1, 2), st.integers(1, 4)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
)


@given(certain)
def test_certain_places_are_the_decoding_itself(right: np.ndarray) -> None:
    found = replay(right)
    verifications, offered, accepted = _walk(right)
    assert found.verifications == verifications
    assert found.offered.tolist() == offered
    assert found.accepted.tolist() == accepted
    assert 1 <= found.acceptance_length <= right.shape[0] + 1


@given(small)
@settings(max_examples=40)
def test_uncertain_places_give_the_expectation(right: np.ndarray) -> None:
    found = replay(right)
    verifications, accepted = 0.0, np.zeros(len(right))
    for outcome in itertools.product((0.0, 1.0), repeat=right.size):
        drawn = np.array(outcome).reshape(right.shape)
        chance = float(np.prod(np.where(drawn == 1.0, right, 1 - right)))
        if chance:
            once, _, kept = _walk(drawn)
            verifications += chance * once
            accepted += chance * np.array(kept)
    assert found.verifications == pytest.approx(verifications)
    assert found.accepted == pytest.approx(accepted)


def test_a_perfect_drafter_and_a_useless_one() -> None:
    assert replay(np.ones((3, 8))).acceptance_length == 4
    assert replay(np.zeros((3, 8))).acceptance_length == 1
    # The draft ends with the response: nothing of the target's own follows.
    assert replay(np.ones((3, 7))).verifications == 2


def test_samples_add_up() -> None:
    both = nothing(2) + replay(np.ones((2, 3))) + replay(np.zeros((2, 2)))
    assert (both.tokens, both.verifications) == (5, 3)
    assert both.by_place == (1 / 3, 1.0)
    assert nothing(2).acceptance_length == 0
