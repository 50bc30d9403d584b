"""What is chosen of proposals, against the same written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import best_proposals
from services.generation.speculation.selection import cut, draft_token_counts, search, survivals, well_served

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


@given(several | st.just([]), rooms)
def test_a_sample_is_well_served_if_one_proposal_lasts_for_most_of_what_it_can_verify(
    made: list[list[list[float]]], room: list[int]
) -> None:
    found = well_served([proposals_of(each) for each in made], np.array(room, np.int64), WIDTH)
    for i in range(N):
        usable = min(room[i], WIDTH)
        expected = [float(np.cumprod(each[i])[: max(room[i], 0)].sum()) for each in made]
        best, wanted = max(expected, default=0.0), 0.8 * usable
        assert found[i] == (best >= wanted) or best == pytest.approx(wanted)


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
    rates.pop(0)
    assert bool(found.tokens) == bool(rates)
    if not rates:
        return
    assert found.rate == pytest.approx(max(rates.values()), rel=ALIKE)
    assert found.rate == pytest.approx(rates[found.tokens], rel=ALIKE)
    assert found.seconds == pytest.approx(by_count[found.tokens])
    assert found.expected == pytest.approx(tokens[: found.tokens].sum(), rel=ALIKE, abs=TINY)
    lengths, expected = cut(survival, found)
    assert lengths.sum() == found.tokens
    taken = sum(picked[i, :length].sum() for i, length in enumerate(lengths))
    assert expected == pytest.approx(taken)
    assert taken == pytest.approx(found.expected, rel=ALIKE, abs=TINY)


def test_fewer_tokens_than_the_first_count_of_the_grid_are_tried_whole() -> None:
    survival = np.zeros((1, 200, 2))
    survival[0, :3, 0] = 0.9
    counts = draft_token_counts(200, 400)
    assert counts[1] > 3
    # A step takes as long with a few tokens as without.
    found = search(survival, counts, np.ones(len(counts)))
    assert (found.tokens, found.expected) == (3, pytest.approx(2.7))
    assert list(cut(survival, found)[0][:4]) == [1, 1, 1, 0]
