"""Marks that the sampler passes to the engine with each emitted token, and the likeliest tokens of its position.

Marks take the place of vLLM's rank of each token, which Paceline does not use. vLLM cuts marks, tokens and
log-probabilities alike at a stop token and at the length limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

NO_TOKEN = -1
"""In place of a token where a sample asks for fewer of the likeliest than another of the step."""
ACCEPTED = 2
"""Part of the mark of a token that is an accepted draft."""


def pack(drafted: IntArray, accepted: IntArray, reused: IntArray, width: int) -> npt.NDArray[np.int32]:
    """Return the marks of n samples with `width` places each, [n * width].

    Args:
        drafted: [n], draft tokens that the step verified.
        accepted: [n], how many of the emitted tokens, the first, are draft tokens.
        reused: [n], how many of the emitted tokens, the first, were taken over from a cached rollout.
        width: places of a sample.
    """
    place = np.arange(width)
    marks = 4 * drafted[:, None] + ACCEPTED * (place < accepted[:, None]) + (place < reused[:, None])
    return marks.reshape(-1).astype(np.int32)


def pack_rows(drafted: torch.Tensor, accepted: torch.Tensor, reused: torch.Tensor) -> torch.Tensor:
    """Return the marks of R rows, [R] int32, where these are.

    Args:
        drafted: [R], draft tokens that the step verified of the row's sample.
        accepted: [R] bool, true if the row's token is an accepted draft.
        reused: [R] bool, true if it was taken over from a cached rollout.
    """
    return (4 * drafted + ACCEPTED * accepted + reused).to(torch.int32)


def unpack(marks: npt.NDArray[Any]) -> tuple[int, int, int]:
    """Return (drafted, accepted, reused) of one sample from the marks of its tokens; zeros without any.

    The last two count among the tokens that are left: behind a stop token there may have been more.
    """
    if not marks.size or not (first := marks.item(0)):
        return 0, 0, 0
    accepted = int((marks & ACCEPTED).sum()) // ACCEPTED if first & ACCEPTED else 0
    return first >> 2, accepted, int((marks & 1).sum()) if first & 1 else 0


def likeliest(logprobs: Any) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens of each position of one sample, and their log-probabilities, in order."""
    tokens = logprobs.logprob_token_ids
    if tokens.shape[1] == 1 or not len(tokens):
        return [], []
    wanted = slice(1, 1 + int((tokens[0, 1:] != NO_TOKEN).sum()))
    return tokens[:, wanted].ravel().tolist(), logprobs.logprobs[:, wanted].ravel().tolist()
