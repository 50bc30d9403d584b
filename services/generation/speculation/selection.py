"""Survival probabilities of proposed tokens, and the selection of tokens to verify by them.

The survival of a token is the probability that it and all tokens before it in its proposal are accepted. The
selection is compiled because every step waits for it, and a dozen numpy operations on small arrays take longer than
all of it compiled. numba is imported at first use, which must be after vLLM was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.late_module import LateModule
from services.generation.speculation.drafter import Proposals

_compiled: Any = LateModule("services.generation.speculation.compiled")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Types of the tokens and predictions of proposals. No other type is compiled while a step waits.
_CHECKED = (np.dtype(np.int32), np.dtype(np.float64))

# Share of the tokens of a draft whose expected acceptance makes a sample well served: about 0.97 for each of 16
# tokens. Above it another draft could gain at most a fifth of a token for each.
_WELL_SERVED = 0.8

# The grid has every size up to twice _FINE, and above it _FINE sizes in each octave.
_FINE, _OCTAVES = 16, 16
_GRID = np.concatenate([np.arange(1, _FINE), *[np.arange(_FINE, 2 * _FINE) << k for k in range(_OCTAVES)]])


@lru_cache(maxsize=1024)
def draft_token_counts(num_samples: int, limit: int, graphs: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Return the numbers of draft tokens that a step may verify, from 0 to at most `limit`, rising.

    Steps are restricted to sizes that recur, because kernels are specialised for the number of rows of a step: CPU
    matrix products are compiled for each new size, which takes as long as some steps of a small model, and only a
    limited number of them is cached; a GPU computes whole tiles and replays graphs captured for some sizes. So
    plans use a grid of sizes: the best size, or a few less. A coarser grid costs more than it saves, because every
    size left
    out is a token not verified. Where an engine has graphs, their sizes replace the grid up to the largest of them:
    steps of other sizes are padded.

    `num_samples` plus a returned number is the size of a graph, or above the largest graph a size of the grid.
    `limit` itself is also returned if no other number above 0 is, or if the next graph is beyond it. The array is
    cached and read-only.

    Args:
        num_samples: of the step.
        limit: most draft tokens.
        graphs: numbers of verified tokens for which the engine has graphs, rising.
    """
    largest = max(graphs, default=0)
    sizes = np.concatenate((np.array(graphs, np.int64), _GRID[largest < _GRID]))
    first, last = np.searchsorted(sizes, (num_samples, num_samples + limit), side="right")
    counts = np.concatenate(([0], sizes[first:last] - num_samples))
    if counts[-1] < limit and (len(counts) == 1 or num_samples + limit < largest):
        counts = np.append(counts, limit)
    counts.flags.writeable = False
    return counts


class SelectedCount(NamedTuple):
    """Best number of draft tokens of a step, 0 if there are none, with its predictions.

    `picks` [n] is the place of each sample's drafter, and `buckets` [b, 2] are the numbers and sums of these
    drafters' tokens by survival. `rate` is in tokens per second, `expected` counts accepted tokens, `seconds` is
    the time of the step and `token_seconds` the time that each of the last tokens adds to it.
    """

    picks: Ints
    buckets: Floats
    tokens: int
    rate: float
    expected: float
    seconds: float
    token_seconds: float


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for them."""
    first = Proposals(np.zeros((1, 1), np.int32), np.ones((1, 1)))
    if not (within(first.tokens, 0) and within(first.acceptance, 1)):
        raise RuntimeError("the compiled check of proposals is wrong")
    survival = survivals([first], np.ones(1, np.int64), 1)
    # A read-only array of the grid, as in real steps.
    found = search(survival, draft_token_counts(1, 1), np.ones(2))
    cut(survival, found)


def within(values: NDArray[Any], most: int) -> bool:
    """Return True if all values [n, w], at least one, are from 0 to `most`; NaN is not.

    Arrays of the types that `Proposals` names are checked in one pass.
    """
    if values.dtype in _CHECKED and values.flags.c_contiguous:
        return bool(_compiled.within(values, values.dtype.type(most)))
    return bool(0 <= values.min() <= values.max() <= most)


def survivals(made: Sequence[Proposals], room: Ints, width: int) -> Floats:
    """Return the survival by drafter, sample and position [d, n, width]; 0 stands for no token.

    `room` [n] is the number of tokens that each sample can verify.
    """
    survival = np.zeros((len(made), len(room), width))
    for proposals, found in zip(made, survival, strict=True):
        # Contiguous float64, so that no other signature is compiled while a step waits.
        _compiled.survive(np.ascontiguousarray(proposals.acceptance, np.float64), room, found)
    return survival


def well_served(made: Sequence[Proposals], room: Ints, width: int) -> Bools:
    """Return True for each sample [n] whose best proposal is expected to last for most of `width` tokens.

    Further proposals for it could hardly be better. `room` is as in `survivals`.
    """
    expected = survivals(made, room, width).sum(2).max(0, initial=0.0)
    return np.asarray(expected >= _WELL_SERVED * np.minimum(room, width))


def search(survival: Floats, counts: Ints, seconds: Floats, price: float = 0.0) -> SelectedCount:
    """Return the number of draft tokens with the best predicted rate, among the `counts` [c] above 0.

    Counts rise from 0; `seconds` [c] are the times of steps with them. Counts above the number of tokens are
    skipped; if none above 0 is left, the number of all tokens replaces them. Each sample's drafter is the one whose
    tokens' survival exceeds the price of a token most. ValueError unless each count has one time, because compiled
    code does not check its bounds.
    """
    if seconds.shape != counts.shape:
        raise ValueError(f"{seconds.size} step times for {counts.size} numbers of draft tokens")
    picks, buckets = np.empty(survival.shape[1], np.int64), np.empty((_compiled.BUCKETS, 2))
    return SelectedCount(picks, buckets, *_compiled.search(survival, counts, seconds, price, picks, buckets))


def cut(survival: Floats, found: SelectedCount) -> tuple[Ints, float]:
    """Return the selection that `search` found, which has more than 0 tokens.

    The selected tokens rank highest among the tokens of the picked drafters. They are beginnings of proposals,
    because survival falls along a proposal.

    Returns:
        The number of tokens of each sample [n], and the sum of survival.
    """
    lengths = np.empty_like(found.picks)
    return lengths, _compiled.cut(survival, found.picks, found.buckets, found.tokens, lengths)
