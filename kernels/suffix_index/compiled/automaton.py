"""Compiled suffix automata, grown token by token, with weighted counts of the continuations of each state.

The automaton of a prompt is that of a trie: the prompt's own tokens once, and every rollout from their end.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.edges import (
    add,
    copy_all,
    find,
    give_all,
    rows_to_add,
    rows_to_copy,
    target_of,
    weight_of,
)
from kernels.suffix_index.compiled.layout import (
    EDGES_END,
    FREE,
    FREE_STATE,
    INLINE,
    LACKING,
    NONE,
    NOWHERE,
    SIZE_BITS,
    SIZES,
    STATES,
)

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
    """Lead the edges for `token` of a state and of its suffixes to `new` as far as they lead to `old`."""
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
    known = last  # the longest suffix that the token has followed before
    while known != NOWHERE:
        edge = find(states, edges, known, token)
        if edge != NONE:
            break
        needed += rows_to_add(states, edges, known)
        known = np.int64(states[known].link)
    target, divided = np.int64(NOWHERE), False
    if known != NOWHERE:
        target = target_of(states, edges, known, edge)
        divided = states[target].length != states[known].length + 1
        if divided:
            needed += rows_to_copy(states, target)
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
