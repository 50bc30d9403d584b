"""Compiled prediction of the next token, its rivals, and the calibration of their probabilities.

Automaton and shared table represent the other texts: the longer context of the two decides, the prompt's own if
they are equal. The rollout's own latest occurrences of its last tokens then vote on that token and on others; the
likeliest is taken.

The probability of a prediction is learned from the growing rollouts, by its kind, which is its evidence: for the
prompt's automaton, the length of the match, the number of occurrences and the token's share of them; for the shared
table, the length of the context and its firmness; for both, also the opinion of the other one. A rival, which the
automaton has seen less often than another token, has its share and rank. The kind of the finally proposed token is
the vote of the rollout's own latest occurrences, and the other texts' prediction with its probability. Kinds are
numbered; odds [KINDS, 2] hold how many predictions of each came true, and how many were made.

Measured on tinymath rollouts, 8 known and 8 running of each prompt, 8 tokens proposed: following the longest match
gives 3.05 tokens a step, a mixture of all contexts 3.09, a shorter context that occurred twice at least 2.79, eight
times 2.24; the longest match with the shared table as well 3.50. On others, 64 running at once, 16 tokens proposed:
5.3 without the rollout's own votes, 6.0 with them, and for the longest sample, which drifts from the other texts,
1.5 and 2.0.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.jit import kernel
from kernels.suffix_index.compiled import tables
from kernels.suffix_index.compiled.automaton import find, target_of, token_of, weight_of
from kernels.suffix_index.compiled.layout import INLINE, LISTED, NONE, NOWHERE, RIVALS, SIZE_BITS, SIZES
from kernels.suffix_index.compiled.tables import SHARED_ORDERS, look_up_shared

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.


ALONE, AGREED, OPPOSED = range(3)
"""Opinion of the other source: none, the same token, another token."""
_OPINIONS = 3

# Lower bounds of the classes; values below the first bound are a class as well. Occurrences are counted in units of
# the newest policy version, so that old ones count less; the bounds leave room for rounding.
_LENGTHS = (4, 6, 8, 12, 16, 32)
_OCCURRENCES = (1.01, 2.01, 5.01)
_SHARES = (0.5, 0.75, 0.99)
_FIRMNESS = (2, 3, 5, 10)
_SHARED = (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1) * (len(_SHARES) + 1) * _OPINIONS
_VOTED = _SHARED + len(SHARED_ORDERS) * (len(_FIRMNESS) + 1) * _OPINIONS
_CHANCES = (0.3, 0.5, 0.7, 0.85, 0.95)
# Predictions of the other texts for a token: none; this token; another one.
_SAID = 1 + 2 * (len(_CHANCES) + 1)
_RIVALS = _VOTED + tables.VOTES * _SAID
# Shares of a rival, and its rank among them.
_RIVAL_SHARES = (0.1, 0.2, 0.35)
RANKS = 2
KINDS = _RIVALS + (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1) * (len(_RIVAL_SHARES) + 1) * RANKS

# Weight of the priors, in predictions; when a kind has MEMORY predictions, older ones start to count less.
_PRIOR, _PRIOR_OF_VOTES = 8.0, 3.0
_MEMORY = np.float32(2048)
_HALF, _ONE = np.float32(0.5), np.float32(1)


@kernel
def _class_of(value, bounds):
    found = 0
    for bound in bounds:
        found += value >= bound
    return found


@kernel
def kind_of_match(length, occurrences, share, opinion):
    """Return the kind of a prediction of the prompt's automaton."""
    kind = _class_of(length, _LENGTHS) * (len(_OCCURRENCES) + 1) + _class_of(occurrences, _OCCURRENCES)
    return (kind * (len(_SHARES) + 1) + _class_of(share, _SHARES)) * _OPINIONS + opinion


@kernel
def kind_of_shared(order, firmness, opinion):
    """Return the kind of a prediction of the shared table; `order` is the place of its length in SHARED_ORDERS."""
    return _SHARED + (order * (len(_FIRMNESS) + 1) + _class_of(firmness, _FIRMNESS)) * _OPINIONS + opinion


