"""What travels with a sample from the engine to its sampler."""

from __future__ import annotations

from dataclasses import dataclass

from services.generation.engine.types import Verifier

# The key under which a sample's `SampleNoise` fields travel in SamplingParams.extra_args.
NOISE_KEY = "paceline_noise"


@dataclass(frozen=True, slots=True)
class SampleNoise:
    """What the sampler knows of one sample: its seed, and what vLLM's batch does not keep by row.

    `min_p` is a probability relative to the largest; `forbidden` may not be sampled before `min_tokens`
    response tokens are there.
    """

    seed: int
    min_p: float = 0.0
    min_tokens: int = 0
    forbidden: tuple[int, ...] = ()
    processed_logprobs: bool = False
    verifier: Verifier = Verifier.COUPLED
