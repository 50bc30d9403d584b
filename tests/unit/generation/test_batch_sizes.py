"""Numbers of rows that steps may have."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.selection import draft_token_counts

SIZES = st.integers(1, 256), st.integers(0, 4096)


@given(*SIZES)
def test_counts_rise_from_nothing_to_at_most_what_there_is(requests: int, most: int) -> None:
    counts = draft_token_counts(requests, most)
    assert counts[0] == 0
    assert (np.diff(counts) > 0).all()
    assert counts[-1] <= most
    assert len(counts) > 1 or most == 0


@given(*SIZES)
def test_at_most_a_seventeenth_of_the_rows_is_given_up(requests: int, most: int) -> None:
    assert (requests + draft_token_counts(requests, most)[-1]) * (1 + 1 / 16) >= requests + most


def test_few_numbers_come_again_and_again() -> None:
    seen = {
        requests + count
        for requests in range(1, 129)
        for count in draft_token_counts(requests, 16 * requests)[1:]
    }
    assert seen >= set(range(2, 33))
    # Up to 16, seven octaves, and the 17 rows of each of 128 samples.
    assert len(seen) == 15 + 16 * 7 + 1


@given(st.integers(0, 5000))
def test_the_grid_up_to_a_number_is_what_one_sample_may_have(most: int) -> None:
    rows = draft_token_counts(0, most)[1:].tolist()
    assert rows == sorted(set(rows))
    assert all(0 < each <= most for each in rows)
    if most > 1:
        assert rows == [1 + each for each in draft_token_counts(1, most - 1).tolist()]
