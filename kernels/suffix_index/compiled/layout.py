"""Memory layout of the index: records of its flat arrays, which all prompts share."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
"""No row."""

# A state of a suffix automaton: a class of strings that end at the same places. Its longest string has `length`
# tokens; `link` leads to the state of its longest suffix that ends at more places, NOWHERE for a root. The
# first edge (token, target, weight) lies in the state itself, and most states have no other; the rest lie in
# `block`. `total` is the weight of all continuations, `best` the edge that weighs most: INLINE, a row of the
# block, or NONE. A free state has length FREE, and `link` leads to the next free one.
STATE = np.dtype(
    [
        ("length", np.int32),
        ("link", np.int32),
        ("token", np.int32),
        ("target", np.int32),
        ("weight", np.float32),
        ("total", np.float32),
        ("block", np.int32),
        ("best", np.int32),
    ]
)
INLINE, NONE = -1, -2
FREE = -1

# Further edges of a state: a block of 2**size rows from row `start` on, written start << SIZE_BITS | size. Up
# to LISTED rows are a list in order of arrival, ended by EMPTY; more are a table with linear probing, whose
# first row is a HEADER that holds the number of edges as its target. The first row of a free block has the
# start of the next free block of its size as its target.
EDGE = np.dtype([("token", np.int32), ("target", np.int32), ("weight", np.float32)])
SIZE_BITS = 5
SIZES = 1 << SIZE_BITS
LISTED = 3
EMPTY, HEADER = -1, -2
MOST_EDGES = 1 << (31 - SIZE_BITS)
"""Rows of edges that can be addressed."""

# The text of a growing rollout: a chain of chunks.
CHUNK_TOKENS = 31
CHUNK = np.dtype([("tokens", np.int32, (CHUNK_TOKENS,)), ("next", np.int32)])

# A growing rollout. `generation` distinguishes its handle from others of the same row and is odd while in use.
# Its text of `tokens` tokens, in the chunks from `first` to `last`, ends at `state`, and one occurrence of it
# counts `weight`. `hashes` is a ring of the hashes of its last prefixes, and `hashed` their number so far. Once it
# is `halted` nothing is appended or predicted.
HISTORY = 16
CURSOR = np.dtype(
    [
        ("generation", np.int32),
        ("state", np.int32),
        ("tokens", np.int32),
        ("first", np.int32),
        ("last", np.int32),
        ("weight", np.float32),
        ("halted", np.int32),
        ("hashed", np.int32),
        ("hashes", np.uint64, (HISTORY,)),
    ]
)

# Scalars: the first free state, chunk, and block of each size (NOWHERE: none); states and chunks in use; rows
# of edges ever used (later ones are untouched) and in use now; rows of edges that were lacking when there was
# no room; entries of the shared table in use; 1 once rivals of the likeliest continuations are requested, and
# therefore learned.
FREE_STATE, STATES, FREE_CHUNK, CHUNKS, EDGES_END, EDGES, LACKING, ENTRIES, RIVALS, FREE_BLOCKS = range(10)
SCALARS = FREE_BLOCKS + SIZES


class Arrays(NamedTuple):
    """Arrays that the compiled functions work on.

    states [S] STATE; edges [E] EDGE; chunks [C] CHUNK; cursors [N] CURSOR; entries [power of two] uint64, the
    shared table (tables.py); recent [power of two] uint64, latest occurrences in each growing rollout
    (tables.py); odds [KINDS, 2] float32 (prediction.py); scalars [SCALARS] int64.
    """

    states: NDArray[np.void]
    edges: NDArray[np.void]
    chunks: NDArray[np.void]
    cursors: NDArray[np.void]
    entries: NDArray[np.uint64]
    recent: NDArray[np.uint64]
    odds: NDArray[np.float32]
    scalars: NDArray[np.int64]
