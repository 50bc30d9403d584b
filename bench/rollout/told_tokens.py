"""Make stock vLLM's sampler draw given tokens, so that all systems generate the same responses.

vLLM and Paceline draw with different noise. Without intervention they would answer the same prompts with different
responses, and the length of the longest one, which a step waits for, would decide every comparison. vLLM's runner
therefore does all of its work, sampling and verification included, and its tokens are then replaced by the recorded
ones. A draft is accepted up to its first difference from the record. The record was drawn from the same policy
independently of the draft, so a draft token x is accepted with probability p(x). vLLM's rejection sampler has the
same acceptance probability for drafters that report no probabilities (n-gram, suffix).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
_END, _NO_DRAFT = -1, -2
"""Padding after a recorded response, and after a draft: neither is a token, and they differ."""


@dataclass(slots=True)
class ToldDrafts:
    """Numbers of verified draft tokens, accepted ones, and verifications."""

    drafted: int = 0
    accepted: int = 0
    verified: int = 0


def told(window: Tokens, drafts: Tokens) -> tuple[Tokens, Tokens]:
    """Return the tokens of a step, [n, k + 1] padded with -1, and the number of accepted draft tokens, [n].

    Args:
        window: recorded tokens from each sample's position on, [n, k + 1].
        drafts: draft tokens, [n, k], padded with -2.
    """
    held = np.cumprod(drafts == window[:, :-1], axis=1).sum(axis=1)
    places = np.arange(window.shape[1])
    return np.where(places <= held[:, None], window, _END), held


def padded(drafts: Tokens, counts: Sequence[int], width: int) -> Tokens:
    """Return concatenated drafts of samples as rows, [n, width], padded with -2."""
    made = np.full((len(counts), width), _NO_DRAFT, np.int64)
    made[np.arange(width) < np.asarray(counts)[:, None]] = drafts
    return made


@dataclass(slots=True)
class ToldTokens:
    """Recorded responses by request id, and counts of verified drafts."""

    counts: ToldDrafts = field(default_factory=ToldDrafts)
    _table: Tokens = field(default_factory=lambda: np.empty((0, 1), np.int64))
    _rows: Mapping[str, int] = field(default_factory=dict)
    # Rows of the batch's requests, until the batch changes.
    _batch: list[str] = field(default_factory=list)
    _batch_rows: Tokens = field(default_factory=lambda: np.empty(0, np.int64))

    def begin(self, responses: Mapping[str, Sequence[int]], most_drafted: int) -> None:
        """Take the responses of a step, whose drafts have at most `most_drafted` tokens."""
        width = max(map(len, responses.values())) + most_drafted + 1
        self._table = np.full((len(responses), width), _END, np.int64)
        for row, tokens in enumerate(responses.values()):
            self._table[row, : len(tokens)] = tokens
        self._rows = {name: row for row, name in enumerate(responses)}
        self._batch, self.counts = [], ToldDrafts()

    def install(self) -> None:
        """Install this after the sampler of the runners of this process, which is repaired."""
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        drawn = GPUModelRunner._sample

        def sample(runner: Any, logits: torch.Tensor | None, metadata: Any) -> Any:
            output = drawn(runner, logits, metadata)
            # There are no rows while vLLM warms up.
            if self._rows:
                self._replace(runner.input_batch, output.sampled_token_ids, metadata)
            return output

        GPUModelRunner._sample = sample

    def _replace(self, batch: Any, drawn: torch.Tensor, metadata: Any) -> None:
        if batch.req_ids != self._batch:
            self._batch = list(batch.req_ids)
            self._batch_rows = np.array([self._rows[each] for each in self._batch], np.int64)
        rows, n = self._batch_rows, len(self._batch)
        at = batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]
        if metadata is None:
            drawn[:, 0] = torch.from_numpy(self._table[rows, at])
            return
        width = drawn.shape[1]
        window = self._table[rows[:, None], at[:, None] + np.arange(width)]
        drafts = padded(metadata.draft_token_ids.numpy(), metadata.num_draft_tokens, width - 1)
        tokens, held = told(window, drafts)
        drawn[:] = torch.from_numpy(tokens)
        self.counts.drafted += sum(metadata.num_draft_tokens)
        self.counts.accepted += int(held.sum())
        self.counts.verified += sum(map(bool, metadata.num_draft_tokens))


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each sample's value for its tokens, [n] -> [num_tokens]; `replace_from` becomes `replace_to`.

    vLLM 0.32's own function returns uninitialised memory on CPU (vllm#55005). A batch at temperature > 0 would be
    verified with arbitrary temperatures and accept garbage, which makes vLLM's methods look better than they are.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
