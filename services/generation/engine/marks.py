"""Marks that the sampler passes to the engine with each emitted token.

They take the place of vLLM's rank of each token, which Paceline does not use. vLLM cuts marks, tokens and
log-probabilities alike at a stop token and at the length limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def pack(drafted: IntArray, reused: IntArray, width: int) -> npt.NDArray[np.int32]:
    """Return the marks of n samples with `width` places each, [n * width].

    Args:
        drafted: [n], draft tokens that the step verified.
        reused: [n], how many of the emitted tokens, the first, were taken over from a cached rollout.
        width: places of a sample.
    """
    marks = 2 * drafted[:, None] + (np.arange(width) < reused[:, None])
    return marks.reshape(-1).astype(np.int32)


def unpack(marks: npt.NDArray[Any]) -> tuple[int, int]:
    """Return (drafted, reused) of one sample from the marks of its tokens; (0, 0) without any."""
    if not len(marks):
        return 0, 0
    first = int(marks[0])
    return first >> 1, int((marks & 1).sum()) if first & 1 else 0
