"""Settings that travel with a sample from the engine to its sampler, in SamplingParams.extra_args."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.generation.engine.types import EngineRequest, Verifier

# The keys of a sample's `SampleNoise`, as a dict of its fields, and of its `CachedRollout` and its `RecordedDrafts`
# (recorded.py), where it has them.
NOISE_KEY = "paceline_noise"
CACHED_KEY = "paceline_cached"
RECORDED_KEY = "paceline_recorded"


@dataclass(frozen=True, slots=True)
class SampleNoise:
    """Seed of a sample, and how it is sampled: all that our sampler reads, as it was asked for.

    `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off. `min_p` is a probability relative to the largest;
    `forbidden` may not be sampled before `min_tokens` response tokens are there. Where `allowed` is not empty,
    nothing else may be sampled. With `near_ties` the runner-up of each token is reported in place of the likeliest.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    forbidden: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    processed_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    # The schema of the response, and the tokens that may end it.
    json_schema: str = ""
    stops: tuple[int, ...] = ()
    verifier: Verifier = Verifier.COUPLED
    near_ties: bool = False

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalised(self) -> bool:
        """True if tokens that are there already count against their being sampled again."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class CachedRollout:
    """Cached rollout of a sample: tokens [L], their log-probabilities then [L], and the lenience, above 0."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]
    lenience: float

    def scales(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float64]:
        """Return p_then / lenience of some tokens; NaN for one whose p_then is not a probability above 0."""
        known = self.logprobs[begin:end]
        with np.errstate(over="ignore", invalid="ignore"):
            scales = np.exp(known) / self.lenience
        return np.where(np.isfinite(known), scales, np.nan)

    @classmethod
    def of(cls, request: EngineRequest, vocab_size: int) -> CachedRollout:
        """Return the rollout of a request that follows one.

        Raises:
            ValueError: it is invalid. It comes from a store, and nobody else has checked it.
        """
        tokens = np.array(request.cached, np.int64)
        logprobs = np.array(request.cached_logprobs, np.float64)
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} cached tokens have {len(logprobs)} log-probabilities")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"a cached token is outside the vocabulary of {vocab_size}")
        return cls(tokens, logprobs, request.lenience)
