"""Data that travels with a sample from the engine to its sampler, in SamplingParams.extra_args.

A sample has its seed and settings (`SampleSettings`), and may have a cached rollout to reuse, or a record by which
its drafts are verified. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.generation.engine.types import EngineRequest, Verifier

# Keys of a sample's `SampleSettings`, as a dict of its fields, and of its `CachedRollout` and `RecordedDrafts`,
# if it has them.
SETTINGS_KEY = "paceline_noise"
CACHED_KEY = "paceline_cached"
RECORDED_KEY = "paceline_recorded"
CONTEXT = 4
"""Number of preceding tokens by which a recorded token is found, tokens of the prompt included."""
_NOTHING = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Seed of a sample, and how it is sampled, exactly as requested.

    `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off. `min_p` is a probability relative to the largest
    one; `forbidden` tokens may not be sampled before the response has `min_tokens` tokens. If `allowed` is not
    empty, no other token may be sampled. With `near_ties` the runner-up of each token is reported instead of the
    likeliest.
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
    # Schema of the response, and the tokens that may end it.
    json_schema: str = ""
    stops: tuple[int, ...] = ()
    verifier: Verifier = Verifier.COUPLED
    near_ties: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalised(self) -> bool:
        """True if tokens of the prompt or the response are penalised."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edited(self) -> bool:
        """True if the logits may be changed before masks by probability."""
        return bool(self.penalised or self.allowed or self.forbidden)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of the n samples of a step, in host memory; the arrays have one entry per sample, [n].

    `temperature` is 0 for a greedy sample. `top_k`, `top_p` and `min_p` are None if no sample uses them. They are
    as requested; vLLM's batch has values that are cut to vLLM's own limits. `rejecting` marks samples that are
    verified by rejection; `edited` is True if the logits of any sample may be changed before masks by probability.
    The rest are fields of the samples.
    """

    samples: Sequence[SampleSettings]
    seeds: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64] | None
    top_p: NDArray[np.float32] | None
    min_p: NDArray[np.float32] | None
    processed_logprobs: NDArray[np.bool_]
    top_logprobs: NDArray[np.int64]
    near_ties: NDArray[np.bool_]
    rejecting: NDArray[np.bool_]
    edited: bool

    @classmethod
    def of(cls, samples: Sequence[SampleSettings]) -> BatchSettings:
        """Collect the settings of these samples."""
        n = len(samples)
        top_k = np.fromiter((each.top_k for each in samples), np.int64, n)
        top_p = np.fromiter((each.top_p for each in samples), np.float32, n)
        min_p = np.fromiter((each.min_p for each in samples), np.float32, n)
        return cls(
            samples,
            np.fromiter((each.seed for each in samples), np.uint64, n).view(np.int64),
            np.fromiter((each.temperature for each in samples), np.float32, n),
            top_k if top_k.any() else None,
            top_p if (top_p < 1).any() else None,
            min_p if min_p.any() else None,
            np.fromiter((each.processed_logprobs for each in samples), bool, n),
            np.fromiter((each.top_logprobs for each in samples), np.int64, n),
            np.fromiter((each.near_ties for each in samples), bool, n),
            np.fromiter((each.verifier is Verifier.REJECTION for each in samples), bool, n),
            any(each.edited for each in samples),
        )

    @property
    def divisor(self) -> NDArray[np.float32]:
        """Divisor of the logits of each sample; 1 for greedy ones."""
        return np.where(self.temperature > 0, self.temperature, np.float32(1))


class LatestSettings:
    """Settings of the latest batch. Most steps have the batch of the step before, and collect nothing."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._batch: BatchSettings | None = None

    def of(self, sample_ids: Sequence[str], settings_of: Callable[[str], SampleSettings]) -> BatchSettings:
        """Return the settings of a batch, by its ids in order; `settings_of` is called if they have changed."""
        if self._batch is None or sample_ids != self._ids:
            # vLLM changes its list in place.
            self._ids = list(sample_ids)
            self._batch = BatchSettings.of([settings_of(sample_id) for sample_id in self._ids])
        return self._batch

    def forget(self) -> None:
        """Collect the next batch anew, because a sample has left, and another may come under its id."""
        self._batch = None


