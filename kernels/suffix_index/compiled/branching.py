"""Compiled branches: where a continuation is least certain, what else could come, and how that goes on."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled import recent
from kernels.suffix_index.compiled.edges import token_of
from kernels.suffix_index.compiled.hashing import push
from kernels.suffix_index.compiled.layout import HISTORY, NONE, NOWHERE
from kernels.suffix_index.compiled.odds import RANKS, chance, kind_of_votes
from kernels.suffix_index.compiled.prediction import advance, choose, elsewhere, predict
from kernels.suffix_index.compiled.rivals import kind_of_edge, longest_match, rivals_of

ALTERNATIVES = 2
"""Tokens beside the likeliest one that a place can have."""
ROOT = -1
"""Parent of a token that follows the text itself."""


@kernel
def _add(tokens, chances, token, likely):
    """Add a token to the likeliest, in order; of a token that is there the larger chance counts."""
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
    """Fill the likeliest tokens [ALTERNATIVES] that could come in the place of `taken`, -1: none, and chances."""
    tokens[:], chances[:] = -1, np.float32(0)
    states, edges = arrays.states, arrays.edges
    matched, matched_kind, shared, shared_kind, own, length = predict(
        arrays, state, match, hashes, hashed, weight, min_match
    )
    there, confidence = elsewhere(arrays.odds, matched, matched_kind, shared, shared_kind, own, length)
    recent.look_up(arrays.recent, hashes, hashed, salt, found)
    if matched >= 0 and matched != taken:
        _add(tokens, chances, matched, chance(arrays.odds, matched_kind))
    if shared >= 0 and shared != taken:
        _add(tokens, chances, shared, chance(arrays.odds, shared_kind))
    for i in range(len(found)):
        if found[i] >= 0 and found[i] != taken:
            kind = kind_of_votes(recent.votes(found, found[i]), found[i], there, confidence)
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

    Returns how many there are. `chain` and `shares` are the proposal, `buffers` those of `branch`.
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
        arrays: of the index.
        cursor: the growing rollout.
        min_match: see SuffixIndex.
        floor: see SuffixIndex.
        salt: of the rollout.
        buffers: those of `branch`.
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
