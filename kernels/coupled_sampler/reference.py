"""The definition of coupled sampling in plain numpy: masks, samples, and verification of drafts.

A draft token is accepted if and only if it is the token that the target samples there. `threshold` specifies min-p,
top-k and top-p, `mass_of` their integers, `coupled_argmax_reference` the sample, and `verify` the acceptance.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coupled_sampler.noise import MAX_POSITION, Domain, gumbel

MASS_BITS = 40
LOWEST = np.float32(-27.5)
"""Below this difference a mass would be less than 2."""
MOST_ENTRIES = 1 << 22
"""Vocabulary up to which sums of masses fit 63 bits."""
LOG2E = np.float32(1.442695)
LN2_HIGH = np.float32(0.693359375)
"""ln 2 to 9 bits, so that its product with a small integer is exact."""
LN2_LOW = np.float32(-2.1219444e-4)
ROUND = np.float32(1.5 * 2**23)
"""Adding and subtracting it rounds to the nearest integer, ties to even."""
_OFF = np.float32(-np.inf)
EXP_SERIES = tuple(np.float32(c) for c in (1, 1, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040))


def floors(min_p: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return min-p's logarithm, which is added to the largest scaled logit, any shape; -inf where it is off."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log(min_p.astype(np.float64)).astype(np.float32)
    return np.where(min_p > 0, np.minimum(logarithms, np.float32(0)), np.float32(-np.inf))


def threshold(scaled: NDArray[np.float32], top_k: int, top_p: float, floor: np.float32 = _OFF) -> np.float32:
    """Return the threshold of one row [V] float32 without NaN or +inf; -inf where all masks are off.

    The specification of min-p, top-k and top-p: a token is kept if its scaled logit x = float32(logit / T) is at
    least the row's threshold. Equal logits are kept or dropped together, so no order among them has to be agreed
    upon:

        min-p   the threshold is float32(max x + floor), floor = float32(ln min_p) from the host. Off if min_p <= 0.
        top-k   the threshold is the k-th largest x: more than k tokens are kept where others equal it, as vLLM has
                it on CPU. Off if k < 1 or k >= V. Among the entries that min-p keeps: the higher of both
                thresholds.
        top-p   among the entries that those keep, x is kept if the tokens with a larger one hold less than the
        share
                p of the mass; the largest is always kept. That is vLLM's rule, but for equal logits across the cut,
                of which vLLM keeps those that its sort happens to put first. Off unless p < 1.

    So that every device cuts at the same token, masses are integers (`mass_of`), and sums of integers have no
    order. The comparison with p is float64(sum above) < float64(p) * float64(sum of all). 2**18 entries of mass
    2**40 stay below 2**58.
    """
    largest = scaled.max()
    if largest == -np.inf:
        return _OFF
    lowest = np.float32(largest + floor)
    if 1 <= top_k < len(scaled):
        lowest = max(lowest, np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k])
    if not top_p < 1:
        return lowest
    # Entries without mass are never kept: all the mass is above them.
    ordered = np.sort(scaled[(scaled >= lowest) & (scaled - largest > LOWEST)])
    masses = mass_of(ordered - largest)
    from_here = np.cumsum(masses[::-1])[::-1]
    kept = (from_here - masses).astype(np.float64) < np.float64(np.float32(top_p)) * np.float64(from_here[0])
    kept[-1] = True
    # The last of equal entries has no equal above it, so it decides for all of them.
    return np.float32(ordered[np.argmax(kept)])


def thresholds(
    scaled: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    floor: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return thresholds [R] of rows [R, V], a mask each; -inf for rows with NaN or +inf, which are not masked."""
    sound = scaled.max(axis=1) < np.inf
    own = np.full(len(scaled), _OFF) if floor is None else floor
    rows = zip(scaled, top_k, top_p, own, sound, strict=True)
    found = [threshold(row, int(k), float(p), f) if finite else _OFF for row, k, p, f, finite in rows]
    return np.array(found, dtype=np.float32)


