"""Standard speculative sampling, for parity with the papers and as a baseline.

Drafts come without probabilities: each is a certainty of its drafter (q is 1 at the draft d). So it is accepted
with probability p(d), p the target's distribution. At the first rejection the token is drawn from p without d,
renormalised; after the last draft from p. Every token is a sample of the target whatever the drafts, but *which*
token depends on them.

All randomness is keyed by (seed, position), so a run repeats. It is kept apart from the noise of coupled
sampling (`Domain.TOKEN`), with which drafts may have been made: a residual drawn with the noise that chose
the rejected draft would not be a sample of the residual.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.coupled_sampler.noise import Domain, Purpose
from kernels.coupled_sampler.philox import philox4x32
from services.generation.engine.sampling.rows import IntArray


def uniforms(seeds: npt.NDArray[np.uint64], positions: IntArray, purpose: Purpose) -> npt.NDArray[np.float64]:
    """Return `kernels.coupled_sampler.noise.uniform` for many (seed, position) pairs at once, [n] each."""
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 1] = positions
    counter[:, 2] = Domain.UNIFORM
    counter[:, 3] = purpose
    # A key of two words per counter: the rounds are written for one, and broadcast.
    key: Any = (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32))
    return (philox4x32(counter, key)[:, 0].astype(np.float64) + 0.5) * 2.0**-32
