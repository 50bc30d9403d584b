"""Forecasts of the steps of one server: which calls are to come in the next one, and which were. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from paceline import types as t
from paceline.epoch_order import EpochOrder

_MOST_PROMPTS, _MOST_TOKENS = 1 << 16, 1 << 24


class StepForecast:
    """Prompts of the steps so far, and the samples that were announced of the present one.

    verl's calls have no names, and their seeds go by the batches that they come into. The announced samples of a
    prompt have the one seed `run_seed`, so they must be submitted together, and once in a step.
    """

    def __init__(self, run_id: str, seed: str) -> None:
        digest = hashlib.blake2b(f"{seed}.announced".encode(), digest_size=8).digest()
        self.run_seed = int.from_bytes(digest, "little")
        self._run_id = run_id
        self._order = EpochOrder(_MOST_PROMPTS, _MOST_TOKENS)
        self._step = -1
        self._asked: Counter[str] = Counter()
        """Calls of each prompt in the present step."""
        self._coming: tuple[int, dict[str, int]] = (-1, {})
        """Step that was announced last, and its samples by prompt."""
        self._left: dict[str, int] = {}
        """Announced samples of the present step by prompt, of prompts that were not taken yet."""

    def ask(
        self, step: int, prompt_id: str, prompt_token_ids: Sequence[int], sampling: t.SamplingParams
    ) -> t.BatchHint | None:
        """Note a call in a step; return a hint of the next step where that is forecast."""
        if step != self._step:
            self._step = step
            self._asked.clear()
            announced, samples = self._coming
            self._left = samples if announced == step else {}
        slot = self._asked[prompt_id]
        self._asked[prompt_id] += 1
        hint = self._order.ask(
            t.SampleRequest(
                self._run_id,
                prompt_id,
                prompt_token_ids,
                slot=slot,
                step=step,
                sampling=sampling,
                run_seed=self.run_seed,
            )
        )
        if hint is not None:
            self._coming = (hint.step, {group.prompt_id: group.samples for group in hint.groups})
        return hint

    def wanted(self, prompt_id: str) -> int:
        """Return how many samples of a prompt were announced of the present step; 0 once they were taken."""
        return self._left.get(prompt_id, 0)

    def take(self, step: int, prompt_id: str) -> None:
        """Note that samples of the prompt get the announced seed: later ones of the step must have another."""
        if step == self._step:
            self._left.pop(prompt_id, None)
