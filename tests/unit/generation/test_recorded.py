"""Drafts verified by what is on record of them: p_then by context, and the rule over the rows of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.coupled_sampler.noise import Purpose, uniform
from kernels.coupled_sampler.sample import sample
from services.generation.engine.sampling.inputs import (
    CONTEXT,
    BatchSettings,
    DraftsOfRow,
    RecordedDrafts,
    RecordedTokens,
    SampleSettings,
)
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.sampling.sampler import proposals_of
from services.generation.engine.types import Verifier

PROMPT = [7, 8, 9]
TOKENS = st.lists(st.integers(0, 20), min_size=1, max_size=30)
COUNT = 20_000


def record(*rollouts: tuple[list[int], list[float]], prompt: list[int] = PROMPT) -> RecordedTokens:
    return RecordedTokens.of(prompt, rollouts)


@given(TOKENS, st.integers(0, 29), st.integers(1, 10))
def test_tokens_of_a_rollout_are_found_by_what_is_before_them(
    tokens: list[int], begin: int, count: int
) -> None:
    # Each token has a context of its own: with 4 known ones before it, by the numbers between.
    spread = [31 * i + token for i, token in enumerate(tokens)]
    logprobs = [-float(i) for i in range(len(tokens))]
    begin = min(begin, len(tokens) - 1)
    found = record((spread, logprobs)).find((PROMPT + spread)[: len(PROMPT) + begin], spread[begin:][:count])
    assert found.tolist() == logprobs[begin : begin + count]


def test_another_context_or_another_token_is_not_known() -> None:
    known = record(([1, 2, 3], [-0.1, -0.2, -0.3]))
    assert np.isnan(known.find(PROMPT, [2])).all()
    assert np.isnan(known.find([7, 8, 8], [1])).all()
    assert np.isnan(known.find([], [1])).all()
    # What follows a token that no rollout has is not known before its context is one that a rollout has.
    assert np.isnan(known.find(PROMPT, [1, 5, 3])).tolist() == [False, True, True]
    assert np.isnan(record().find(PROMPT, [1])).all()


def test_of_equal_contexts_the_last_rollout_counts() -> None:
    known = record(([1, 2], [-0.5, -0.5]), ([1, 3], [-0.25, -0.75]))
    assert known.find(PROMPT, [1, 2]).tolist() == [-0.25, -0.5]


def test_a_short_prompt_is_a_context_too() -> None:
    assert CONTEXT > 1
    known = record(([1, 2], [-0.5, -0.25]), prompt=[4])
    assert known.find([4], [1, 2]).tolist() == [-0.5, -0.25]


def _verify(
    now: float, known: RecordedTokens, lenience: float, temperature: float = 1.0, raw: bool = True
) -> float:
    """Return the share of samples that accept token 0, which the policy gives probability `now`."""
    logits = torch.full((2 * COUNT, 3), math.log((1 - now) / 2))
    logits[:, 0] = math.log(now)
    rows = Rows(2 * np.arange(COUNT + 1), np.zeros(COUNT, np.int64), np.zeros(COUNT, np.int64))
    batch = BatchSettings.of(
        [
            SampleSettings(seed, verifier=Verifier.REJECTION, processed_logprobs=not raw)
            for seed in range(COUNT)
        ]
    )
    row = DraftsOfRow(RecordedDrafts(known, lenience), np.array(PROMPT))
    found = sample(
        logits,
        torch.arange(COUNT),
        torch.from_numpy(rows.positions),
        torch.full((COUNT,), temperature),
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        proposals=proposals_of(rows, batch, {}, dict.fromkeys(range(COUNT), row)),
    )
    tokens, counts = found.tokens.numpy()[rows.cu[:-1]], found.counts.numpy()
    # A token that is not accepted is not drawn again.
    assert ((tokens == 0) == (counts == 2)).all()
    return float((counts == 2).mean())


@pytest.mark.parametrize(
    ("now", "then", "lenience", "share"),
    [
        (0.3, 0.6, 1.0, 0.5),
        (0.3, 0.2, 1.0, 1.0),
        (0.3, 0.6, 1.5, 0.75),
        (0.3, 0.6, 2.0, 1.0),
        (0.3, None, 1.0, 0.3),
        (0.3, None, 2.0, 0.3),
    ],
)
def test_a_draft_is_accepted_with_the_ratio_and_as_a_certainty_where_nothing_is_known(
    now: float, then: float | None, lenience: float, share: float
) -> None:
    known = record() if then is None else record(([0], [math.log(then)]))
    assert _verify(now, known, lenience) == pytest.approx(share, abs=4 * math.sqrt(0.25 / COUNT))


def test_the_ratio_is_of_the_distribution_that_log_probabilities_are_of() -> None:
    known = record(([0], [math.log(0.6)]))
    tolerance = 4 * math.sqrt(0.25 / COUNT)
    assert _verify(0.3, known, 1.0, temperature=0.5) == pytest.approx(0.5, abs=tolerance)
    squared = 0.3**2 / (0.3**2 + 2 * 0.35**2)
    found = _verify(0.3, known, 1.0, temperature=0.5, raw=False)
    assert found == pytest.approx(squared / 0.6, abs=tolerance)


def test_bounds_are_the_rule_of_one_position() -> None:
    known = record(([1, 2, 3], [-0.1, -2.0, -0.3]))
    u = np.array([uniform(5, place, Purpose.REJECTION) for place in range(3)])
    bounds = DraftsOfRow(RecordedDrafts(known, 1.25), np.array(PROMPT)).bounds(np.array([1, 2, 9]), u)
    assert bounds[:2] == pytest.approx(u[:2] * np.exp([-0.1, -2.0]) / 1.25)
    assert np.isnan(bounds[2])
