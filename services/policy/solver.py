"""ReSpec's solver (section 5.2): an offline search for the best speculation of each active batch size. Pure.

ReSpec's configuration is (s, t, n): s speculative rounds of the drafter, branching factor t, n drafted tokens that
are verified together. Here they mean:

- s: forward passes that a drafter makes one after the other, each a token deeper (self_w4, eagle3). Drafters that
  look tokens up (given, suffix) make none: s is 0, and drafting is free.
- t: candidates for each position. The engine verifies chains, so it is 1 in an instance; trees are searched by the
  simulator. With t candidates a position is lost only when all of them are wrong.
- n: draft tokens of a sample in a step: t at each of n / t positions, the draft length for a chain.

What ReSpec profiles is the calibrated step-time model here, and its acceptance is what was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Active batch sizes that a table has rows for."""


class Seconds(Protocol):
    """Predicts step times; see `services.policy.step_time.StepTime`."""

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True)
class Configuration:
    """(s, t, n) as above; n = 0 is plain decoding."""

    s: int = 0
    t: int = 1
    n: int = 0

    @property
    def depth(self) -> int:
        """Positions that are drafted."""
        return self.n // self.t


PLAIN = Configuration()


@dataclass(frozen=True, slots=True)
class Row:
    """The best configuration for up to `batch` active samples, and its predicted speedup over plain decoding."""

    batch: int
    best: Configuration
    speedup: float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by ascending batch size. Above the last one nothing is drafted."""

    rows: tuple[Row, ...]

    def look_up(self, requests: int) -> Row:
        """The row for so many active samples: the next larger one, which drafts no more than would pay."""
        place = bisect_left([row.batch for row in self.rows], requests)
        return self.rows[place] if place < len(self.rows) else Row(requests, PLAIN, 1.0)


def solve(
    target: Seconds,
    acceptance: Sequence[float],
    context: float,
    *,
    drafter: Seconds | None = None,
    branchings: Sequence[int] = (1,),
    batches: Sequence[int] = BATCHES,
    margin: float = 0.0,
) -> Table:
    """Search all configurations for each batch size.

    Args:
        target: step times of the model.
        acceptance: for each position of a draft the probability that its token is kept when all before it are, for
            one candidate; its length is the longest draft.
        context: mean length of a sample, in tokens.
        drafter: step times of a drafter that makes a forward pass for each position; None: drafts are free.
        branchings: values of t that may be tried.
        batches: active batch sizes.
        margin: least gain, as a share, for which anything is drafted.
    """
    return Table(
        tuple(_best(target, drafter, acceptance, context, branchings, b, margin) for b in sorted(batches))
    )


def _best(
    target: Seconds,
    drafter: Seconds | None,
    acceptance: Sequence[float],
    context: float,
    branchings: Sequence[int],
    batch: int,
    margin: float,
) -> Row:
    plain = float(target.seconds(batch, batch, batch * context))
    best = Row(batch, PLAIN, 1.0)
    for t in branchings:
        expected = _expected(acceptance, t)
        depths = np.arange(1, len(acceptance) + 1)
        verify = target.seconds(batch, batch * (1 + t * depths), batch * context)
        draft = np.zeros(len(depths))
        if drafter is not None:
            # Each pass drafts the next position for every candidate that was kept of the one before.
            passes = drafter.seconds(batch, batch * t, batch * context + batch * (depths - 1))
            draft = np.cumsum(passes)
        gains = (1 + expected) * plain / (verify + draft)
        place = int(np.argmax(gains)) if len(gains) else -1
        if place >= 0 and gains[place] > best.speedup and gains[place] >= 1 + margin:
            depth = int(depths[place])
            best = Row(
                batch, Configuration(depth if drafter is not None else 0, t, t * depth), float(gains[place])
            )
    return best


def _expected(acceptance: Sequence[float], t: int) -> NDArray[np.float64]:
    """Tokens accepted of drafts of every depth, [depth]: the sums of the survival products."""
    kept = 1 - (1 - np.clip(np.asarray(acceptance, np.float64), 0, 1)) ** t
    return np.cumsum(np.cumprod(kept))


def measured_acceptance(reached: Sequence[float], kept: Sequence[float], prior: float) -> list[float]:
    """Acceptance by position from counts, smoothed by a few tokens' worth of what the position before had.

    Args:
        reached: for each position, tokens that were verified with all before them accepted.
        kept: of these, the ones accepted.
        prior: what is assumed of the first position before anything is seen.
    """
    found: list[float] = []
    for tried, took in zip(reached, kept, strict=True):
        found.append((prior * _PRIOR_TOKENS + took) / (_PRIOR_TOKENS + tried))
        prior = found[-1]
    return found


_PRIOR_TOKENS = 16.0
