"""Entry points: the compiled functions that Python calls. Importing this module imports numba."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from pathlib import Path

import numpy as np

from kernels import jit
from kernels.suffix_index.compiled import automaton, branching, recent, shared, texts
from kernels.suffix_index.compiled.hashing import push
from kernels.suffix_index.compiled.layout import HISTORY, NOWHERE
from kernels.suffix_index.compiled.prediction import advance, choose, learn_from

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
        if not texts.has_room(arrays.scalars, cursor):
            return i
        length = np.int64(arrays.states[state].length)
        hashed = np.int64(cursor.hashed)
        learn_from(arrays, state, length, hashes, hashed, cursor.weight, min_match, token, salt, found)
        state = automaton.extend(
            arrays.states, arrays.edges, arrays.scalars, state, token, cursor.weight, reach
        )
        if state == NOWHERE:
            return i
        shared.learn(arrays.entries, arrays.scalars, hashes, hashed, token)
        recent.learn(arrays.recent, hashes, hashed, salt, token)
        push(hashes, hashed, token)
        texts.store(arrays.chunks, arrays.scalars, cursor, token)
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
        shared.learn(arrays.entries, arrays.scalars, hashes, hashed, tokens[i])
        push(hashes, hashed, tokens[i])
        hashed += 1
    return hashed


@_entry
def step(arrays, handles, tokens, cu, progress, reach, min_match, floor, proposed, shares, counts, matches):
    """Append tokens and predict continuations; see SuffixIndex.step.

    progress [2] int64: growing rollouts done, and tokens of all; pass it again after NO_ROOM.
    """
    cursors = arrays.cursors
    for i in range(len(handles)):
        row = handles[i] & _ROW
        if row >= len(cursors) or cursors[row].generation != handles[i] >> _GENERATION_SHIFT:
            return i
    hashes = np.empty(HISTORY, dtype=np.uint64)
    found = np.empty(len(recent.ORDERS), dtype=np.int64)
    for i in range(progress[0], len(handles)):
        cursor = cursors[handles[i] & _ROW]
        if not cursor.halted:
            for h in range(HISTORY):
                hashes[h] = cursor.hashes[h]
            salt = recent.salt_of(handles[i])
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
        if not cursor.halted:
            for h in range(HISTORY):
                hashes[h] = cursor.hashes[h]
            salt = recent.salt_of(handles[i])
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
        np.empty(len(recent.ORDERS), dtype=np.int64),
        np.empty(branching.ALTERNATIVES, dtype=np.int64),
        np.empty(branching.ALTERNATIVES, dtype=np.float32),
        np.empty(most, dtype=np.float32),
        np.empty(most, dtype=np.float32),
    )
    forks = np.empty((most, 2), dtype=np.int64)
    for i in range(len(handles)):
        cursor = arrays.cursors[handles[i] & _ROW]
        chain, share = chains[i, : counts[i]], shares[i, : counts[i]]
        salt, made = recent.salt_of(handles[i]), 0
        found = branching.find_forks(arrays, cursor, min_match, floor, salt, buffers, chain, share, forks)
        for number in range(found):
            fork = (number, forks[number, 0], forks[number, 1])
            made = branching.grow(
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
    texts.gather(arrays.chunks, arrays.cursors[row], out)


@_entry
def discard(arrays, row):
    """Free the text of a cursor."""
    texts.discard(arrays.chunks, arrays.scalars, arrays.cursors[row])


@_entry
def enlarge(entries, larger):
    """Move all entries of a shared table to an empty larger one."""
    shared.enlarge(entries, larger)
