"""Ancestor mask of a step: which query tokens of its request each query token sees, as bits. Pure.

The query tokens of a request with a tree are the root (the sample's last token) and the tokens of its draft, in the
order of their list. A token's parent is a place in that list, -1 for the root. Bit j stands for the j-th query
token; a token sees itself, its ancestors and the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kernels.short_query_attention.inputs import LONGEST_TREE


def ancestor_mask(
    queries: npt.NDArray[np.int64], trees: Mapping[int, Sequence[int]]
) -> npt.NDArray[np.int64]:
    """Return the bits of all query tokens, request by request.

    Args:
        queries: query tokens of each request, [n]; at most LONGEST_TREE each, or ValueError.
        trees: by its index, the parents of the drafts of each request with branches; the others' are chains.
    """
    if (queries > LONGEST_TREE).any():
        raise ValueError(
            f"queries: {int(queries.max())} query tokens do not fit a mask of {LONGEST_TREE} bits"
        )
    starts = np.concatenate(([0], np.cumsum(queries)))
    offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], queries)
    # The 65th bit is cut off, and so is what is carried to it.
    bits = np.left_shift(np.uint64(2), offsets.astype(np.uint64)) - np.uint64(1)
    for request, parents in trees.items():
        own = [1]
        for place, parent in enumerate(parents, 1):
            # The root is -1, so its bits are the first ones.
            own.append(own[parent + 1] | 1 << place)
        bits[starts[request] : starts[request + 1]] = own
    return bits.view(np.int64)