@dataclass(frozen=True, slots=True)
class CachedRollout:
    """Cached rollout of a sample: tokens [L], their log-probabilities then [L], and the lenience, above 0."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    lenience: float

    def scales(self, begin: int = 0, end: int | None = None) -> NDArray[np.float64]:
        """Return p_then / lenience of tokens; NaN where p_then is not a probability above 0."""
        known = self.logprobs[begin:end]
        with np.errstate(over="ignore", invalid="ignore"):
            scales = np.exp(known) / self.lenience
        return np.where(np.isfinite(known), scales, np.nan)

    @classmethod
    def of(cls, request: EngineRequest, vocab_size: int) -> CachedRollout:
        """Return the rollout of a request that follows one.

        Raises:
            ValueError: it is invalid. It comes from a store, so it has not been checked before.
        """
        tokens = np.array(request.cached, np.int64)
        logprobs = np.array(request.cached_logprobs, np.float64)
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} cached tokens have {len(logprobs)} log-probabilities")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"a cached token is outside the vocabulary of {vocab_size}")
        return cls(tokens, logprobs, request.lenience)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTokens:
    """Tokens of the rollouts of one prompt: `keys` [K] uint64, ascending, and their `logprobs` [K] float32.

    A token is found by itself and the CONTEXT tokens before it. Of equal keys the last counts.
    """

    keys: NDArray[np.uint64]
    logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, prompt: Sequence[int], rollouts: Iterable[tuple[ArrayLike, ArrayLike]]) -> Self:
        """Return the record of rollouts, each given as its tokens and their log-probabilities."""
        keys, logprobs = [np.empty(0, np.uint64)], [np.empty(0, np.float32)]
        for tokens, then in rollouts:
            keys.append(_keys(prompt[-CONTEXT:], tokens))
            logprobs.append(np.asarray(then, np.float32))
        joined = np.concatenate(keys)
        order = np.argsort(joined, kind="stable")
        return cls(joined[order], np.concatenate(logprobs)[order])

    @property
    def nbytes(self) -> int:
        """Memory of both arrays, in bytes."""
        return self.keys.nbytes + self.logprobs.nbytes

    def find(self, before: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the log-probability of each of the tokens [k] that follow `before`, NaN where it is unknown."""
        wanted = _keys(before, tokens)
        if not len(self.keys):
            return np.full(len(wanted), np.nan)
        places = np.searchsorted(self.keys, wanted, side="right") - 1
        found = self.logprobs[places].astype(np.float64)
        return np.where(self.keys[places] == wanted, found, np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedDrafts:
    """Record by which the drafts of a sample are verified, and the lenience of the rule, at least 1.

    BubbleSpec accepts a draft token x with probability min(1, p_now(x) / p_then(x)) (Eq. 2). A draft is what
    followed some context in a rollout, so p_then is found by the token and the few tokens before it, whichever
    drafter proposed it. This is not speculative sampling of the policy: a token that an index picked out of
    several rollouts is not a draw from p_then, and after a rejection the token is drawn from p_now without x, not
    from max(p_now - p_then, 0), which would need all of p_then. Drafts that are in no rollout are verified as
    certainties (`sampler.proposals_of`).
    """

    record: RecordedTokens
    lenience: float


class DraftsOfRow(NamedTuple):
    """Record of a sample in a step; `before` has the sample's last tokens, up to CONTEXT of them."""

    known: RecordedDrafts
    before: NDArray[np.int64]

    def bounds(self, tokens: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bound that the policy's probability of each draft token [k] must exceed, given uniforms [k].

        NaN where no rollout has the token.
        """
        bounds: NDArray[np.float64] = u * np.exp(self.known.record.find(self.before, tokens))
        return bounds / self.known.lenience


def _keys(before: ArrayLike, tokens: ArrayLike) -> NDArray[np.uint64]:
    """Return a hash of each token and the CONTEXT tokens before it; `before` has the tokens before the first."""
    padded = np.concatenate((np.full(CONTEXT, _NOTHING), np.asarray(before, np.int64)))[-CONTEXT:]
    # -1 becomes 1, and no token becomes 0, so shorter contexts have different hashes.
    text = np.concatenate((padded, np.asarray(tokens, np.int64))).astype(np.uint64) + np.uint64(2)
    count = len(text) - CONTEXT
    keys = np.zeros(count, np.uint64)
    for place in range(CONTEXT + 1):
        keys = keys * _FACTOR + text[place : place + count]
    return keys
