"""Calibration of predictions: how often those of each kind come true, learned from the growing rollouts.

The kind of a prediction is its evidence: for the prompt's automaton, the length of the match, the number of
occurrences and the token's share of them; for the shared table, the length of the context and its firmness; for
both, also the opinion of the other one. A rival, which the automaton has seen less often than another token, has
its share and rank. The kind of the token that is proposed in the end is how the rollout's own
latest occurrences vote on it, and what the other texts predict with what probability. Kinds are numbered; odds
[KINDS, 2] hold how many predictions of each came true, and how many were made.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.jit import kernel
from kernels.suffix_index.compiled import recent
from kernels.suffix_index.compiled.shared import ORDERS

ALONE, AGREED, OPPOSED = range(3)
"""Opinion of the other source: none, the same token, another token."""
_OPINIONS = 3

# Lower bounds of the classes; what is below the first is a class of its own. Occurrences are counted in those
# of the newest policy version, so that old ones count less; the bounds leave room for rounding.
_LENGTHS = (4, 6, 8, 12, 16, 32)
_OCCURRENCES = (1.01, 2.01, 5.01)
_SHARES = (0.5, 0.75, 0.99)
_FIRMNESS = (2, 3, 5, 10)
_SHARED = (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1) * (len(_SHARES) + 1) * _OPINIONS
_VOTED = _SHARED + len(ORDERS) * (len(_FIRMNESS) + 1) * _OPINIONS
_CHANCES = (0.3, 0.5, 0.7, 0.85, 0.95)
# Predictions of the other texts for a token: none; this token; another one.
_SAID = 1 + 2 * (len(_CHANCES) + 1)
_RIVALS = _VOTED + recent.VOTES * _SAID
# Shares of a rival, and its rank among them.
_RIVAL_SHARES = (0.1, 0.2, 0.35)
RANKS = 2
KINDS = _RIVALS + (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1) * (len(_RIVAL_SHARES) + 1) * RANKS

# The priors count as so many predictions; when a kind has MEMORY, older ones start to count less.
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
    """Return the kind of a prediction of the shared table; `order` is the place of its length in ORDERS."""
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
    order = np.linspace(0.35, 0.9, len(ORDERS))[:, None]
    firmness = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    alone = np.concatenate([(length * occurrences * share).ravel(), (order * firmness).ravel()])
    sources = np.stack([alone, 1 - (1 - alone) / 2, alone * 0.6], axis=-1).ravel()
    votes = [each for vote in range(recent.VOTES) for each in _of_votes(vote)]
    rivals = np.tile(
        np.repeat((0.04, 0.12, 0.22, 0.33), RANKS), (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1)
    )
    chances = np.concatenate([sources, votes, rivals])
    weight = np.where(np.arange(KINDS) < _VOTED, _PRIOR, _PRIOR_OF_VOTES)
    return np.stack([chances * weight, weight], axis=-1).astype(np.float32)


def _of_votes(vote: int) -> list[float]:
    """Return the prior chances of a token with these votes, for all predictions of the other texts."""
    longest_for, longest_against = recent.most_known(vote)
    own = (
        0.1 if longest_for < 0 else 0.2 + 0.1 * longest_for - (0.1 if longest_against > longest_for else 0.0)
    )
    elsewhere = [(low + high) / 2 for low, high in pairwise((0.1, *_CHANCES, 1.0))]
    agreed = [
        1 - (1 - each) * (1 - own) if longest_for >= 0 else each * (0.9 if longest_against >= 0 else 1.0)
        for each in elsewhere
    ]
    return [own, *agreed, *(own * (1 - each) for each in elsewhere)]
