"""Replays of known responses, and what divergences cost in them."""

from __future__ import annotations

import pytest

from bench.mismatch.decoding import ReplayedSample, StrictMetrics, Verification, decode
from bench.mismatch.divergences import ANCHOR, as_text, divergences, join
from paceline import SampleKey
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation

REFERENCE = [*range(10, 60)]


def _decoded(response: list[int], reference: list[int]) -> list[Verification]:
    speculation = Speculation([ReferenceDrafter()], FixedLengthPlanner(16), 1000, StrictMetrics())
    context = DraftContext("s", [1, 2], reference)
    speculation.begin(context)
    key = SampleKey("p", 0)
    return decode(speculation, [ReplayedSample(key, context, response)], 100)[key]


def test_a_sample_that_is_its_reference_is_decoded_in_whole_drafts() -> None:
    steps = _decoded(REFERENCE, REFERENCE)
    assert [(step.at, step.accepted) for step in steps] == [(1, 16), (18, 16), (35, 15)]
    assert {step.source for step in steps} == {"reference"}


@pytest.mark.parametrize("length", [1, 2])
def test_a_response_that_ends_at_once_takes_no_step_too_many(length: int) -> None:
    assert len(_decoded(REFERENCE[:length], REFERENCE)) == length - 1


def test_every_token_but_the_first_is_accepted_or_drawn_once() -> None:
    response = [*REFERENCE[:20], 99, *REFERENCE[21:30], 98, 97, *REFERENCE[30:]]
    steps = _decoded(response, REFERENCE)
    places = [place for step in steps for place in range(step.at, step.at + step.accepted + 1)]
    assert [place for place in places if place < len(response)] == list(range(1, len(response)))


def test_a_divergence_ends_where_the_text_is_joined_again() -> None:
    response = [*REFERENCE[:20], 99, 98, *REFERENCE[22:]]
    steps = [
        Verification(1, 16, 16, "own"),
        Verification(18, 16, 2, "own"),
        Verification(21, 0, 0, ""),
        Verification(22, 4, 0, "own"),
        Verification(23, 0, 0, ""),
        Verification(24, 16, 16, "own"),
        Verification(41, 9, 9, "own"),
    ]
    (found,) = divergences(response, steps, [as_text(REFERENCE)])
    # The tokens at 20 and 21 are not the text's. Those at 22 and 23 were, and were drawn: of 28 one may be.
    assert (found.source, found.length, found.drawn, found.lost) == ("own", 2, 1, 2)


def test_a_sample_that_never_joins_has_diverged_once() -> None:
    response = [*REFERENCE[:10], *range(100, 120)]
    steps = [Verification(1, 16, 9, "own"), *(Verification(at, 1, 0, "own") for at in range(11, 30))]
    (found,) = divergences(response, steps, [as_text(REFERENCE)])
    assert (found.length, found.drawn, found.lost) == (None, 19, 0)


def test_no_join_lies_across_two_texts() -> None:
    half = ANCHOR // 2
    texts = [as_text(REFERENCE[:half]), as_text(REFERENCE[half : 2 * half])]
    assert join(as_text(REFERENCE[: 2 * half]), 0, "\U0010ffff".join(texts)) is None
    assert join(as_text([99, *REFERENCE]), 0, as_text(REFERENCE)) == 1
