"""Share of decode steps that a token tree would save over a chain, when the drafter shares the sample's noise.

The drafter is the policy of the step before, asked at every position of the real samples behind their real tokens.
With the sample's own noise its first choice is the token that the policy most likely samples: arg-max of
logit/T + noise under the older weights. A tree would verify its second choice, too; where that one is the sample's
token, the second branch would have saved the step that the mismatch costs. The same with noise of the drafter's own
says what a tree is worth without coupling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from bench.trajectory import Trajectory
from kernels.coupled_sampler.noise import gumbel

_RANKS = 3
# What tells a drafter's own noise from the samples'.
_OTHER = 0x5DEECE66D


@dataclass(frozen=True, slots=True)
class Branches:
    """Tokens by the drafter's choice that they were: `first`, `second`, and all `tokens`."""

    tokens: int
    first: int
    second: int

    @property
    def accepted(self) -> float:
        """Share of the tokens that the drafter's first choice is."""
        return self.first / self.tokens

    @property
    def saved(self) -> float:
        """Share of the mismatches at which the second choice is the token."""
        missed = self.tokens - self.first
        return self.second / missed if missed else 0.0


def measure(trajectory: Trajectory, temperature: float = 1.0) -> tuple[Branches, Branches]:
    """Over all steps but the first: with the samples' noise, and with noise of the drafter's own."""
    coupled, own = np.zeros(_RANKS, np.int64), np.zeros(_RANKS, np.int64)
    for place in range(1, len(trajectory.steps)):
        model = _load(trajectory.steps[place - 1].weights)
        for logits, tokens, seed in _rows(trajectory, place, model):
            coupled += _ranks(logits / temperature, tokens, seed)
            own += _ranks(logits / temperature, tokens, seed ^ _OTHER)
    return _branches(coupled), _branches(own)


def _rows(
    trajectory: Trajectory, place: int, model: torch.nn.Module
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64], int]]:
    """For each sample of a step: logits [n, V] of the older weights, its tokens [n], and its seed."""
    step = trajectory.steps[place]
    prompts = {group.prompt_id: [int(each) for each in group.prompt_token_ids] for group in step.groups}
    for key, sample in step.samples.items():
        prompt, tokens = prompts[key.prompt_id], sample.token_ids.astype(np.int64)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
        yield logits.float().numpy(), tokens, sample.seed


def _ranks(logits: NDArray[np.float32], tokens: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return how many tokens are the drafter's first choice, its second choice, and neither."""
    noise = np.stack([gumbel(seed, position, logits.shape[1]) for position in range(len(tokens))])
    scores = logits + noise
    better = (scores > scores[np.arange(len(tokens)), tokens][:, None]).sum(1)
    return np.bincount(np.minimum(better, _RANKS - 1), minlength=_RANKS)


def _branches(counts: NDArray[np.int64]) -> Branches:
    return Branches(int(counts.sum()), int(counts[0]), int(counts[1]))


def _load(weights: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()  # type: ignore[no-any-return]
