"""How often predictions of a kind come true, learned from the growing rollouts.

A prediction is of a kind by what it rests on: of the prompt's automaton, the length of the match, the number of
occurrences and the share of the token among them; of the shared table, the length of the context and its firmness;
and of both, what the other one says. The token that is offered in the end is of a kind by how the rollout's own
latest occurrences vote on it, and by what the other texts say and how likely that is. Kinds are numbered; odds
[KINDS, 2] hold how many predictions of each came true, and of how many.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.coupled_sampler.jit import kernel
from services.drafts.index import recent
from services.drafts.index.shared import ORDERS

ALONE, AGREED, OPPOSED = range(3)
"""What the other source says: nothing, the same, something else."""
_OPINIONS = 3

# Lower bounds of the classes; what is below the first is a class of its own. Occurrences are counted in those of
# the newest policy version, so that old ones count less; the bounds leave room for rounding.
_LENGTHS = (4, 6, 8, 12, 16, 32)
_OCCURRENCES = (1.01, 2.01, 5.01)
_SHARES = (0.5, 0.75, 0.99)
_FIRMNESS = (2, 3, 5, 10)
_SHARED = (len(_LENGTHS) + 1) * (len(_OCCURRENCES) + 1) * (len(_SHARES) + 1) * _OPINIONS
_VOTED = _SHARED + len(ORDERS) * (len(_FIRMNESS) + 1) * _OPINIONS
_CHANCES = (0.3, 0.5, 0.7, 0.85, 0.95)
# What the other texts say of a token: nothing; that it comes; that another does.
_SAID = 1 + 2 * (len(_CHANCES) + 1)
KINDS = _VOTED + recent.VOTES * _SAID

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
    """The kind of a prediction of the prompt's automaton."""
    kind = _class_of(length, _LENGTHS) * (len(_OCCURRENCES) + 1) + _class_of(occurrences, _OCCURRENCES)
    return (kind * (len(_SHARES) + 1) + _class_of(share, _SHARES)) * _OPINIONS + opinion


@kernel
def kind_of_shared(order, firmness, opinion):
    """The kind of a prediction of the shared table; `order` is the place of the context length in ORDERS."""
    return _SHARED + (order * (len(_FIRMNESS) + 1) + _class_of(firmness, _FIRMNESS)) * _OPINIONS + opinion


@kernel
def kind_of_votes(votes, token, elsewhere, confidence):
    """The kind of a token with these votes, when other texts say that `elsewhere` comes (-1: nothing)."""
    said = 0
    if elsewhere >= 0:
        said = 1 + _class_of(confidence, _CHANCES)
        if elsewhere != token:
            said += len(_CHANCES) + 1
    return _VOTED + votes * _SAID + said


@kernel
def chance(odds, kind):
    """The probability that a prediction of a kind comes true, in (0, 1)."""
    return odds[kind, 0] / odds[kind, 1]


@kernel
def judge(odds, kind, came_true):
    """A prediction came true or not."""
    odds[kind, 0] += _ONE if came_true else np.float32(0)
    odds[kind, 1] += _ONE
    if odds[kind, 1] > _MEMORY:
        odds[kind, 0] *= _HALF
        odds[kind, 1] *= _HALF


def prior_odds() -> NDArray[np.float32]:
    """Odds of an index that has seen no rollout grow: longer, firmer, unanimous and agreed is likelier."""
    length = np.array([0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9])[:, None, None]
    occurrences = np.array([0.67, 0.8, 0.89, 0.95])[:, None]
    share = np.array([0.4, 0.6, 0.85, 1.0])
    order = np.linspace(0.35, 0.9, len(ORDERS))[:, None]
    firmness = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    alone = np.concatenate([(length * occurrences * share).ravel(), (order * firmness).ravel()])
    sources = np.stack([alone, 1 - (1 - alone) / 2, alone * 0.6], axis=-1).ravel()
    chances = np.concatenate([sources, [each for vote in range(recent.VOTES) for each in _of_votes(vote)]])
    weight = np.where(np.arange(KINDS) < _VOTED, _PRIOR, _PRIOR_OF_VOTES)
    return np.stack([chances * weight, weight], axis=-1).astype(np.float32)


def _of_votes(vote: int) -> list[float]:
    """The prior chances of a token with these votes, for all that other texts can say of it."""
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
