"""Compiled suffix automata, grown token by token, with weighted counts of the continuations of each state.

The automaton of a prompt is built from a trie: the prompt's own tokens once, and every rollout from their end. Most
states have one edge, which lies in the state. A few more are searched one by one; many, as a root has, are a hash
table for that state only, so that all data of a prompt lies close together.
"""

from __future__ import annotations

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.layout import (
    EDGES,
    EDGES_END,
    EMPTY,
    FREE,
    FREE_BLOCKS,
    FREE_STATE,
    HEADER,
    INLINE,
    LACKING,
    LISTED,
    NONE,
    NOWHERE,
    SIZE_BITS,
    SIZES,
    STATES,
)

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.


_SIZE_MASK = SIZES - 1
_LARGEST_LIST = 1 << LISTED
_MIX = np.uint32(0x9E3779B1)
_MIX_SHIFT = np.uint32(15)


@kernel
def _home(token, mask):
    mixed = np.uint32(token) * _MIX
    return np.int64(mixed ^ (mixed >> _MIX_SHIFT)) & mask


@kernel
def find(states, edges, state, token):
    """Return the edge of `state` for `token`: INLINE, a row of edges, or NONE."""
    here = states[state]
    if here.target == NOWHERE:
        return np.int64(NONE)
    if here.token == token:
        return np.int64(INLINE)
    if here.block == NOWHERE:
        return np.int64(NONE)
    start, rows = here.block >> SIZE_BITS, 1 << (here.block & _SIZE_MASK)
    if rows <= _LARGEST_LIST:
        for row in range(start, start + rows):
            if edges[row].token == token:
                return np.int64(row)
            if edges[row].token == EMPTY:
                break
        return np.int64(NONE)
    slot = _home(token, rows - 1)
    while edges[start + slot].token != EMPTY:
        if edges[start + slot].token == token:
            return np.int64(start + slot)
        slot = (slot + 1) & (rows - 1)
    return np.int64(NONE)


@kernel
def target_of(states, edges, state, edge):
    """Return the state to which an edge leads."""
    return np.int64(states[state].target if edge == INLINE else edges[edge].target)


@kernel
def token_of(states, edges, state, edge):
    """Return the token of an edge."""
    return states[state].token if edge == INLINE else edges[edge].token


@kernel
def weight_of(states, edges, state, edge):
    """Return the weight of an edge."""
    return states[state].weight if edge == INLINE else edges[edge].weight


@kernel
def rows_to_add(states, edges, state):
    """Return the rows of a new block that one more edge of `state` needs."""
    here = states[state]
    if here.target == NOWHERE:
        return 0
    if here.block == NOWHERE:
        return 1
    start, rows = here.block >> SIZE_BITS, 1 << (here.block & _SIZE_MASK)
    if rows <= _LARGEST_LIST:
        return 0 if edges[start + rows - 1].token == EMPTY else 2 * rows
    return 0 if 4 * (edges[start].target + 2) <= 3 * rows else 2 * rows


@kernel
def rows_to_copy(states, state):
    """Return the rows of a new block that a copy of all edges of `state` needs."""
    block = states[state].block
    return 0 if block == NOWHERE else 1 << (block & _SIZE_MASK)


@kernel
def _take(edges, scalars, size):
    """Allocate an empty block of 2**size rows; there must be room behind EDGES_END."""
    rows = 1 << size
    start = scalars[FREE_BLOCKS + size]
    if start != NOWHERE:
        scalars[FREE_BLOCKS + size] = edges[start].target
    else:
        start = scalars[EDGES_END]
        scalars[EDGES_END] += rows
    for row in range(start, start + rows):
        edges[row].token = EMPTY
    if size > LISTED:
        edges[start].token, edges[start].target = HEADER, 0
    scalars[EDGES] += rows
    return start << SIZE_BITS | size


@kernel
def _give(edges, scalars, block):
    start, size = block >> SIZE_BITS, block & _SIZE_MASK
    edges[start].target = scalars[FREE_BLOCKS + size]
    scalars[FREE_BLOCKS + size] = start
    scalars[EDGES] -= 1 << size


@kernel
def _put(edges, block, token, target, weight):
    """Write an edge to a block that has room for it; return its row."""
    start, rows = block >> SIZE_BITS, 1 << (block & _SIZE_MASK)
    slot = np.int64(0)
    if rows > _LARGEST_LIST:
        slot = _home(token, rows - 1)
        edges[start].target += 1
    while edges[start + slot].token != EMPTY:
        slot = (slot + 1) & (rows - 1)
    row = start + slot
    edges[row].token = token
    edges[row].target = target
    edges[row].weight = weight
    return np.int64(row)


@kernel
def add(states, edges, scalars, state, token, target, weight):
    """Add an edge to a state, for which there must be room; return it."""
    here = states[state]
    if here.target == NOWHERE:
        here.token, here.target, here.weight = token, target, weight
        return np.int64(INLINE)
    more = rows_to_add(states, edges, state)
    if more == 1:
        here.block = _take(edges, scalars, 0)
    elif more > 0:
        _grow(states, edges, scalars, state)
    return _put(edges, here.block, token, target, weight)


@kernel
def _grow(states, edges, scalars, state):
    """Move the block of a state to one twice as large."""
    here = states[state]
    old, best = here.block, here.best
    start, size = old >> SIZE_BITS, old & _SIZE_MASK
    here.block = _take(edges, scalars, size + 1)
    for row in range(start, start + (1 << size)):
        if edges[row].token >= 0:
            moved = _put(edges, here.block, edges[row].token, edges[row].target, edges[row].weight)
            if row == best:
                here.best = moved
    _give(edges, scalars, old)


