"""Group of a batch: the samples of one prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.v1 import sample_pb2


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """Samples of one prompt: `count` of them, from index `first`.

    `prefix` are response tokens that the caller brought along, with their log-probabilities if it knows them.
    `most_tokens` are those that a sample may come to, where its batch has an account.
    """

    prompt_id: str
    prompt_token_ids: Sequence[int]
    sampling: sample_pb2.SamplingParams
    expected_tokens: int = 0
    prefix: Sequence[int] = ()
    prefix_logprobs: Sequence[float] = ()
    first: int = 0
    count: int = 1
    most_tokens: int = 0