def mass_of(below: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the int64 mass of entries x, given x - max x (<= 0, any shape).

        mass(x) = int64(exp32(x - max x) * 2**40), 0 for x - max x <= LOWEST

    exp32 is float32 additions and multiplications as written here, none fused.
    """
    d = np.maximum(below, LOWEST)
    n = (d * LOG2E + ROUND) - ROUND
    r = (d - n * LN2_HIGH) - n * LN2_LOW
    series = np.full_like(r, EXP_SERIES[-1])
    for coefficient in EXP_SERIES[-2::-1]:
        series = series * r + coefficient
    scale = ((n.astype(np.int32) + np.int32(127 + MASS_BITS)) << np.int32(23)).view(np.float32)
    return np.where(below > LOWEST, (series * scale).astype(np.int64), 0)


INVALID = -1
"""Token of a row that cannot be sampled, so that the engine can fail only that sample."""


def coupled_argmax_reference(
    logits: NDArray[np.float32],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    temperature: NDArray[np.float32],
    domain: Domain = Domain.TOKEN,
) -> NDArray[np.int64]:
    """Return argmax_v(logit_v / T + g(seed, position, v)) for each row; ties go to the lowest token id.

    logits [N, V], the rest [N]; returns [N] token ids. Temperature 0 is greedy (no noise). An entry of -inf
    never wins. INVALID for a row with a NaN or +inf logit, without any finite scaled logit, with a
    temperature that is negative or not finite, or with a position outside [0, 2**32).
    """
    return np.array(
        [
            _sample_row(row, int(seed), int(position), np.float32(t), domain)
            for row, seed, position, t in zip(logits, seeds, positions, temperature, strict=True)
        ],
        dtype=np.int64,
    )


def _sample_row(
    row: NDArray[np.float32], seed: int, position: int, temperature: np.float32, domain: Domain
) -> int:
    if not _is_valid(row, position, temperature):
        return INVALID
    if temperature == 0:
        return int(np.argmax(row))
    with np.errstate(over="ignore", under="ignore"):
        scores = row / temperature + gumbel(seed, position, len(row), domain)
    best = int(np.argmax(scores))
    return INVALID if scores[best] == -np.inf else best


def _is_valid(row: NDArray[np.float32], position: int, temperature: np.float32) -> bool:
    """Return True if the row defines a distribution: the maximum is NaN if any entry is."""
    return (
        math.isfinite(row.max())
        and math.isfinite(temperature)
        and bool(temperature >= 0)
        and 0 <= position <= MAX_POSITION
    )


UNSAMPLED = -2
"""Token of a row behind a request's first mismatch, which is not needed."""


def check_ragged(rows: int, drafts: int, cu_rows: NDArray[np.int64]) -> None:
    """Raise ValueError unless `cu_rows` [N + 1] cuts the rows into N requests of k >= 0 drafts and k + 1 rows."""
    if cu_rows.ndim != 1 or len(cu_rows) < 1 or cu_rows[0] != 0 or cu_rows[-1] != rows:
        raise ValueError(f"cu_rows must ascend from 0 to the {rows} rows, got {_ends(cu_rows)}")
    if (np.diff(cu_rows) < 1).any():
        raise ValueError("every request needs at least one row")
    requests = len(cu_rows) - 1
    if drafts != rows - requests:
        raise ValueError(f"{requests} requests of {rows} rows take {rows - requests} drafts, got {drafts}")


def verify(tokens: Any, draft_ids: Any, cu_rows: Any) -> NDArray[np.int64]:
    """Return how many tokens each request emits: accepted drafts + 1.

    tokens [R] the target's token of every row; request n has rows cu_rows[n] : cu_rows[n + 1], row i of it
    follows its first i drafts; draft_ids [R - N] are the drafts of all requests, one after the other.
    A row without a token (negative) ends its request, as its last emitted token. Returns [N].
    """
    tokens, draft_ids, cu_rows = (np.asarray(a, dtype=np.int64) for a in (tokens, draft_ids, cu_rows))
    check_ragged(len(tokens), len(draft_ids), cu_rows)
    last = np.zeros(len(tokens), dtype=bool)
    last[cu_rows[1:] - 1] = True
    stop = last | (tokens < 0)
    stop[~last] |= tokens[~last] != draft_ids
    stops = np.flatnonzero(stop)
    first = stops[np.searchsorted(stops, cu_rows[:-1])]
    counts: NDArray[np.int64] = first - cu_rows[:-1] + 1
    return counts


def _ends(cu_rows: NDArray[np.int64]) -> str:
    return f"{cu_rows.flat[0]}..{cu_rows.flat[-1]}" if cu_rows.size else "nothing"
