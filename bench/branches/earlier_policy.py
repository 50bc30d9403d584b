"""Choices of the policy of the step before, asked at every position of the real samples behind their real tokens.

With the sample's own noise its first choice is the token that the policy most likely samples: arg-max of
logit/T + noise under the older weights. A tree would verify its second choice, too; where that one is the sample's
token, the second branch would have saved the step that the mismatch costs. The same with noise of the drafter's own
says what a tree is worth without coupling.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from bench.branches.choices import BranchCounts, Choices, lead, ranks_of
from bench.trajectory import Trajectory
from kernels.coupled_sampler.noise import gumbel
from paceline import SampleKey

# What tells a drafter's own noise from the samples'.
_OTHER = 0x5DEECE66D

Scores = NDArray[np.float32]


def measure(trajectory: Trajectory, temperature: float = 1.0) -> tuple[BranchCounts, BranchCounts]:
    """Over all steps but the first: with the samples' noise, and with noise of the drafter's own."""
    coupled, own = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for place in range(1, len(trajectory.steps)):
        for _, logits, tokens, seed in _rows(trajectory, place):
            scores = logits / np.float32(temperature)
            coupled.append(ranks_of(with_noise(scores, seed), tokens))
            own.append(ranks_of(with_noise(scores, seed ^ _OTHER), tokens))
    return BranchCounts.of(coupled), BranchCounts.of(own)


def choices(trajectory: Trajectory, place: int, coupled: bool) -> dict[SampleKey, Choices]:
    """Return the choices for each sample of a step: with its noise, or by probability alone."""
    found = {}
    for key, logits, tokens, seed in _rows(trajectory, place):
        scores = with_noise(logits, seed) if coupled else logits
        # The first token is the prefill's.
        ranks, certainty = ranks_of(scores[1:], tokens[1:]), lead(scores[1:])
        found[key] = Choices(ranks[None], certainty[None])
    return found


def with_noise(logits: Scores, seed: int) -> Scores:
    """Return logits [n, V] with a seed's noise of the response positions from the first on."""
    return logits + noise_of(seed, *logits.shape)


@lru_cache(maxsize=1024)
def noise_of(seed: int, tokens: int, vocabulary: int) -> Scores:
    """Return a seed's noise of the first response positions, [tokens, vocabulary]."""
    return np.stack([gumbel(seed, position, vocabulary) for position in range(tokens)])


def _rows(trajectory: Trajectory, place: int) -> Iterator[tuple[SampleKey, Scores, NDArray[np.int64], int]]:
    """For each sample of a step: logits [n, V] of the weights of the step before, its tokens [n], and its seed."""
    step, model = trajectory.steps[place], _load(trajectory.steps[place - 1].weights)
    prompts = {group.prompt_id: [int(each) for each in group.prompt_token_ids] for group in step.groups}
    for key, sample in step.samples.items():
        prompt, tokens = prompts[key.prompt_id], sample.token_ids.astype(np.int64)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
        yield key, logits.float().numpy(), tokens, sample.seed


def _load(weights: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()  # type: ignore[no-any-return]
