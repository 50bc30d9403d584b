"""Standard speculative sampling, for parity with the papers and as a baseline.

A draft token d is accepted with probability min(1, p(d) / q(d)), p the target's and q the drafter's
distribution. At the first rejection the token is drawn from max(p - q, 0), renormalised; after the last draft
from p. A draft without probabilities is a certainty of its drafter (q is 1 at d): accepted with p(d), else p
without d. Every token is a sample of the target whatever the drafts, but *which* token depends on them.

All randomness is keyed by (seed, position), so a run repeats. It is kept apart from the noise of coupled
sampling (`Domain.TOKEN`), with which drafts may have been made: a residual drawn with the noise that chose
the rejected draft would not be a sample of the residual.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.coupled_sampler.cpu import coupled_argmax
from kernels.coupled_sampler.noise import Domain, Purpose
from kernels.coupled_sampler.philox import philox4x32
from kernels.coupled_sampler.verify import UNSAMPLED

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def rejection_verify(
    logits: FloatArray,
    seeds: npt.NDArray[np.uint64],
    positions: IntArray,
    temperature: FloatArray,
    drafts: IntArray,
    cu: IntArray,
    draft_probs: FloatArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Verify drafts by rejection; layout, greedy and invalid rows as in `coupled_verify`.

    Args:
        logits: [R, V]; a sample with k drafts has k + 1 rows.
        seeds, positions, temperature: one per sample, [N].
        drafts: [R - N].
        cu: [N + 1], the rows of each sample.
        draft_probs: [R - N, V], the distribution each draft was drawn from; None: certainties.

    Returns:
        (tokens [R], counts [N]): sample n emits tokens[cu[n] : cu[n] + counts[n]].
    """
    n = len(cu) - 1
    owner = np.repeat(np.arange(n), np.diff(cu))
    offset = np.arange(cu[-1]) - cu[:-1][owner]
    drafted = np.delete(np.arange(cu[-1]), cu[1:] - 1)
    p = _probabilities(logits[drafted], temperature[owner[drafted]])
    places = positions[owner[drafted]] + offset[drafted]
    accepted = _accept(p, drafts, draft_probs, uniforms(seeds[owner[drafted]], places, Purpose.REJECTION))
    counts = _first_rejections(accepted, drafted, cu) + 1
    last = cu[:-1] + counts - 1
    tokens = np.full(len(logits), UNSAMPLED, np.int64)
    kept = offset[drafted] < counts[owner[drafted]] - 1
    tokens[drafted[kept]] = drafts[kept]
    rejected = np.flatnonzero(last < cu[1:] - 1)
    # Drafts are numbered without the last row of each sample before them.
    draft = last[rejected] - rejected
    final, divisor = logits[last].copy(), temperature.astype(np.float32)
    if draft_probs is None:
        # Not in a row with NaN, which must stay one.
        sound = ~np.isnan(p[draft]).any(axis=1)
        final[rejected[sound], drafts[draft[sound]]] = -np.inf
    else:
        final[rejected] = _residual_logits(p[draft], draft_probs[draft])
        divisor[rejected] = divisor[rejected] > 0
    tokens[last] = coupled_argmax(final, seeds, positions + counts - 1, divisor, domain=Domain.RESIDUAL)
    return tokens, counts


def uniforms(seeds: npt.NDArray[np.uint64], positions: IntArray, purpose: Purpose) -> npt.NDArray[np.float64]:
    """Return `kernels.coupled_sampler.noise.uniform` for many (seed, position) pairs at once, [n] each."""
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 1] = positions
    counter[:, 2] = Domain.UNIFORM
    counter[:, 3] = purpose
    # A key of two words per counter: the rounds are written for one, and broadcast.
    key: Any = (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32))
    return (philox4x32(counter, key)[:, 0].astype(np.float64) + 0.5) * 2.0**-32


def _probabilities(logits: FloatArray, temperature: FloatArray) -> npt.NDArray[np.float64]:
    """Return the target's distribution in each row, [n, V]; one-hot at temperature 0, NaN if invalid."""
    greedy = temperature == 0
    divisor = np.where(greedy, 1, temperature).astype(np.float64)
    with np.errstate(invalid="ignore"):
        scaled = logits / divisor[:, None]
        scaled -= scaled.max(axis=1, keepdims=True, initial=-np.inf)
        p = np.exp(scaled)
        p /= p.sum(axis=1, keepdims=True)
    best = np.flatnonzero(greedy & ~np.isnan(p).any(axis=1))
    p[best] = 0
    p[best, logits[best].argmax(axis=1)] = 1
    return p


def _accept(
    p: npt.NDArray[np.float64], drafts: IntArray, q: FloatArray | None, u: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return whether each draft token is accepted given those before it, [n]; False in NaN rows."""
    each = np.arange(len(drafts))
    offered = 1.0 if q is None else q[each, drafts].astype(np.float64)
    accepted: npt.NDArray[np.bool_] = u * offered < p[each, drafts]
    return accepted


def _first_rejections(accepted: npt.NDArray[np.bool_], drafted: IntArray, cu: IntArray) -> IntArray:
    """Return the number of drafts accepted before the first rejection of each sample, [N]."""
    stop = np.ones(cu[-1], bool)
    stop[drafted] = ~accepted
    stops = np.flatnonzero(stop)
    first: IntArray = stops[np.searchsorted(stops, cu[:-1])]
    return first - cu[:-1]


def _residual_logits(p: npt.NDArray[np.float64], q: FloatArray) -> FloatArray:
    """Return logits at temperature 1 of max(p - q, 0), or of p if rounding left nothing."""
    residual = np.maximum(p - q, 0)
    empty = residual.sum(axis=1) == 0
    residual[empty] = p[empty]
    with np.errstate(divide="ignore"):
        return np.log(residual).astype(np.float32)
