"""Rollouts of earlier steps as drafts, through the whole platform: the same tokens sooner, or lossy and said so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import Client, Exactness, ExactnessLevel, Group, Sample, SamplingParams
from services.local import Platform

LENGTH = 80
SAMPLING = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
COUPLED = Exactness(ExactnessLevel.COUPLED_HISTORY)
LENIENT = Exactness(ExactnessLevel.LENIENT, lenience=1.5)


def groups(count: int = 4, samples: int = 4) -> list[Group]:
    return [Group(f"p{n}", [3 + n, 4, 5], samples) for n in range(count)]


def step(client: Client, run: str, number: int, exactness: Exactness | None = None) -> list[Sample]:
    """All samples of a step of a run; runs share a seed, so a step of any run has the same noise."""
    return list(client.run(run, seed=11).rollout(number, groups(), SAMPLING, exactness=exactness))


def text(sample: Sample) -> tuple[int, ...]:
    return tuple(sample.token_ids.tolist())


def tokens(samples: Sequence[Sample]) -> dict[paceline.SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def decode_steps(samples: Sequence[Sample]) -> int:
    return sum(sample.provenance.decode_steps for sample in samples)


def until(holds: Callable[[], Any], seconds: float = 120) -> None:
    """Poll a condition that some process brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def repeated(
    client: Client, run: str, first: int, exactness: Exactness, most_steps: float = math.inf
) -> list[list[Sample]]:
    """Run steps until one finds the rollouts of an earlier one.

    That step takes less than `most_steps` decode steps: history flows back in the background, and is
    fetched while samples run. All steps are returned, in order.
    """
    found: list[list[Sample]] = []

    def known() -> bool:
        found.append(step(client, run, first + len(found), exactness))
        known_ones = all(sample.provenance.cached_tokens for sample in found[-1])
        return known_ones and decode_steps(found[-1]) < most_steps

    until(known)
    return found


def test_history_with_the_same_noise_is_verified_many_tokens_a_step(client: Client) -> None:
    first = step(client, "coupled", 0, COUPLED)
    again = repeated(client, "coupled", 1, COUPLED, most_steps=16 * LENGTH / 6)[-1]
    assert tokens(again) == tokens(first), "the same weights and noise give the same rollouts"
    for sample in again:
        assert sample.provenance.lossless
        assert sample.provenance.cached_tokens == len(sample.token_ids)
        assert sample.provenance.reused_prefix == len(sample.token_ids)
    assert {source.drafter for s in again for source in s.provenance.draft_sources} >= {"history"}


def test_an_exact_sample_does_not_depend_on_what_is_cached(client: Client) -> None:
    fresh = step(client, "exact-fresh", 7)
    for number in range(2):
        step(client, "exact-known", number)
    known = step(client, "exact-known", 7)
    assert tokens(known) == tokens(fresh)
    assert all(sample.provenance.reused_prefix == 0 for sample in known), "its noise is new in every step"


def test_lenient_reuse_is_marked_and_carries_the_cached_log_probabilities(client: Client) -> None:
    first = step(client, "lenient", 0, LENIENT)
    assert all(not sample.provenance.lossless for sample in first)
    *between, again = repeated(client, "lenient", 1, LENIENT)
    # A step that found nothing of a slot sampled anew, and the slot's next may follow that.
    known = {(sample.key, text(sample)): sample for earlier in (first, *between) for sample in earlier}
    for sample in again:
        # The weights are the same, so every ratio is 1 and everything is reused.
        assert (sample.key, text(sample)) in known, "not a rollout of its slot"
        earlier = known[sample.key, text(sample)]
        assert sample.provenance.reused_prefix == len(sample.token_ids)
        assert not sample.provenance.lossless
        assert sample.provenance.exactness.lenience == pytest.approx(1.5)
        np.testing.assert_allclose(sample.logprobs, earlier.logprobs, atol=1e-4)
    assert decode_steps(again) == 2 * len(again), "the prompt, then the whole rollout at once"


def test_nobody_waits_for_a_dead_draft_store(platform: Platform, client: Client) -> None:
    first = step(client, "stores", 0, COUPLED)
    repeated(client, "stores", 1, COUPLED)
    platform.kill("drafts-0")
    try:
        # An instance that has not seen a run's prompts has nothing to draft from.
        alone = step(client, "stores-alone", 1, COUPLED)
        assert tokens(alone) == tokens(first)
    finally:
        platform.restart("drafts-0")
    step(client, "stores-back", 0, COUPLED)
    repeated(client, "stores-back", 1, COUPLED)