@kernel
def kind_of_votes(votes, token, elsewhere, confidence):
    """Return the kind of a token with these votes, if other texts predict `elsewhere` (-1: nothing)."""
    said = 0
    if elsewhere >= 0:
        said = 1 + _class_of(confidence, _CHANCES)
        if elsewhere != token:
            said += len(_CHANCES) + 1
    return _VOTED + votes * _SAID + said


@kernel
def kind_of_rival(length, occurrences, share, rank):
    """Return the kind of a continuation in the prompt's automaton that is not the most frequent one."""
    kind = _class_of(length, _LENGTHS) * (len(_OCCURRENCES) + 1) + _class_of(occurrences, _OCCURRENCES)
    return _RIVALS + (kind * (len(_RIVAL_SHARES) + 1) + _class_of(share, _RIVAL_SHARES)) * RANKS + rank


@kernel
def chance(odds, kind):
    """Return the probability that a prediction of a kind comes true, in (0, 1)."""
    return odds[kind, 0] / odds[kind, 1]


@kernel
def judge(odds, kind, came_true):
    """Count whether a prediction came true."""
    odds[kind, 0] += _ONE if came_true else np.float32(0)
    odds[kind, 1] += _ONE
    if odds[kind, 1] > _MEMORY:
        odds[kind, 0] *= _HALF
        odds[kind, 1] *= _HALF


def prior_odds() -> NDArray[np.float32]:
    """Return prior odds: longer, firmer, unanimous and agreed predictions are likelier."""
    length = np.array([0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9])[:, None, None]
    occurrences = np.array([0.67, 0.8, 0.89, 0.95])[:, None]
    share = np.array([0.4, 0.6, 0.85, 1.0])
    order = np.linspace(0.35, 0.9, len(SHARED_ORDERS))[:, None]
    firmness = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    alone = np.concatenate([(length * occurrences * share).ravel(), (order * firmness).ravel()])
    sources = np.stack([alone, 1 - (1 - alone) / 2, alone * 0.6], axis=-1).ravel()
    votes = [each for vote in range(tables.VOTES) for each in _of_votes(vote)]
    rivals = np.tile(
        np.repeat((0.04, 0.12, 0.22, 0.33), RANKS), (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1)
    )
    chances = np.concatenate([sources, votes, rivals])
    weight = np.where(np.arange(KINDS) < _VOTED, _PRIOR, _PRIOR_OF_VOTES)
    return np.stack([chances * weight, weight], axis=-1).astype(np.float32)


def _of_votes(vote: int) -> list[float]:
    """Return the prior chances of a token with these votes, for all predictions of the other texts."""
    longest_for, longest_against = tables.most_known(vote)
    own = (
        0.1 if longest_for < 0 else 0.2 + 0.1 * longest_for - (0.1 if longest_against > longest_for else 0.0)
    )
    elsewhere = [(low + high) / 2 for low, high in pairwise((0.1, *_CHANCES, 1.0))]
    agreed = [
        1 - (1 - each) * (1 - own) if longest_for >= 0 else each * (0.9 if longest_against >= 0 else 1.0)
        for each in elsewhere
    ]
    return [own, *agreed, *(own * (1 - each) for each in elsewhere)]


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


# Longer matches need no look-up: the shared table has no longer context.
_LONGEST = SHARED_ORDERS[-1]
_NO_TOKEN = np.int64(-1)
_NO_KIND = np.int64(-1)


