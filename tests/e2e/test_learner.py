"""The online learner on the whole platform.

Its drafts appear, versions are loaded in mid-run, and no token changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from redis import Redis

from paceline import Client, Group, KnobSetting, Reward, Run, Sample, SampleKey, SamplingParams
from services.contracts.learner import DrafterHistory, DrafterKeys
from services.local import Platform, PlatformConfig
from tests.e2e.conftest import UNDER_TLS, certificates, scrape
from tests.support.zygote import launch

SAMPLING = SamplingParams(max_tokens=48, ignore_eos=True)
SECONDS = 240.0


@pytest.fixture(scope="module")
def platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Nothing drafts but the head that learns."""
    config = PlatformConfig(
        model=model,
        instances=1,
        folder=tmp_path_factory.mktemp("learner"),
        pin=False,  # the kernel shares the cores out among the workers
        draft_stores=0,
        bubbles=False,
        reallocator=False,
        learner=True,
        learner_options=(
            *("--lr=0.003", "--batch-tokens=256", "--depth=3", "--settle-seconds=0.1"),
            *("--publish-margin=0", "--publish-samples=4", "--held-out-share=0.3", "--report-seconds=0.1"),
            # The test waits for it: the steps that it makes meanwhile must neither hold it up nor all be read.
            *("--nice=0", "--update-tokens=8192", "--held-out-tokens=6144"),
        ),
        instance_options=("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=268435456"),
        tls=certificates(tmp_path_factory.mktemp("certificates")) if UNDER_TLS else None,
        token="the token of the tests" if UNDER_TLS else None,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


def set_knobs(client: Client, **knobs: object) -> None:
    setting = client.knobs()
    client.set_knobs("", KnobSetting(setting.revision, {**setting.knobs, **knobs}))


def step(run: Run, number: int) -> list[Sample]:
    """Return a step whose samples are the same in every run; its rewards are reported."""
    groups = [Group(f"p{n}", [3 + n, 4, 5], 2) for n in range(12)]
    rollout = run.rollout(number, groups, SAMPLING)
    samples = list(rollout)
    rewards = [Reward(sample.prompt_id, sample.slot, float(sample.slot)) for sample in samples]
    run.report_rewards(rollout.batch.batch_id, rewards)
    return samples


def tokens(samples: Sequence[Sample]) -> dict[SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def accepted(samples: Sequence[Sample]) -> int:
    """Tokens that the head has drafted rightly."""
    sources = (source for sample in samples for source in sample.provenance.draft_sources)
    return sum(source.accepted for source in sources if source.drafter == "eagle3")


def recorded(platform: Platform) -> int:
    """Return the version that is published by now; the gateway tells of it a moment later."""
    with Redis.from_url(platform.redis_url) as redis:
        current = DrafterHistory.from_json(redis.get(DrafterKeys("paceline").published)).current  # type: ignore[arg-type]
    assert current is not None
    return current.version


def updates(platform: Platform) -> float:
    """Return how often the learner has learned since it started."""
    ready = platform.process("drafter").ready
    assert ready is not None
    lines = scrape(platform, f"127.0.0.1:{ready.metrics_port}").splitlines()
    name = "paceline_drafter_updates_total{"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def learned(platform: Platform, client: Client, run: Run, version: int, first: int) -> int:
    """Steps of a run until a version is published; how many there were by then.

    Each step waits until the one before is learned from: the learner takes longer to start than to learn.
    """
    deadline = time.monotonic() + SECONDS
    number = first
    while client.versions().drafter_version < version:
        before = updates(platform)
        step(run, number)
        number += 1
        while updates(platform) == before and client.versions().drafter_version < version:
            assert time.monotonic() < deadline, "no better drafter was published"
            time.sleep(0.1)
    return number


@pytest.mark.timeout(600)
def test_it_learns_while_samples_stay_what_they_are_and_outlives_its_death(
    platform: Platform, client: Client
) -> None:
    set_knobs(client, speculation=False)
    plain = [tokens(step(client.run("plain", seed=21), number)) for number in range(2)]
    set_knobs(client, speculation=True, mode="fixed")
    run = client.run("learning", seed=21)
    fresh = step(run, 0)
    assert tokens(fresh) == plain[0]
    number = learned(platform, client, run, 2, 1)
    # The version is in use now, loaded while the run goes on.
    later = client.run("later", seed=21)
    assert tokens(drafted := step(later, 0)) == plain[0]
    assert accepted(drafted) > 0
    # Nobody notices that the learner is gone, and the next one goes on from where it was.
    platform.kill("drafter")
    assert tokens(step(later, 1)) == plain[1]
    published = recorded(platform)
    platform.restart("drafter")
    learned(platform, client, run, published + 1, number)
    again = step(client.run("again", seed=21), 0)
    assert tokens(again) == plain[0]
    assert accepted(again) > 0
