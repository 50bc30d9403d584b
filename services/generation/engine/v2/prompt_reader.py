"""Scores of prompts on V2: takes the place of vLLM's own, which computes the logits of a whole prompt at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.generation.engine.prompt_scores import PromptReading, PromptScores


class _ReadPrompt:
    """Scores of one prompt, in host memory already."""

    def __init__(self, scores: PromptScores) -> None:
        self._scores = scores

    def to_cpu_nonblocking(self) -> PromptScores:
        """Return the scores; the name is that of vLLM's tensors."""
        return self._scores


class PromptReader:
    """Reader of the prompts of one runner. Methods without a word of ours are called by vLLM's runner."""

    def __init__(self) -> None:
        """Read nothing so far."""
        # By sample id; preemption leaves them here, so that no prompt is told twice.
        self.readings: dict[str, PromptReading] = {}

    def begin(self, sample_id: str, prompt: list[int], most: int) -> None:
        """Score the prompt of a sample, with the `most` likeliest tokens of each place (ours)."""
        self.readings[sample_id] = PromptReading(list(prompt), most)

    def end(self, sample_id: str) -> None:
        """Forget a sample (ours). Unknown ones are ignored."""
        self.readings.pop(sample_id, None)

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Do nothing: `begin` is told."""

    def remove_request(self, req_id: str) -> None:
        """Do nothing: a preempted sample comes back."""

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        input_batch: Any,
        *unused: Any,
    ) -> dict[str, Any]:
        """Score the prompts that the step has computed; returns those that are complete, with the first tokens."""
        found: dict[str, Any] = {}
        for place, sample_id in enumerate(input_batch.req_ids) if self.readings else ():
            reading = self.readings.get(sample_id)
            if reading is None or reading.told:
                continue
            begin, first = (
                int(input_batch.num_computed_tokens_np[place]),
                int(input_batch.query_start_loc_np[place]),
            )
            count = int(input_batch.num_scheduled_tokens[place])
            reading.read(hidden_states[first : first + count], begin, logits_fn)
            if begin + count >= int(input_batch.prefill_len_np[place]):
                reading.told = True
                found[sample_id] = _ReadPrompt(reading.scores)
        return found

    def compute_prompt_token_id_logprobs(self, *unused: Any) -> dict[str, Any]:
        """Return nothing: nobody asks for it."""
        return {}
