"""Continuations that the index predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Continuations:
    """Continuations of n growing rollouts.

    tokens [n, window] int32 and shares [n, window] float32: predicted tokens and, for each, the estimated
    probability that it comes if all before it have; only the first counts[i] of row i are valid. counts [n]
    int32: predicted tokens, 0 for none. matches [n] int32: context tokens on which the first one is based.
    """

    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    matches: npt.NDArray[np.int32]
