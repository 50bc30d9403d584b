"""What a LENIENT sample must be, from transformers and the reference noise, one position after the other.

The rule is written out here once more, for one position at a time: no rows, no chunks, no batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kernels.coupled_sampler.noise import Purpose, gumbel, uniform
from services.generation.engine.types import EngineRequest
from tests.support.oracle import FloatArray, Oracle, log_softmax


@dataclass(slots=True)
class Retraced:
    """What a response should have been. Of a position that is too close to call, what the response has is right.

    `verified` are the log-probabilities of the first `reused` tokens under the oracle's model, `logprobs` those
    that the result should carry.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    verified: list[float] = field(default_factory=list)
    reused: int = 0


@dataclass(frozen=True, slots=True)
class LenientOracle:
    """The oracle of a model, with the lenient rule. Decisions nearer than `tie` are the response's to make."""

    oracle: Oracle
    tie: float = 1e-4

    def retrace(self, request: EngineRequest, response: Sequence[int], reused: int) -> Retraced:
        """Go along a response that is said to have taken over its first `reused` tokens."""
        found = Retraced()
        logits = self.oracle.logits([*request.prompt, *response[:-1]])[len(request.prompt) - 1 :]
        following = not request.prefix
        for position, row in enumerate(logits):
            processed = self.oracle.process(request, list(response[:position]), row)
            own = log_softmax(processed if request.sampling.processed_logprobs else row)
            following = following and position < len(request.cached)
            following = following and self._takes_over(request, position, processed, own, position < reused)
            if following:
                token = request.cached[position]
                found.reused += 1
                found.verified.append(float(own[token]))
                found.logprobs.append(request.cached_logprobs[position])
            else:
                token = self._sample(request, position, processed, response[position])
                found.logprobs.append(float(own[token]))
            found.tokens.append(token)
        return found

    def _takes_over(
        self, request: EngineRequest, position: int, processed: FloatArray, own: FloatArray, said: bool
    ) -> bool:
        token, then = request.cached[position], request.cached_logprobs[position]
        if processed[token] == -np.inf or not math.isfinite(then):
            return False
        if request.sampling.temperature == 0:
            gap = float(processed.max() - processed[token])
            return gap == 0 if gap == 0 or gap > self.tie else said
        bound = min(1.0, request.lenience * math.exp(own[token] - then))
        u = uniform(request.seed, position, Purpose.LENIENT)
        return said if abs(u - bound) < self.tie else u < bound

    def _sample(self, request: EngineRequest, position: int, processed: FloatArray, said: int) -> int:
        scores = processed
        if request.sampling.temperature > 0:
            scores = processed + gumbel(request.seed, position, len(processed)).astype(np.float64)
        best = int(scores.argmax())
        return said if scores[best] - scores[said] < self.tie else best


def other_policy(source: Path, folder: Path, amount: float, seed: int = 1) -> Path:
    """Return the model of a folder with noise on its weights, each by `amount` of its deviation; the new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: weight + amount * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(source / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rollout(
    oracle: Oracle, prompt: Sequence[int], seed: int, length: int, end_token: int | None = None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return a response of a model at temperature 1, at most `length` tokens, and their log-probabilities."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    logprobs: list[float] = []
    for row in oracle.stream(prompt, tokens):
        own = log_softmax(row)
        tokens.append(int((own + random.gumbel(size=len(own))).argmax()))
        logprobs.append(float(np.float32(own[tokens[-1]])))
        if len(tokens) == length or tokens[-1] == end_token:
            break
    return tuple(tokens), tuple(logprobs)
