"""Diversity of a group's cached rollouts, and the samples that may still reuse theirs. Pure.

A group whose rollouts have become alike teaches little, and reusing them keeps them alike. Below a floor of
diversity part of the samples is therefore generated afresh: the share that reuses its cached rollout falls
linearly from all of them at the floor to none where every rollout is the same one.

Which samples those are is decided by a uniform keyed by the sample's seed, so that it is the same on every
instance, and new in every step.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAM = 4
"""Tokens of an n-gram: long enough that unlike texts share few, short enough that paraphrases share some."""
_PERSON = b"paceline-diverse"
# Odd 64-bit constants (fractions of square roots of primes): they make one integer of an n-gram. Two unlike
# n-grams of a group get the same one with a probability of about 2**-64.
_MIX = np.array(
    [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1], dtype=np.uint64
)


def distinct_share(rollouts: Sequence[Sequence[int]]) -> float:
    """Return the share of distinct n-grams in all n-grams of the rollouts, in (0, 1].

    What a rollout repeats within itself counts once, so 1 means that no two rollouts share an n-gram, and
    1 / len(rollouts) that all are the same. Empty rollouts count for nothing; without any other it is 1.
    """
    grams = [_ngrams(rollout) for rollout in rollouts if len(rollout)]
    total = sum(len(each) for each in grams)
    if total == 0:
        return 1.0
    return len(np.unique(np.concatenate(grams))) / total


def keep(seed: int, distinct: float, floor: float) -> bool:
    """Return True if the sample with this seed reuses its cached rollout.

    It does with probability distinct / floor, at most 1; `floor` is in (0, 1].
    """
    return _uniform(seed) * floor < distinct


def reuse_allowed(rollouts: Sequence[Sequence[int]], floor: float, seed: int) -> bool:
    """Return True if a sample may reuse its cached rollout, by the cached rollouts of its whole group (token ids).

    ValueError when `floor` is not in (0, 1].
    """
    if not 0 < floor <= 1:
        raise ValueError(f"the diversity floor must be in (0, 1], got {floor}")
    return keep(seed, distinct_share(rollouts), floor)


def _ngrams(rollout: Sequence[int]) -> NDArray[np.uint64]:
    """Return the distinct n-grams of one rollout, each as an integer; a shorter rollout is one n-gram."""
    # One is added so that padding, which is 0, is no token.
    tokens = np.asarray(rollout, dtype=np.uint64) + np.uint64(1)
    if len(tokens) < NGRAM:
        tokens = np.pad(tokens, (0, NGRAM - len(tokens)))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    # Products and sums are meant to wrap around.
    mixed: NDArray[np.uint64] = (windows * _MIX).sum(axis=1, dtype=np.uint64)
    return np.unique(mixed)


def _uniform(seed: int) -> float:
    """Return a number in [0, 1) with 53 bits, a function of the seed that nothing else uses."""
    digest = hashlib.blake2b(struct.pack("<Q", seed), digest_size=8, person=_PERSON).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
