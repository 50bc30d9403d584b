"""Rows that nothing can be sampled from, and rollouts that cannot be taken over: no engine, only its sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.coupled_sampler import INVALID, UNSAMPLED
from services.contracts.sampling import Sampling
from services.generation.engine.sampling.inputs import BatchSettings, CachedRollout, SampleSettings
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.sampling.sampler import Verified, sample
from services.generation.engine.types import EngineRequest, Verifier

VOCAB = 16
CACHED = CachedRollout(np.array([3, 5, 7, 9]), np.full(4, -50.0), 1.0)


def _verify(logits: torch.Tensor, temperature: float = 1.0) -> Verified:
    """Sample 0 follows the cached rollout with three drafts of it, sample 1 is a plain one."""
    rows = Rows(np.array([0, 4, 5]), np.array([0, 0]), np.array([3, 5, 7]))
    samples = [
        SampleSettings(seed=1, temperature=temperature, verifier=Verifier.LENIENT),
        SampleSettings(seed=2, temperature=temperature),
    ]
    return sample(logits, rows, BatchSettings.of(samples), {0: CACHED})


def test_a_row_that_cannot_be_sampled_ends_its_sample_behind_what_was_taken_over() -> None:
    sound = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    whole = _verify(sound)
    assert whole.tokens[:4].tolist() == [3, 5, 7, 9]
    assert (whole.counts.tolist(), whole.reused.tolist()) == ([4, 1], [4, 0])
    for bad in (torch.nan, torch.inf):
        for temperature in (0.0, 1.0):
            logits = sound.clone()
            logits[range(4), CACHED.tokens] += 10
            logits[2, 11] = bad
            found = _verify(logits, temperature)
            assert found.tokens[:4].tolist() == [3, 5, INVALID, UNSAMPLED]
            assert (found.counts.tolist(), found.reused.tolist()) == ([3, 1], [2, 0])
            assert np.isfinite(found.logprobs[[0, 1, 4]]).all()
            assert np.isnan(found.logprobs[2])
            if temperature:
                # The other sample knows nothing of it.
                assert (found.tokens[4], found.logprobs[4]) == (whole.tokens[4], whole.logprobs[4])


def test_a_token_that_the_model_rules_out_is_not_taken_over() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 5] = -torch.inf
    for temperature in (0.0, 1.0):
        if not temperature:
            logits[0, 3] = 20
        found = _verify(logits, temperature)
        assert found.reused.tolist() == [1, 0]
        assert found.counts[0] == 2
        assert found.tokens[1] not in (5, INVALID)


@pytest.mark.parametrize(
    ("cached", "logprobs", "complaint"),
    [
        ((1, 2), (-1.0,), "2 cached tokens have 1"),
        ((1, VOCAB), (-1.0, -1.0), "outside"),
        ((1, -1), (-1.0, -1.0), "outside"),
    ],
)
def test_a_rollout_that_cannot_be_taken_over_is_refused(
    cached: tuple[int, ...], logprobs: tuple[float, ...], complaint: str
) -> None:
    request = EngineRequest(
        "a", (1,), (), Sampling(), 1, verifier=Verifier.LENIENT, cached=cached, cached_logprobs=logprobs
    )
    with pytest.raises(ValueError, match=complaint):
        CachedRollout.of(request, VOCAB)
