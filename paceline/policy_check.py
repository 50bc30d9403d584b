"""Check that the fleet samples the trainer's policy, by log-probabilities that both compute for the same tokens.

    paceline.check_policy(run, prompt_token_ids, logprobs)  # after a push

The two computations never agree to the bit, because kernels and dtypes differ. In bfloat16 most tokens differ by
less than 0.02, and a few by 0.3. The measure is therefore a median, which is robust against a few tokens, over the
quarter of the tokens that either side was least sure of: for likely tokens, log-probabilities are near 0 whatever
the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline import types as t

if TYPE_CHECKING:
    from paceline.client import Client, Run

_log = logging.getLogger("paceline")

TOLERANCE = 0.05
"""Largest gap in nats that counts as rounding: three times the largest one measured of bfloat16 and float32."""
_SAMPLES, _TOKENS = 4, 32
_LEAST_SURE = 4
"""One in `_LEAST_SURE` tokens is compared."""
_ENDED = (t.SampleStatus.COMPLETED, t.SampleStatus.TRUNCATED)

Responses = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PolicyGap:
    """Absolute differences of log-probabilities in nats, over the tokens that were least certain."""

    median: float
    """Median; the measure that is compared with the tolerance."""
    mean: float
    """Mean."""
    largest: float
    """Largest difference."""
    tokens: int
    """Number of tokens that were compared."""


class PolicyMismatchError(RuntimeError):
    """Raised when the fleet samples another policy than the trainer's."""

    def __init__(self, gap: PolicyGap, tolerance: float) -> None:
        super().__init__(gap, tolerance)
        self.gap = gap
        """The gap that was measured."""
        self.tolerance = tolerance
        """The largest gap that was allowed, in nats."""

    def __str__(self) -> str:
        gap = self.gap
        return (
            f"the fleet does not sample the trainer's policy: log-probabilities of the {gap.tokens} least certain "
            f"tokens differ by {gap.median:.3f} (median; mean {gap.mean:.3f}, largest {gap.largest:.3f}), "
            f"allowed is {self.tolerance:g}. Usual causes: weights that were not pushed as the trainer has them "
            "(adapters, tied embeddings), a fleet that was started with the configuration of another model "
            "(RoPE scaling, attention windows), quantized weights on the fleet, or a push of another trainer. "
            "`tolerance`, of TRL's PacelineRollout `policy_tolerance`, sets the limit; None there omits the check"
        )


@dataclass(frozen=True, slots=True)
class CheckedSamples:
    """Samples of one prompt for a check, with the fleet's log-probabilities."""

    prompt: list[int]
    responses: list[list[int]]
    logprobs: list[list[float]]
    """[samples][tokens], natural logarithms of the model's own distribution."""


def check_policy(
    run: Run,
    prompt_token_ids: Sequence[int],
    logprobs: Callable[[Sequence[int], Responses], Sequence[Sequence[float]]],
    *,
    tolerance: float = TOLERANCE,
) -> PolicyGap | None:
    """Let the fleet sample a prompt, and compare its log-probabilities with the trainer's own.

    Each shard generates four samples of 32 tokens, which belong to no batch and are not kept.

    Differences in rare tokens only, or below the tolerance, are not detected. Nor is a wrongly pushed adapter while
    it is still zero, as before the first step: check again later.

    Args:
        run: the job, whose weights were pushed.
        prompt_token_ids: a short prompt of the data.
        logprobs: returns the natural logarithms of the trainer's probabilities, [samples][tokens], for a prompt
            and responses [samples][tokens] of equal length: at temperature 1, over the whole vocabulary, without
            dropout.
        tolerance: largest gap that counts as rounding. The default is for half precision on either side; with
            float32 on both 0.002 is enough.

    Returns the gap; None: the fleet returned no samples, which is logged.

    Raises:
        PolicyMismatchError: the gap is larger.
        PacelineError: a call was refused.
    """
    found = sample_for_check(run, prompt_token_ids)
    if found is None:
        return None
    return require_agreement(found, logprobs(found.prompt, found.responses), tolerance)


def sample_for_check(run: Run, prompt_token_ids: Sequence[int]) -> CheckedSamples | None:
    """Return a few short samples of a prompt; None: there are none, which is logged."""
    sampling = t.SamplingParams(max_tokens=_TOKENS, ignore_eos=True, logprobs_mode=t.LogprobsMode.RAW)
    prompt = [int(token) for token in prompt_token_ids]
    # Without the run's name the samples are neither part of its steps nor drafts for later samples.
    request = t.SampleRequest("", "", prompt, sampling=sampling)
    samples = [
        _sampled(client, replace(request, slot=slot))
        for client in run.client.deployments()
        for slot in range(_SAMPLES)
    ]
    done = [each for each in samples if each.status in _ENDED and len(each.token_ids)]
    if not done:
        _log.warning(
            "the policy is not checked: its samples ended as %s", {str(each.status) for each in samples}
        )
        return None
    length = min(len(each.token_ids) for each in done)
    responses = [each.token_ids[:length].tolist() for each in done]
    return CheckedSamples(prompt, responses, [each.logprobs[:length].tolist() for each in done])


def _sampled(client: Client, request: t.SampleRequest) -> t.Sample:
    *_, last = client.generate(request)
    assert isinstance(last, t.Sample)
    return last


def require_agreement(found: CheckedSamples, own: Sequence[Sequence[float]], tolerance: float) -> PolicyGap:
    """Return the gap. PolicyMismatchError: it is larger than `tolerance`, or something is not a number."""
    gap = policy_gap(_flat(found.logprobs), _flat(own))
    if not gap.median <= tolerance:
        raise PolicyMismatchError(gap, tolerance)
    _log.info("the fleet samples the trainer's policy: %s", gap)
    return gap


def policy_gap(fleet: Any, trainer: Any) -> PolicyGap:
    """Return the gap between log-probabilities of the same tokens, [tokens] each; a NaN is infinitely far off.

    ValueError: the arrays are empty or differ in length.
    """
    ours, theirs = np.asarray(fleet, np.float64), np.asarray(trainer, np.float64)
    if ours.shape != theirs.shape or ours.ndim != 1 or not len(ours):
        raise ValueError(
            f"log-probabilities of {ours.shape} tokens cannot be compared with those of {theirs.shape}"
        )
    both = np.stack([ours, theirs])
    both[:, ~np.isfinite(both).all(axis=0)] = [[0.0], [-np.inf]]
    least = np.argsort(both.min(axis=0), kind="stable")[: -(-len(ours) // _LEAST_SURE)]
    differences = np.abs(both[0, least] - both[1, least])
    return PolicyGap(
        float(np.median(differences)), float(differences.mean()), float(differences.max()), len(least)
    )


def _flat(rows: Sequence[Sequence[float]]) -> Any:
    return np.concatenate([np.asarray(row, np.float64) for row in rows])
