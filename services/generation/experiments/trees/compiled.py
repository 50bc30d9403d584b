"""Compiled functions that select drafted tokens where proposals have branches. Importing this module imports numba.

They extend `services.generation.speculation.compiled`. The survival of a branch token is the product of the
acceptance along its path, as for the token of a chain. It falls along each path, so the tokens above any value are
a tree.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernels import jit
from services.generation.speculation import compiled
from services.generation.speculation.compiled import (
    BUCKETS,
    bucket_of,
    cut_chain,
    evaluate,
    last_bucket,
    sort_into,
)

__all__ = ["BUCKETS", "cut_trees", "search_trees", "survive_trees"]
_SOURCES = (Path(__file__), Path(str(compiled.__file__)), Path(jit.__file__).parent)
_entry = jit.entry(jit.source_fingerprint(*_SOURCES))


@jit.kernel
def pick_trees(survival, branches, drafter, price, picks):
    """Do the same as `pick`, with the branches [n, m] of one drafter's proposals."""
    drafters, n, width = survival.shape
    for i in range(n):
        best, most = 0, -1.0
        for d in range(drafters):
            brought = 0.0
            for j in range(width):
                if survival[d, i, j] <= price:
                    break
                brought += survival[d, i, j] - price
            if d == drafter:
                for j in range(branches.shape[1]):
                    brought += max(branches[i, j] - price, 0.0)
            if brought > most:
                best, most = d, brought
        picks[i] = best


@_entry
def survive_trees(chains, acceptance, parents, window, room, branches):
    """Fill the survival of branches [n, m] from their acceptance, and cut chains and branches to the room.

    chains [n, width] is the survival of the proposals, which have up to `window` tokens. Each sample keeps its most
    promising tokens, at most its room [n] and the width.
    """
    width = chains.shape[1]
    for i in range(len(branches)):
        count = 0
        for j in range(branches.shape[1]):
            reached, parent = acceptance[i, j], parents[i, j]
            if parent >= window:
                reached *= branches[i, parent - window]
            elif parent >= width:
                reached = 0.0
            elif parent >= 0:
                reached *= chains[i, parent]
            branches[i, j] = reached
            count += reached > 0.0
        if count > 0:
            for j in range(width):
                count += chains[i, j] > 0.0
            for _ in range(count - min(room[i], width)):
                drop_last(chains[i], branches[i])


@jit.kernel
def drop_last(chain, branches):
    """Set the least survival of a sample to 0; of equals the last one, which no token follows."""
    least, place = 2.0, 0
    for j in range(len(chain)):
        if 0.0 < chain[j] <= least:
            least, place = chain[j], j
    for j in range(len(branches)):
        if 0.0 < branches[j] <= least:
            least, place = branches[j], len(chain) + j
    if place < len(chain):
        chain[place] = 0.0
    else:
        branches[place - len(chain)] = 0.0


@_entry
def search_trees(survival, branches, drafter, counts, seconds, price, picks, buckets):
    """Do the same as `search`, with the branches [n, m] of one drafter's proposals."""
    pick_trees(survival, branches, drafter, price, picks)
    sort_into(survival, picks, buckets)
    bits = branches.view(np.int64)
    for i in range(len(branches)):
        if picks[i] == drafter:
            for j in range(branches.shape[1]):
                if branches[i, j] > 0.0:
                    bucket = bucket_of(bits[i, j])
                    buckets[bucket, 0] += 1.0
                    buckets[bucket, 1] += branches[i, j]
    return evaluate(buckets, counts, seconds, len(picks))


@_entry
def cut_trees(survival, branches, drafter, picks, buckets, count, lengths, taken):
    """Do the same as `cut`, and set which branch tokens are `taken` [n, m].

    A sample's chain comes before its branches, and a parent before its children, so the rest of the last bucket is
    never given to a token without its parent.
    """
    last, left = last_bucket(buckets, count)
    expected, bits, more = 0.0, survival.view(np.int64), branches.view(np.int64)
    for i in range(len(picks)):
        d = picks[i]
        lengths[i], left, expected = cut_chain(survival, bits, d, i, last, left, expected)
        for j in range(branches.shape[1]):
            taken[i, j] = False
            if d == drafter and branches[i, j] > 0.0:
                bucket = bucket_of(more[i, j])
                if bucket > last or (bucket == last and left > 0):
                    left -= bucket == last
                    expected += branches[i, j]
                    taken[i, j] = True
    return expected
