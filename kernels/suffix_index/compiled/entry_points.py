"""Entry points: the compiled functions that Python calls, and the branches that they propose.

Importing this module imports numba.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernels import jit
from kernels.jit import kernel
from kernels.suffix_index.compiled import automaton, tables
from kernels.suffix_index.compiled.automaton import token_of
from kernels.suffix_index.compiled.layout import HISTORY, NONE, NOWHERE
from kernels.suffix_index.compiled.prediction import (
    RANKS,
    advance,
    chance,
    choose,
    elsewhere,
    kind_of_edge,
    kind_of_votes,
    learn_from,
    longest_match,
    predict,
    rivals_of,
)
from kernels.suffix_index.compiled.tables import push

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.


ALTERNATIVES = 2
"""Most alternatives to the likeliest token at a position."""
ROOT = -1
"""Parent of a token that follows the text itself."""


@kernel
def _add(tokens, chances, token, likely):
    """Insert a token into the likeliest ones, in order; a token that is there keeps the larger chance."""
    last = len(tokens) - 1
    for i in range(len(tokens)):
        if tokens[i] == token:
            if likely <= chances[i]:
                return
            last = i
            break
    if likely <= chances[last] and tokens[last] != token:
        return
    tokens[last], chances[last] = token, likely
    while last > 0 and chances[last] > chances[last - 1]:
        tokens[last], tokens[last - 1] = tokens[last - 1], tokens[last]
        chances[last], chances[last - 1] = chances[last - 1], chances[last]
        last -= 1


@kernel
def alternatives(
    arrays, state, match, hashes, hashed, weight, min_match, salt, found, taken, tokens, chances
):
    """Fill the likeliest alternatives to `taken`, tokens [ALTERNATIVES] (-1: none), and their chances."""
    tokens[:], chances[:] = -1, np.float32(0)
    states, edges = arrays.states, arrays.edges
    matched, matched_kind, shared, shared_kind, own, length = predict(
        arrays, state, match, hashes, hashed, weight, min_match
    )
    there, confidence = elsewhere(arrays.odds, matched, matched_kind, shared, shared_kind, own, length)
    tables.look_up_recent(arrays.recent, hashes, hashed, salt, found)
    if matched >= 0 and matched != taken:
        _add(tokens, chances, matched, chance(arrays.odds, matched_kind))
    if shared >= 0 and shared != taken:
        _add(tokens, chances, shared, chance(arrays.odds, shared_kind))
    for i in range(len(found)):
        if found[i] >= 0 and found[i] != taken:
            kind = kind_of_votes(tables.votes(found, found[i]), found[i], there, confidence)
            _add(tokens, chances, found[i], chance(arrays.odds, kind))
    state, match = longest_match(states, state, match)
    if match < min_match or states[state].link == NOWHERE:
        return
    rivals = rivals_of(states, edges, state)
    for rank in range(RANKS):
        if rivals[rank] != NONE:
            token = np.int64(token_of(states, edges, state, rivals[rank]))
            if token != taken:
                kind = kind_of_edge(states, edges, state, rivals[rank], match, weight, rank)
                _add(tokens, chances, token, chance(arrays.odds, kind))


@kernel
def find_forks(arrays, cursor, min_match, floor, salt, buffers, chain, shares, forks):
    """Fill the `forks` [F, 2] (tokens of the chain before it, token) of a growing rollout, the likeliest first.

    Returns how many there are. `chain` and `shares` are the proposal, `buffers` as in `branch`.
    """
    hashes, found, tokens, chances, reached, others = buffers
    state, hashed = np.int64(cursor.state), np.int64(cursor.hashed)
    match = np.int64(arrays.states[state].length)
    for h in range(HISTORY):
        hashes[h] = cursor.hashes[h]
    count, survival = 0, np.float32(1)
    for place in range(len(chain)):
        alternatives(
            arrays, state, match, hashes, hashed, cursor.weight, min_match, salt, found, chain[place],
            tokens, chances,
        )  # fmt: skip
        for i in range(ALTERNATIVES):
            reach = survival * chances[i]
            if tokens[i] < 0 or reach < floor or reach <= np.float32(0):
                break
            at = count
            while at > 0 and reached[at - 1] < reach:
                at -= 1
            if at < len(forks):
                count = min(count + 1, len(forks))
                for k in range(count - 1, at, -1):
                    forks[k, 0], forks[k, 1], reached[k] = forks[k - 1, 0], forks[k - 1, 1], reached[k - 1]
                    others[k] = others[k - 1]
                forks[at, 0], forks[at, 1], reached[at], others[at] = place, tokens[i], reach, chances[i]
        survival *= shares[place]
        if survival < floor:
            break
        state, match = advance(arrays.states, arrays.edges, state, match, chain[place])
        push(hashes, hashed, chain[place])
        hashed += 1
    return count


@kernel
def grow(
    arrays, cursor, min_match, floor, salt, buffers, chain, shares, fork, width, made, tokens, parents, odds
):
    """Append the branch of a fork to a sample's branch tokens, of which there are `made`; return how many then.

    Args:
        arrays: arrays of the index.
        cursor: the growing rollout.
        min_match: see SuffixIndex.
        floor: see SuffixIndex.
        salt: salt of the rollout.
        buffers: as in `branch`.
        chain: the proposal.
        shares: its probabilities.
        fork: place in the list of forks, its tokens of the chain, and its first token.
        width: most tokens of a branch, and places of a chain.
        made: branch tokens so far.
        tokens: of the branches; parents and odds go with them.
        parents: ROOT, a place in the chain, or the width and a place in the branches.
        odds: probability of each token if all before it in its path come.
    """
    hashes, found, _, _, _, others = buffers
    number, place, token = fork
    state, hashed = np.int64(cursor.state), np.int64(cursor.hashed)
    match = np.int64(arrays.states[state].length)
    for h in range(HISTORY):
        hashes[h] = cursor.hashes[h]
    survival = np.float32(1)
    for before in range(place):
        survival *= shares[before]
        state, match = advance(arrays.states, arrays.edges, state, match, chain[before])
        push(hashes, hashed, chain[before])
        hashed += 1
    parent, share = np.int64(place - 1), others[number]
    first = made
    while token >= 0 and made - first < width:
        survival *= share
        if survival < floor:
            break
        tokens[made], parents[made], odds[made] = token, parent, share
        parent = width + made
        made += 1
        state, match = advance(arrays.states, arrays.edges, state, match, token)
        push(hashes, hashed, token)
        hashed += 1
        token, share, _ = choose(arrays, state, match, hashes, hashed, cursor.weight, min_match, salt, found)
    return made


DONE, NO_ROOM = -1, -2
"""Results of `step` other than the place of an invalid handle."""
_ROW = np.int64(0xFFFFFFFF)
_GENERATION_SHIFT = np.int64(32)
_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@jit.kernel
def append(arrays, cursor, tokens, start, end, reach, min_match, hashes, salt, found):
    """Append tokens[start:end] to a growing rollout; return the end of those that there was room for."""
    for i in range(start, end):
        token, state = tokens[i], np.int64(cursor.state)
        if not tables.has_room(arrays.scalars, cursor):
            return i
        length = np.int64(arrays.states[state].length)
        hashed = np.int64(cursor.hashed)
        learn_from(arrays, state, length, hashes, hashed, cursor.weight, min_match, token, salt, found)
        state = automaton.extend(
            arrays.states, arrays.edges, arrays.scalars, state, token, cursor.weight, reach
        )
        if state == NOWHERE:
            return i
        tables.learn_shared(arrays.entries, arrays.scalars, hashes, hashed, token)
        tables.learn_recent(arrays.recent, hashes, hashed, salt, token)
        push(hashes, hashed, token)
        tables.store(arrays.chunks, arrays.scalars, cursor, token)
        cursor.state, cursor.hashed = state, hashed + 1
    return end


@jit.kernel
def propose(arrays, cursor, min_match, floor, hashes, salt, found, tokens, shares):
    """Fill tokens and shares [window]; return how many, and the length of the context of the first."""
    state, hashed = np.int64(cursor.state), np.int64(cursor.hashed)
    match = np.int64(arrays.states[state].length)
    count, first, survival = 0, np.int64(0), np.float32(1)
    while count < len(tokens):
        token, share, length = choose(
            arrays, state, match, hashes, hashed, cursor.weight, min_match, salt, found
        )
        survival *= share
        if token < 0 or survival < floor:
            break
        if count == 0:
            first = length
        tokens[count], shares[count] = token, share
        count += 1
        state, match = advance(arrays.states, arrays.edges, state, match, token)
        push(hashes, hashed, token)
        hashed += 1
    return count, first


@_entry
def extend_text(arrays, tokens, start, state, weight, reach):
    """Append tokens[start:] to the text that ends at `state`.

    Returns how many of all tokens are appended when they end or there is no more room, and the state then.
    """
    for i in range(start, len(tokens)):
        end = automaton.extend(arrays.states, arrays.edges, arrays.scalars, state, tokens[i], weight, reach)
        if end == NOWHERE:
            return i, state
        state = end
    return len(tokens), state


@_entry
def teach_text(arrays, tokens, hashes, hashed):
    """Add a text to the shared table; return the number of tokens hashed at its end.

    `hashes` [HISTORY] uint64 and `hashed` are those before it.
    """
    for i in range(len(tokens)):
        tables.learn_shared(arrays.entries, arrays.scalars, hashes, hashed, tokens[i])
        push(hashes, hashed, tokens[i])
        hashed += 1
    return hashed


@_entry
def step(
    arrays, handles, tokens, cu, asked, progress, reach, min_match, floor, proposed, shares, counts, matches
):
    """Append tokens and predict continuations of the `asked` [n] rollouts; see SuffixIndex.step.

    progress [2] int64: growing rollouts done, and tokens of all; pass it again after NO_ROOM.
    """
    cursors = arrays.cursors
    for i in range(len(handles)):
        row = handles[i] & _ROW
        if row >= len(cursors) or cursors[row].generation != handles[i] >> _GENERATION_SHIFT:
            return i
    hashes = np.empty(HISTORY, dtype=np.uint64)
    found = np.empty(len(tables.RECENT_ORDERS), dtype=np.int64)
    for i in range(progress[0], len(handles)):
        cursor = cursors[handles[i] & _ROW]
        if not cursor.halted:
            for h in range(HISTORY):
                hashes[h] = cursor.hashes[h]
            salt = tables.salt_of(handles[i])
            done = append(
                arrays, cursor, tokens, progress[1], cu[i + 1], reach, min_match, hashes, salt, found
            )
            for h in range(HISTORY):
                cursor.hashes[h] = hashes[h]
            progress[1] = done
            if done < cu[i + 1]:
                return NO_ROOM
        progress[0], progress[1] = i + 1, cu[i + 1]
    for i in range(len(handles)):
        cursor = cursors[handles[i] & _ROW]
        if asked[i] and not cursor.halted:
            for h in range(HISTORY):
                hashes[h] = cursor.hashes[h]
            salt = tables.salt_of(handles[i])
            counts[i], matches[i] = propose(
                arrays, cursor, min_match, floor, hashes, salt, found, proposed[i], shares[i]
            )
    return DONE


@_entry
def branch(arrays, handles, min_match, floor, chains, shares, counts, most, tokens, parents, odds):
    """Fill up to `most` branches for each continuation that `step` has predicted; see Branches.

    Handles are valid. tokens, parents and odds [n, most * window]; odds are 0 where there is no token.
    """
    buffers = (
        np.empty(HISTORY, dtype=np.uint64),
        np.empty(len(tables.RECENT_ORDERS), dtype=np.int64),
        np.empty(ALTERNATIVES, dtype=np.int64),
        np.empty(ALTERNATIVES, dtype=np.float32),
        np.empty(most, dtype=np.float32),
        np.empty(most, dtype=np.float32),
    )
    forks = np.empty((most, 2), dtype=np.int64)
    for i in range(len(handles)):
        cursor = arrays.cursors[handles[i] & _ROW]
        chain, share = chains[i, : counts[i]], shares[i, : counts[i]]
        salt, made = tables.salt_of(handles[i]), 0
        found = find_forks(arrays, cursor, min_match, floor, salt, buffers, chain, share, forks)
        for number in range(found):
            fork = (number, forks[number, 0], forks[number, 1])
            made = grow(
                arrays, cursor, min_match, floor, salt, buffers, chain, share, fork, chains.shape[1],
                made, tokens[i], parents[i], odds[i],
            )  # fmt: skip


@_entry
def release(arrays, root):
    """Free the automaton of a root."""
    automaton.release(arrays.states, arrays.edges, arrays.scalars, root)


@_entry
def new_root(arrays):
    """Make an empty automaton, for which there must be room."""
    return automaton.new_state(arrays.states, arrays.scalars, 0, NOWHERE)


@_entry
def gather(arrays, row, out):
    """Copy the text of a cursor to `out` [its tokens] int32."""
    tables.gather(arrays.chunks, arrays.cursors[row], out)


@_entry
def discard(arrays, row):
    """Free the text of a cursor."""
    tables.discard(arrays.chunks, arrays.scalars, arrays.cursors[row])


@_entry
def enlarge(entries, larger):
    """Move all entries of a shared table to an empty larger one."""
    tables.enlarge_shared(entries, larger)
