"""What decoding of given samples would have been, from how likely each place of each draft is right. Pure.

The tokens of a sample are fixed. A draft that starts behind a token is accepted up to its first wrong place, the
target's own token follows, and the next draft starts behind that one. Places are right independently of each other:
with the sample's own noise each surely is or is not, without it each is with some probability, and then everything
here is an expectation, computed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Replayed:
    """One sample, or the sum of several; numbers are expectations where places are uncertain."""

    tokens: int
    """That were decoded with drafts: all of a response but its first."""
    verifications: float
    """Drafts that were verified."""
    offered: NDArray[np.float64]
    """[depth]: drafts whose tokens before this place were all accepted, and that had this place."""
    accepted: NDArray[np.float64]
    """[depth]: those of which this place was accepted, too."""

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(
            self.tokens + other.tokens,
            self.verifications + other.verifications,
            self.offered + other.offered,
            self.accepted + other.accepted,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification: the accepted ones and the one that follows; 0 without any."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def by_place(self) -> tuple[float, ...]:
        """Share of each place that is accepted, if all before it were; 0 where none ever was."""
        return tuple(float(a / o) if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True))


def nothing(depth: int) -> Replayed:
    """No sample."""
    return Replayed(0, 0.0, np.zeros(depth), np.zeros(depth))


def replay(right: NDArray[np.float64]) -> Replayed:
    """Decodes one sample with drafts of `depth` tokens.

    Args:
        right: [depth, n]: at [k, j + k] the probability that place k is right of the draft that is made when j of
            the n tokens are there; its column is the token that it is about.
    """
    depth, count = right.shape
    visits = np.zeros(count + 1)
    visits[0] = 1.0
    offered, accepted = np.zeros(depth), np.zeros(depth)
    for start in range(count):
        visit = visits[start]
        if visit == 0.0:
            continue
        places = min(depth, count - start)
        kept = visit * np.cumprod(right[np.arange(places), start + np.arange(places)])
        before = np.concatenate(([visit], kept))
        offered[:places] += before[:-1]
        accepted[:places] += kept
        # Wrong at place k: k accepted and the target's own follows, as it does when all are right, unless that was
        # the end.
        visits[start + 1 : start + 1 + places] += before[:-1] - kept
        visits[min(start + places + 1, count)] += kept[-1]
    return Replayed(count, float(visits[:count].sum()), offered, accepted)