@kernel
def predict(arrays, state, match, hashes, hashed, weight, min_match):
    """Return the predictions: matched token and kind, shared token and kind, match length, and longer length.

    The token is -1 where a source has none; the source with the longer context decides. `weight` is the weight of
    an occurrence in the text, the unit in which others are counted.
    """
    states, edges = arrays.states, arrays.edges
    state, match = longest_match(states, state, match)
    matched, matched_kind, shared_kind = _NO_TOKEN, _NO_KIND, _NO_KIND
    best = np.int64(NONE)
    if match >= min_match and states[state].link != NOWHERE:
        best = np.int64(states[state].best)
        matched = np.int64(token_of(states, edges, state, best))
    order, shared, firmness = np.int64(-1), _NO_TOKEN, np.int64(0)
    if matched < 0 or match < _LONGEST:
        order, shared, firmness = look_up_shared(arrays.entries, hashes, hashed)
    opinion = ALONE if matched < 0 or shared < 0 else AGREED if matched == shared else OPPOSED
    if matched >= 0:
        total = states[state].total
        share = weight_of(states, edges, state, best) / total
        matched_kind = kind_of_match(match, total / weight, share, opinion)
    else:
        match = np.int64(0)
    if shared >= 0:
        shared_kind = kind_of_shared(order, firmness, opinion)
    length = match if order < 0 else max(match, np.int64(SHARED_ORDERS[order]))
    return matched, matched_kind, shared, shared_kind, match, length


@kernel
def elsewhere(odds, matched, matched_kind, shared, shared_kind, match, length):
    """Return (token or -1, probability) predicted by the other texts, by the longer context."""
    if matched >= 0 and match >= length:
        return matched, chance(odds, matched_kind)
    if shared >= 0:
        return shared, chance(odds, shared_kind)
    return _NO_TOKEN, np.float32(0)


@kernel
def choose(arrays, state, match, hashes, hashed, weight, min_match, salt, found):
    """Return the likeliest next token: (token or -1, probability, length of the other texts' context).

    `found` [recent.SHARED_ORDERS] int64 is a buffer.
    """
    matched, matched_kind, shared, shared_kind, match, length = predict(
        arrays, state, match, hashes, hashed, weight, min_match
    )
    token, confidence = elsewhere(arrays.odds, matched, matched_kind, shared, shared_kind, match, length)
    tables.look_up_recent(arrays.recent, hashes, hashed, salt, found)
    best_token, best = token, np.float32(0)
    if token >= 0:
        best = chance(arrays.odds, kind_of_votes(tables.votes(found, token), token, token, confidence))
    for i in range(len(found)):
        if found[i] >= 0 and found[i] != token:
            votes = tables.votes(found, found[i])
            likely = chance(arrays.odds, kind_of_votes(votes, found[i], token, confidence))
            if likely > best:
                best_token, best = found[i], likely
    return best_token, best, length


@kernel
def learn_from(arrays, state, match, hashes, hashed, weight, min_match, token, salt, found):
    """Judge the predictions that would have been made where `token` came; `found` is a buffer."""
    matched, matched_kind, shared, shared_kind, own, length = predict(
        arrays, state, match, hashes, hashed, weight, min_match
    )
    token_there, confidence = elsewhere(arrays.odds, matched, matched_kind, shared, shared_kind, own, length)
    tables.look_up_recent(arrays.recent, hashes, hashed, salt, found)
    if token_there >= 0:
        kind = kind_of_votes(tables.votes(found, token_there), token_there, token_there, confidence)
        judge(arrays.odds, kind, token_there == token)
    for i in range(len(found)):
        if found[i] >= 0 and found[i] != token_there and _first_place(found, found[i]) == i:
            kind = kind_of_votes(tables.votes(found, found[i]), found[i], token_there, confidence)
            judge(arrays.odds, kind, found[i] == token)
    if arrays.scalars[RIVALS]:
        judge_rivals(arrays, state, match, weight, min_match, token)
    if matched >= 0:
        judge(arrays.odds, matched_kind, matched == token)
    if shared >= 0:
        judge(arrays.odds, shared_kind, shared == token)


@kernel
def _first_place(found, token):
    """Return the place of a token in `found`, in which it must be."""
    i = 0
    while found[i] != token:
        i += 1
    return i


@kernel
def advance(states, edges, state, match, token):
    """Return (state, tokens that it stands for) where a text ends after `token`, without changing the automaton."""
    edge = find(states, edges, state, token)
    while edge == NONE:
        if states[state].link == NOWHERE:
            return state, np.int64(0)
        state = np.int64(states[state].link)
        match = np.int64(states[state].length)
        edge = find(states, edges, state, token)
    return target_of(states, edges, state, edge), match + 1
