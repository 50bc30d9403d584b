"""Pre-generation through the whole platform: drafts for the coming step, made while nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import paceline
from paceline import Client, Group, Sample, SamplingParams, WeightFolder
from services.local import Platform
from tests.e2e.conftest import scrape

LENGTH = 100
SAMPLING = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
PREGENERATED = "pregenerated"


def groups(step: int, count: int = 4, samples: int = 4) -> list[Group]:
    """Prompts of a step; no prompt comes twice."""
    return [Group(f"s{step}-p{n}", [3 + n, 4 + step, 5], samples) for n in range(count)]


def tokens(samples: Sequence[Sample]) -> dict[paceline.SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def decode_steps(samples: Sequence[Sample]) -> int:
    return sum(sample.provenance.decode_steps for sample in samples)


def pregenerated(platform: Platform) -> float:
    """Tokens that the fleet has pre-generated so far, as Prometheus sees it."""
    total = 0.0
    with platform.client() as client:
        instances = client.instances()
    for instance in instances:
        for line in scrape(platform, instance.metrics_address).splitlines():
            if line.startswith("paceline_generation_pregenerated_tokens_total"):
                total += float(line.rsplit(" ", 1)[1])
    return total


def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    """Poll a condition that some process brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def filled(platform: Platform, before: float, wanted: int = 16 * LENGTH) -> None:
    """Return when the whole coming step is pre-generated."""
    until(lambda: pregenerated(platform) - before >= wanted)


@pytest.fixture
def plain(client: Client) -> Callable[[int, int], list[Sample]]:
    """A step as it is without any hint: another run with the same seed has the same noise."""
    names = iter(range(1000))

    def run(seed: int, step: int) -> list[Sample]:
        name = f"plain-{seed}-{step}-{next(names)}-{time.time_ns()}"
        return list(client.run(name, seed=seed).rollout(step, groups(step), SAMPLING))

    return run


@pytest.fixture
def weights(client: Client, model: Path, tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Pushes the model's weights times a factor; the original ones again at the end."""
    state: dict[str, Any] = load_file(model / "model.safetensors")
    run = client.run("weights-of-bubbles", seed=0, weights=WeightFolder(tmp_path / "weights", model))

    def push(factor: float) -> None:
        run.push_weights({name: tensor * factor for name, tensor in state.items()})

    yield push
    push(1.0)


def test_a_hinted_step_is_verified_instead_of_decoded(platform: Platform, client: Client, plain: Any) -> None:
    # What is in the store is fetched while a sample runs: where that took long, another step is tried.
    for seed in range(210, 220):
        run = client.run(f"hinted-{seed}", seed=seed)
        before = pregenerated(platform)
        version = client.versions().policy_version
        assert run.hint(1, groups(1), SAMPLING, policy_version=version) == 16
        list(run.rollout(0, groups(0), SAMPLING))
        filled(platform, before)
        samples = list(run.rollout(1, groups(1), SAMPLING))
        expected = plain(seed, 1)
        assert tokens(samples) == tokens(expected)
        if decode_steps(samples) < 16 * LENGTH / 8 and all(s.provenance.cached_tokens for s in samples):
            break
    else:
        pytest.fail("no step was verified in few steps")
    sources = {source.drafter for sample in samples for source in sample.provenance.draft_sources}
    assert PREGENERATED in sources


def test_drafts_of_the_old_weights_never_reach_a_result_unverified(
    platform: Platform, client: Client, plain: Any, weights: Callable[[float], None]
) -> None:
    # As above: another step is tried where the drafts came too late.
    for attempt in range(10):
        run = client.run(f"updated-{attempt}", seed=22)
        before = pregenerated(platform)
        version = client.versions().policy_version
        run.hint(1, groups(1), SAMPLING, policy_version=version + 1)
        list(run.rollout(0, groups(0), SAMPLING))
        filled(platform, before)
        weights(1.3 + attempt)
        samples = list(run.rollout(1, groups(1), SAMPLING))
        assert tokens(samples) == tokens(plain(22, 1)), "every token is the current policy's"
        if any(sample.provenance.cached_tokens for sample in samples):
            break
    else:
        pytest.fail("no draft outlived the update")


def test_a_wrong_hint_costs_nothing(platform: Platform, client: Client, plain: Any) -> None:
    run = client.run("wrong", seed=23)
    before = pregenerated(platform)
    run.hint(1, groups(9), SAMPLING, policy_version=client.versions().policy_version)
    list(run.rollout(0, groups(0), SAMPLING))
    until(lambda: pregenerated(platform) > before)
    samples = list(run.rollout(1, groups(1), SAMPLING))
    assert tokens(samples) == tokens(plain(23, 1))
    assert {sample.status for sample in samples} == {paceline.SampleStatus.TRUNCATED}


def test_an_instance_killed_while_it_pregenerates_costs_only_its_drafts(
    platform: Platform, client: Client, plain: Any
) -> None:
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    run = client.run("killed-pregenerating", seed=24)
    before = pregenerated(platform)
    run.hint(1, groups(1), long, policy_version=client.versions().policy_version)
    list(run.rollout(0, groups(0), SAMPLING))
    until(lambda: pregenerated(platform) > before)
    platform.kill("instance-0")
    try:
        samples = list(run.rollout(1, groups(1), SAMPLING))
        assert tokens(samples) == tokens(plain(24, 1))
    finally:
        platform.restart("instance-0")


def test_a_dead_coordinator_is_missed_by_nobody(platform: Platform, client: Client, plain: Any) -> None:
    run = client.run("orphaned", seed=25)
    version = client.versions().policy_version
    platform.kill("bubbles")
    try:
        run.hint(1, groups(1), SAMPLING, policy_version=version)
        list(run.rollout(0, groups(0), SAMPLING))
        assert tokens(list(run.rollout(1, groups(1), SAMPLING))) == tokens(plain(25, 1))
    finally:
        platform.restart("bubbles")
    # Told again what there is to do, it goes on.
    before = pregenerated(platform)
    run.hint(2, groups(2), SAMPLING, policy_version=version)
    filled(platform, before)
    assert tokens(list(run.rollout(2, groups(2), SAMPLING))) == tokens(plain(25, 2))


def test_a_cancelled_step_leaves_the_coming_one_as_it_is(client: Client, plain: Any) -> None:
    run = client.run("cancelled-hinted", seed=26)
    run.hint(1, groups(1), SAMPLING, policy_version=client.versions().policy_version)
    rollout = run.rollout(0, groups(0), SamplingParams(max_tokens=300, ignore_eos=True))
    rollout.cancel()
    list(rollout)
    assert tokens(list(run.rollout(1, groups(1), SAMPLING))) == tokens(plain(26, 1))
