"""What is chosen of proposals, against the same written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.speculation.batch_sizes import draft_token_counts
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import best_proposals
from services.generation.speculation.selection.selection import cut, flaw, search, survivals

N, WIDTH = 5, 4
# What is alike to a search: survival within a bucket, and what is less than all buckets but the lowest.
ALIKE, TINY = 0.01, N * WIDTH * 2.0**-12
probabilities = st.sampled_from((0.0, 0.1, 0.5, 0.8, 0.95, 1.0)) | st.floats(0, 1)
one_proposal = st.lists(st.lists(probabilities, min_size=3, max_size=3), min_size=N, max_size=N)
several = st.lists(one_proposal, min_size=1, max_size=3)
rooms = st.lists(st.integers(-1, WIDTH), min_size=N, max_size=N)
COUNTS = draft_token_counts(N, N * WIDTH)
# Seconds of steps with these numbers of draft tokens, never falling.
times = st.lists(st.floats(1e-4, 1e-2), min_size=len(COUNTS), max_size=len(COUNTS)).map(np.cumsum)


def proposals_of(acceptance: list[list[float]]) -> Proposals:
    return Proposals(np.ones((N, 3), np.int32), np.array(acceptance))


def survival_of(made: list[list[list[float]]], room: list[int]) -> np.ndarray:
    return survivals([proposals_of(each) for each in made], np.array(room, np.int64), WIDTH)


@given(several, rooms)
def test_survival_is_the_product_within_the_room(made: list[list[list[float]]], room: list[int]) -> None:
    found = survival_of(made, room)
    for drafter, each in enumerate(made):
        for i in range(N):
            wanted = [float(np.prod(each[i][: j + 1])) if j < min(3, room[i]) else 0.0 for j in range(WIDTH)]
            assert found[drafter, i] == pytest.approx(wanted)


@given(several, rooms, st.floats(0, 1))
def test_the_best_proposal_is_the_one_that_promises_most(
    made: list[list[list[float]]], room: list[int], floor: float
) -> None:
    survival = survival_of(made, room)
    kept = np.where(survival < floor, 0.0, survival)
    picks, lengths, best = best_proposals(survival, floor)
    totals = kept.sum(2)
    assert best.sum(1) == pytest.approx(totals.max(0))
    for i, (pick, length) in enumerate(zip(picks, lengths, strict=True)):
        assert totals[pick, i] == pytest.approx(totals[:, i].max())
        assert length == np.count_nonzero(kept[pick, i])


@settings(deadline=None)
@given(several, rooms, times, st.floats(0, 0.5))
def test_the_best_count_is_found_and_cut_from_the_likeliest_tokens(
    made: list[list[list[float]]], room: list[int], seconds: np.ndarray, price: float
) -> None:
    survival = survival_of(made, room)
    found = search(survival, COUNTS, seconds, price)
    above = np.maximum(survival - price, 0.0).sum(2)
    assert above[found.picks, np.arange(N)] == pytest.approx(above.max(0))
    picked = survival[found.picks, np.arange(N)]
    tokens = np.sort(picked[picked > 0])[::-1]
    by_count = dict(zip(COUNTS.tolist(), seconds.tolist(), strict=True))
    rates = {
        count: (N + tokens[:count].sum()) / time for count, time in by_count.items() if count <= len(tokens)
    }
    best, other = found.best, found.drafted
    assert best.rate == pytest.approx(max(rates.values()), rel=ALIKE)
    assert best.seconds == pytest.approx(by_count[best.tokens])
    assert bool(other.tokens) == (len(rates) > 1)
    for rated in (best, other):
        if not rated.tokens:
            continue
        assert rated.rate == pytest.approx(rates[rated.tokens], rel=ALIKE)
        assert rated.expected == pytest.approx(tokens[: rated.tokens].sum(), rel=ALIKE, abs=TINY)
        chosen = cut(survival, found, rated.tokens)
        assert chosen.lengths.sum() == rated.tokens
        taken = sum(picked[i, :length].sum() for i, length in enumerate(chosen.lengths))
        assert chosen.expected == pytest.approx(taken)
        assert taken == pytest.approx(rated.expected, rel=ALIKE, abs=TINY)


def test_fewer_tokens_than_the_first_count_of_the_grid_are_tried_whole() -> None:
    survival = np.zeros((1, 200, 2))
    survival[0, :3, 0] = 0.9
    counts = draft_token_counts(200, 400)
    assert counts[1] > 3
    # A step takes as long with a few tokens as without.
    found = search(survival, counts, np.ones(len(counts)))
    assert found.best == found.drafted
    assert (found.best.tokens, found.best.expected) == (3, pytest.approx(2.7))
    assert list(cut(survival, found, 3).lengths[:4]) == [1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_tokens_of_any_kind_of_integer_are_checked(dtype: type) -> None:
    right = Proposals(np.array([[1, 9]], dtype), np.ones((1, 2)))
    assert flaw(right, 10) == ""
    assert "vocabulary of 9" in flaw(right, 9)
    if dtype is np.uint64:
        assert "vocabulary" in flaw(Proposals(np.array([[1, 2**64 - 1]], dtype), np.ones((1, 2))), 10)


def test_what_is_no_token_or_no_probability_is_said() -> None:
    tokens = np.zeros((1, 2), np.int32)
    assert "vocabulary" in flaw(Proposals(tokens.astype(float), np.ones((1, 2))), 10)  # type: ignore[arg-type]
    assert "vocabulary" in flaw(Proposals(tokens - 1, np.ones((1, 2))), 10)
    for wrong in (np.nan, -0.1, 1.1):
        assert "probability" in flaw(Proposals(tokens, np.array([[0.5, wrong]])), 10)
    assert "probability" in flaw(Proposals(tokens, tokens), 10)  # type: ignore[arg-type]
    # Of another precision, and not side by side in memory.
    assert flaw(Proposals(tokens, np.ones((2, 1), np.float32).T), 10) == ""  # type: ignore[arg-type]
