"""The adaptive draft length: what acceptance it follows, and where it stays."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.knobs import Knobs, LadderKnobs
from services.contracts.modes import PlanReason
from services.generation.engine.types import EngineSampleState
from services.generation.experiments.modes import AdaptiveMode
from services.generation.speculation.drafter import Proposal, Proposals
from tests.support.step_times import KnownStepTime

LENGTHS = (1, 2, 4, 6, 8, 12, 16)
rungs = st.lists(st.integers(1, 40), min_size=1, max_size=8, unique=True).map(sorted).map(tuple)


def _mode(lengths: tuple[int, ...] = LENGTHS, cap: int = 16) -> AdaptiveMode:
    known: Any = KnownStepTime()
    return AdaptiveMode(known, Knobs(draft_cap=cap, ladder=LadderKnobs(lengths=lengths)))


def _decide(mode: AdaptiveMode, n: int = 1, tokens: int = 64) -> list[int]:
    """Return the draft lengths of n samples to each of which so many tokens are proposed."""
    samples = [EngineSampleState(f"s{i}", [1] * 10, [], 100, 10) for i in range(n)]
    proposals = Proposals.of([Proposal([7] * tokens, [0.9] * tokens)] * n)
    return [len(each) for each in mode.choose(samples, {"reference": proposals}).tokens.values()]


@given(rungs, st.integers(1, 40), st.lists(st.floats(0, 1), max_size=200), st.integers(0, 2))
def test_only_given_lengths_up_to_the_cap_are_drafted_and_they_move_one_at_a_time(
    lengths: tuple[int, ...], cap: int, shares: list[float], late: int
) -> None:
    mode, allowed = _mode(lengths, cap), [each for each in lengths if each <= cap] or [cap]
    due, before = deque[tuple[int, int]](), _decide(mode)[0]
    for share in shares:
        (length,) = _decide(mode)
        assert length in allowed
        assert abs(allowed.index(length) - allowed.index(before)) <= 1
        assert (mode.last.reason, mode.last.tokens) == (PlanReason.ADAPTIVE, length)
        before = length
        due.append((length, round(share * length)))
        if len(due) > late:
            mode.verified(*due.popleft())


@pytest.mark.parametrize(("accepted", "last"), [(1.0, 16), (0.0, 1)])
@pytest.mark.parametrize("batch", [1, 256])
def test_full_acceptance_leads_to_the_longest_and_early_mismatches_to_the_shortest(
    accepted: float, last: int, batch: int
) -> None:
    mode = _mode()
    assert _decide(mode, batch) == [4] * batch
    for _ in range(256 // min(batch, 32) + 8):
        for length in _decide(mode, batch):
            mode.verified(length, int(accepted * length))
    assert _decide(mode, batch) == [last] * batch


@given(st.floats(0, 0.999), rungs)
def test_a_length_that_acceptance_leads_to_is_kept(acceptance: float, lengths: tuple[int, ...]) -> None:
    mode, seen = _mode(lengths, 40), []
    for _ in range(2 * len(lengths) + 2):
        seen.append(mode.length(1, 10))
        # Of the drafts the shares that are accepted at this acceptance of a token.
        for i in range(32):
            length, accepted = mode.length(1, 10), 0
            while accepted < length and acceptance ** (accepted + 1) * 32 >= i + 1:
                accepted += 1
            mode.verified(length, accepted)
    moves = [b - a for a, b in pairwise(seen) if a != b]
    assert all(each > 0 for each in moves) or all(each < 0 for each in moves)
    assert seen[-1] == seen[len(lengths)], "it came to rest"


def test_drafts_that_end_early_for_lack_of_tokens_say_nothing() -> None:
    mode = _mode()
    for _ in range(200):
        assert _decide(mode, tokens=3) == [3]
        mode.verified(3, 0)
    assert _decide(mode) == [4]