@kernel
def copy_all(states, edges, scalars, state, other):
    """Give `other`, which has none, all edges of `state`; there must be room."""
    here, there = states[state], states[other]
    there.token, there.target, there.weight = here.token, here.target, here.weight
    there.total, there.best = here.total, here.best
    if here.block == NOWHERE:
        return
    size = here.block & _SIZE_MASK
    there.block = _take(edges, scalars, size)
    start, begin = here.block >> SIZE_BITS, there.block >> SIZE_BITS
    for i in range(1 << size):
        edges[begin + i] = edges[start + i]
    if here.best >= 0:
        there.best = here.best - start + begin


@kernel
def give_all(states, edges, scalars, state):
    """Free the block of a state."""
    if states[state].block != NOWHERE:
        _give(edges, scalars, states[state].block)


_NOTHING = np.float32(0)


@kernel
def new_state(states, scalars, length, link):
    """Make a state without edges, for which there must be room."""
    state = scalars[FREE_STATE]
    here = states[state]
    scalars[FREE_STATE] = here.link
    scalars[STATES] += 1
    here.length, here.link = length, link
    here.target, here.block, here.best = NOWHERE, NOWHERE, NONE
    here.total = _NOTHING
    return state


@kernel
def _count(states, edges, state, edge, weight):
    """Count an occurrence of an edge. Of edges of the same weight the latest is the best."""
    here = states[state]
    grown = weight_of(states, edges, state, edge) + weight
    if edge == INLINE:
        here.weight = grown
    else:
        edges[edge].weight = grown
    here.total += weight
    best = np.int64(here.best)
    if best != edge and (best == NONE or grown >= weight_of(states, edges, state, best)):
        here.best = edge


@kernel
def _split(states, edges, scalars, state, length):
    """Divide a state: its strings of at most `length` tokens move to a new one, with edges and weights alike."""
    part = new_state(states, scalars, length, states[state].link)
    states[state].link = part
    if states[state].target != NOWHERE:
        copy_all(states, edges, scalars, state, part)
    return part


@kernel
def _redirect(states, edges, state, token, old, new):
    """Redirect the edges for `token` from `old` to `new`, in a state and its suffixes, while they lead to `old`."""
    while state != NOWHERE:
        edge = find(states, edges, state, token)
        if target_of(states, edges, state, edge) != old:
            return
        if edge == INLINE:
            states[state].target = new
        else:
            edges[edge].target = new
        state = np.int64(states[state].link)


@kernel
def extend(states, edges, scalars, last, token, weight, reach):
    """Append a token to the text that ends at state `last`; return the state where it ends then.

    Counts the occurrence with its float32 weight in the state of every suffix that was there (the root left out),
    longest first, at most `reach` of them, but always where it is the first. Returns NOWHERE, with nothing done,
    when there is no room.
    """
    needed, edge = 0, np.int64(NONE)
    # The longest suffix that the token has followed before, and the suffix before that.
    known, before = last, np.int64(NOWHERE)
    while known != NOWHERE:
        edge = find(states, edges, known, token)
        if edge != NONE:
            break
        needed += rows_to_add(states, edges, known)
        before, known = known, np.int64(states[known].link)
    target, divided = np.int64(NOWHERE), False
    if known != NOWHERE:
        target = target_of(states, edges, known, edge)
        divided = states[target].length != states[known].length + 1
        if divided:
            needed += rows_to_copy(states, target)
            if target == before:
                # A run of one token: the part becomes a suffix of the text, too, and gets an edge for it.
                needed += rows_to_add(states, edges, target)
    if scalars[STATES] + 2 > len(states) or scalars[EDGES_END] + needed > len(edges):
        scalars[LACKING] = needed
        return np.int64(NOWHERE)

    if divided:
        part = _split(states, edges, scalars, target, states[known].length + 1)
        _redirect(states, edges, known, token, target, part)
        target = part
    counted, at, end = 0, last, target
    if known != last:
        end = new_state(states, scalars, states[last].length + 1, target)
        while at != known:
            edge = add(states, edges, scalars, at, token, end, _NOTHING)
            link = np.int64(states[at].link)
            if link != NOWHERE:
                _count(states, edges, at, edge, weight)
                counted += 1
            elif target == NOWHERE:
                states[end].link = at
            at = link
    while at != NOWHERE and states[at].link != NOWHERE and counted < reach:
        _count(states, edges, at, find(states, edges, at, token), weight)
        at = np.int64(states[at].link)
        counted += 1
    return end


@kernel
def release(states, edges, scalars, root):
    """Free the automaton of a root."""
    # A stack through `link`; what is on it or free has length FREE.
    states[root].length, states[root].link = FREE, NOWHERE
    top = np.int64(root)
    while top != NOWHERE:
        state = top
        here = states[state]
        top = np.int64(here.link)
        if here.target != NOWHERE:
            top = _stack(states, here.target, top)
        if here.block != NOWHERE:
            start, rows = here.block >> SIZE_BITS, 1 << (here.block & (SIZES - 1))
            for row in range(start, start + rows):
                if edges[row].token >= 0:
                    top = _stack(states, edges[row].target, top)
            give_all(states, edges, scalars, state)
        here.link = scalars[FREE_STATE]
        scalars[FREE_STATE] = state
        scalars[STATES] -= 1


@kernel
def _stack(states, state, top):
    if states[state].length == FREE:
        return top
    states[state].length, states[state].link = FREE, top
    return np.int64(state)
