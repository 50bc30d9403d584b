"""Tokens that differ between two samplings of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from examples.tinymath.plainly import PlainComparison, differing
from tests.unit.bench.steps import sample

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(tokens, tokens)
def test_all_tokens_from_the_first_that_is_another_differ(ours: list[int], plain: list[int]) -> None:
    common = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
    expected = max(len(ours), len(plain)) - (min(len(ours), len(plain)) if common is None else common)
    assert differing([sample(0, ours)], [sample(0, plain)]) == expected
    assert (differing([sample(0, ours)], [sample(0, plain)]) == 0) == (ours == plain)


def test_samples_are_compared_by_prompt_and_slot() -> None:
    ours = [sample(0, [1, 2]), sample(1, [3])]
    assert differing(ours, ours[::-1]) == 0
    assert differing(ours, [ours[0], replace(ours[1], token_ids=np.array([4, 5]))]) == 2


def test_the_line_says_how_much_longer_plain_decoding_takes() -> None:
    line = str(PlainComparison(2.0, 5.0, 100, 0))
    assert "5.00 s, 2.50 times as long as 2.00 s; 0 of 100 tokens differ" in line
