"""For whom the draft model is run and how deep: by the model's own account never worse than without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import Proposal, Proposals
from services.generation.speculation.plan import DraftableBatch, DraftLengths, choose_lengths
from tests.support.step_times import KnownStepTime

# A step of 10 ms whose rows are free up to about a hundred, and a draft step of 3 ms.
_STEP: Any = KnownStepTime(weights=1e-2, row=1e-4, per_row=1e-5)
_DRAFT: Any = KnownStepTime(weights=3e-3, row=1e-4, per_row=1e-5)
_PROBABILITY = st.floats(0, 1, allow_nan=False)


def _batch(room: list[int], expected: float = 0.0, rows: float = 0.0) -> DraftableBatch:
    n = len(room)
    return DraftableBatch(np.array(room, np.int64), np.full(n, rows), np.full(n, expected), 100 * n)


def _rate(
    batch: DraftableBatch, lengths: DraftLengths, acceptance: list[float], step: Any, draft: Any
) -> float:
    """Tokens a second, worked out sample by sample."""
    n = len(batch.room)
    tokens, rows, drafted = float(n), float(n), 0
    for i, length in enumerate(lengths.tokens.tolist()):
        if not length:
            tokens, rows = tokens + batch.expected[i], rows + batch.rows[i]
            continue
        survival = np.multiply.accumulate(acceptance[:length])
        tokens, rows, drafted = tokens + survival.sum(), rows + length, drafted + 1
    seconds = float(step.seconds(n, rows, batch.context))
    depth = int(lengths.tokens.max(initial=0))
    if drafted:
        seconds += depth * float(draft.seconds(drafted, drafted, batch.context * drafted / n))
    return tokens / seconds


@given(
    st.lists(st.integers(-1, 20), min_size=1, max_size=12),
    st.lists(_PROBABILITY, min_size=1, max_size=8),
    st.floats(0, 3),
    st.floats(1e-4, 10),
)
def test_what_is_chosen_is_promised_and_better_than_without(
    room: list[int], acceptance: list[float], expected: float, slowness: float
) -> None:
    batch = _batch(room, expected, np.ceil(expected))
    draft = replace(_DRAFT, weights=3e-3 * slowness)
    chosen = choose_lengths(batch, acceptance, _STEP, draft)
    assert (chosen.tokens >= 0).all()
    assert (chosen.tokens <= np.maximum(batch.room, 0)).all()
    assert chosen.tokens.max() <= len(acceptance)
    nothing = DraftLengths(np.zeros(len(room), np.int64))
    without = max(
        _rate(batch, nothing, acceptance, _STEP, draft),
        len(room) / float(_STEP.seconds(len(room), len(room), batch.context)),
    )
    if chosen.tokens.any():
        assert chosen.gain > 1
        # Samples without room count as drafted for in the search, never to its advantage.
        assert (
            _rate(batch, chosen, acceptance, _STEP, draft) >= without * chosen.gain * (1 - 1e-9)
            or (batch.room <= 0).any()
        )
        assert _rate(batch, chosen, acceptance, _STEP, draft) > without * (1 - 1e-9)
    else:
        assert chosen.gain == 1


@given(st.integers(1, 16), st.floats(0.3, 0.99), st.integers(1, 10))
def test_one_depth_for_all_is_the_best_depth_there_is(n: int, kept: float, most: int) -> None:
    batch, acceptance = _batch([99] * n), [kept] * most
    chosen = choose_lengths(batch, acceptance, _STEP, _DRAFT)
    rates = [
        _rate(batch, DraftLengths(np.full(n, depth)), acceptance, _STEP, _DRAFT) for depth in range(most + 1)
    ]
    # Step times between the numbers of rows that are looked at are interpolated.
    assert _rate(batch, chosen, acceptance, _STEP, _DRAFT) >= max(rates) * 0.99


@given(st.lists(_PROBABILITY, min_size=1, max_size=8), st.floats(0, 1))
def test_a_better_drafter_promises_no_less(acceptance: list[float], more: float) -> None:
    batch = _batch([5] * 4)
    better = [a + (1 - a) * more for a in acceptance]
    gains = [choose_lengths(batch, each, _STEP, _DRAFT).gain for each in (acceptance, better)]
    assert gains[1] >= gains[0] * (1 - 1e-12)


def test_a_drafter_that_costs_a_step_a_token_is_not_run() -> None:
    chosen = choose_lengths(_batch([8] * 4), [1.0] * 8, _STEP, _STEP)
    assert not chosen.tokens.any()


def test_a_cheap_and_sure_drafter_is_run_to_the_end_for_all() -> None:
    free = replace(_DRAFT, weights=1e-9, row=1e-12)
    chosen = choose_lengths(_batch([8, 3, 8, 0]), [1.0] * 8, _STEP, free)
    assert chosen.tokens.tolist() == [8, 3, 8, 0]


def test_samples_with_good_proposals_are_left_to_them() -> None:
    batch = DraftableBatch(np.full(4, 8), np.array([8.0, 0, 8, 0]), np.array([7.9, 0, 7.9, 0]), 400)
    # At 3 ms a draft step the two others are not worth it: all wait for them.
    assert not choose_lengths(batch, [0.9] * 8, _STEP, _DRAFT).tokens.any()
    cheap = replace(_DRAFT, weights=3e-4)
    chosen = choose_lengths(batch, [0.9] * 8, _STEP, cheap)
    assert chosen.tokens[[0, 2]].tolist() == [0, 0]
    assert (chosen.tokens[[1, 3]] > 0).all()


def test_a_gain_below_the_margin_is_not_worth_it() -> None:
    batch, acceptance = _batch([8] * 2), [0.9] * 8
    gain = choose_lengths(batch, acceptance, _STEP, _DRAFT).gain
    assert gain > 1.2
    assert choose_lengths(batch, acceptance, _STEP, _DRAFT, margin=gain - 1 - 1e-6).tokens.any()
    assert not choose_lengths(batch, acceptance, _STEP, _DRAFT, margin=gain - 1 + 1e-6).tokens.any()


def test_nothing_is_chosen_of_nothing() -> None:
    assert len(choose_lengths(_batch([]), [0.9], _STEP, _DRAFT).tokens) == 0
    assert not choose_lengths(_batch([4]), [], _STEP, _DRAFT).tokens.any()
    assert not choose_lengths(_batch([0, -1]), [0.9], _STEP, _DRAFT).tokens.any()


def test_proposals_stand_for_the_tokens_that_are_worth_a_row() -> None:
    samples = [EngineSampleState(f"s{i}", [1], [], room, 1) for i, room in enumerate((9, 9, 1))]
    weak = Proposals.of([Proposal([5], [0.3]), None, Proposal([5, 6], [0.9, 0.9])])
    strong = Proposals.of([Proposal([7, 8, 9], [0.8, 0.5, 0.2]), None, None])
    # One more verified token takes a quarter of a step.
    dear: Any = KnownStepTime(weights=1e-3, row=1e-9, per_row=0.25e-3 / 3)
    batch = DraftableBatch.of(samples, [weak, strong], 8, 5, dear)
    assert batch.rows.tolist() == [2, 0, 1]
    assert np.allclose(batch.expected, [0.8 + 0.4, 0, 0.9])
    assert (batch.room.tolist(), batch.context) == ([5, 5, 1], 3)
    none = DraftableBatch.of(samples, [], 8, 5, dear)
    assert [none.rows.tolist(), none.expected.tolist()] == [[0, 0, 0]] * 2
