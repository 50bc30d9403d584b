"""Compiled rivals: continuations in the prompt's automaton that are less frequent than the one proposed."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.edges import token_of, weight_of
from kernels.suffix_index.compiled.layout import INLINE, LISTED, NONE, NOWHERE, SIZE_BITS, SIZES
from kernels.suffix_index.compiled.odds import RANKS, judge, kind_of_rival

_SIZE_MASK = SIZES - 1
_MOST_ROWS = 1 << LISTED


@kernel
def longest_match(states, state, match):
    """Return (state, length) of the longest suffix of a text that has a continuation; a root if none has.

    The text ends at `state`, which stands for its last `match` tokens.
    """
    while states[state].target == NOWHERE and states[state].link != NOWHERE:
        state = np.int64(states[state].link)
        match = np.int64(states[state].length)
    return state, match


@kernel
def rivals_of(states, edges, state):
    """Return the two heaviest edges of a state but the heaviest, NONE where there are none.

    States with more edges than are kept in a list have none: no two of them are likely.
    """
    here = states[state]
    first, second = np.int64(NONE), np.int64(NONE)
    if here.target == NOWHERE or here.block == NOWHERE:
        return first, second
    start, rows = here.block >> SIZE_BITS, 1 << (here.block & _SIZE_MASK)
    if rows > _MOST_ROWS:
        return first, second
    if here.best != INLINE:
        first = np.int64(INLINE)
    for row in range(start, start + rows):
        if edges[row].token < 0:
            break
        if row == here.best:
            continue
        edge = np.int64(row)
        if first == NONE or edges[row].weight > weight_of(states, edges, state, first):
            first, second = edge, first
        elif second == NONE or edges[row].weight > weight_of(states, edges, state, second):
            second = edge
    return first, second


@kernel
def kind_of_edge(states, edges, state, edge, match, weight, rank):
    """Return the kind of a rival of this rank, 0 or 1, where `match` tokens are matched."""
    total = states[state].total
    return kind_of_rival(match, total / weight, weight_of(states, edges, state, edge) / total, rank)


@kernel
def judge_rivals(arrays, state, match, weight, min_match, token):
    """Judge the rivals where `token` came behind a text that ends at `state`, its last `match` tokens."""
    states, edges = arrays.states, arrays.edges
    state, match = longest_match(states, state, match)
    if match < min_match or states[state].link == NOWHERE:
        return
    found = rivals_of(states, edges, state)
    for rank in range(RANKS):
        if found[rank] != NONE:
            kind = kind_of_edge(states, edges, state, found[rank], match, weight, rank)
            judge(arrays.odds, kind, token_of(states, edges, state, found[rank]) == token)
