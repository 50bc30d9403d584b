"""Rows are divided so that a row's result does not depend on the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.generation.engine.invariance.rows import MOST_ROWS, in_parts, least_rows, query_groups

Counts = st.lists(st.integers(0, 70), min_size=1, max_size=6)


@given(Counts, st.integers(1, 32), st.integers(0, 500))
def test_groups_have_every_query_token_once_and_end_where_it_may_look(
    counts: list[int], most: int, context: int
) -> None:
    lengths = np.array([context + count + place for place, count in enumerate(counts)])
    groups = query_groups(np.concatenate(([0], np.cumsum(counts))), lengths, most)
    positions = [
        (owner, length - size + i)
        for owner, length, size in zip(groups.owners, groups.lengths, np.diff(groups.starts), strict=True)
        for i in range(size)
    ]
    assert positions == [
        (place, context + place + i) for place, count in enumerate(counts) for i in range(count)
    ]
    assert all(0 < size <= most for size in np.diff(groups.starts))


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 31, 32, 33, 64, 65, 200])
def test_a_product_has_few_enough_rows_and_many_enough(rows: int) -> None:
    seen = list[int]()

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return 2 * x

    x = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    assert torch.equal(in_parts(product, x, 5), 2 * x)
    assert rows == 0 or all(5 <= each <= MOST_ROWS for each in seen)


def test_the_fewest_rows_are_those_from_which_on_nothing_changes() -> None:
    same = [torch.ones(count, 2) for count in range(1, MOST_ROWS + 1)]
    assert least_rows(same) == 1
    few = [each + (len(each) < 5) for each in same]
    assert least_rows(few) == 5
    placed = [each.clone() for each in same]
    placed[-1][-1] += 1
    assert least_rows(placed) == 0, "a row's place among the rows counts"
    assert least_rows([each + (len(each) < 20) for each in same]) == 0, "halves of parts would be too small"
