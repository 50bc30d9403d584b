"""Continuations that the index predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Branches:
    """Alternatives to some predicted tokens of n growing rollouts, and how each goes on.

    tokens [n, m] int32; shares [n, m] float32: the estimated probability that a token comes if all before it in its
    path have, 0 where there is none; parents [n, m] int64: what it follows, -1 for the text itself, below the
    continuations' window a place there, and from there on a place of these tokens, before its own.
    """

    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32]
    parents: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Continuations:
    """Continuations of n growing rollouts.

    tokens [n, window] int32 and shares [n, window] float32: predicted tokens and, for each, the estimated
    probability that it comes if all before it have; only the first counts[i] of row i are valid. counts [n]
    int32: predicted tokens, 0 for none. matches [n] int32: context tokens on which the first one is based.
    branches: where they are asked for.
    """

    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    matches: npt.NDArray[np.int32]
    branches: Branches | None = None
