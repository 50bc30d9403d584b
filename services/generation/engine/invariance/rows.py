"""Divide the rows of a step so that a row's result does not depend on the other rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from services.generation.engine.sampling.rows import IntArray

MOST_ROWS = 32
"""Most rows of a product. oneDNN's products in bfloat16 with AMX sum in another order from 33 rows on."""


class QueryGroups(NamedTuple):
    """Query tokens of a step in groups, each of one sample.

    `owners` [g] has the sample of each group, `starts` [g + 1] divides the step's query tokens by group, and
    `lengths` [g] has the number of tokens of the sample up to the end of the group.
    """

    owners: IntArray
    starts: IntArray
    lengths: IntArray


def query_groups(starts: IntArray, lengths: IntArray, most: int) -> QueryGroups:
    """Divide the query tokens of each sample into groups of at most `most`, in their order.

    Args:
        starts: divides the step's query tokens by sample, [n + 1].
        lengths: number of tokens of each sample up to the end of its query, [n].
        most: most tokens of a group.
    """
    counts = np.diff(starts)
    parts = -(-counts // most)
    owners = np.repeat(np.arange(len(counts)), parts)
    first = (np.arange(len(owners)) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    last = np.minimum(first + most, counts[owners])
    ends = np.concatenate(([0], np.cumsum(last - first)))
    return QueryGroups(owners, ends, lengths[owners] - counts[owners] + last)


def in_parts(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, least: int) -> torch.Tensor:
    """Return product(x), computed with `least` to `MOST_ROWS` rows at a time.

    More rows are divided evenly, and fewer are padded with zeros.

    Args:
        product: function of rows [m, k] that returns rows [m, n]; each depends on the same row of x only.
        x: rows, [m, k].
        least: fewest rows of a product, at most half of `MOST_ROWS`.
    """
    rows = len(x)
    if least <= rows <= MOST_ROWS or not rows:
        return product(x)
    if rows < least:
        return product(torch.cat((x, x.new_zeros(least - rows, x.shape[1]))))[:rows]
    return torch.cat([product(part) for part in torch.tensor_split(x, -(-rows // MOST_ROWS))])


def least_rows(results: Sequence[torch.Tensor]) -> int:
    """Return the fewest rows from which on a product is the same to the bit up to `MOST_ROWS` rows; 0 if none is.

    Args:
        results: products of 1, 2, ... `MOST_ROWS` copies of one row, [m, n] each.
    """
    wanted, least = results[-1][0], 0
    for count in range(len(results), 0, -1):
        if not torch.equal(results[count - 1], wanted.expand_as(results[count - 1])):
            break
        least = count
    return least if least <= MOST_ROWS // 2 else 0
