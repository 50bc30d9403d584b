"""Knobs on the whole platform: every instance follows within a second, and no sample changes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from paceline import (
    Client,
    Exactness,
    ExactnessLevel,
    Group,
    KnobSetting,
    RetryPolicy,
    Sample,
    SampleKey,
    SamplingParams,
    UnavailableError,
)
from services.local import Platform
from tests.e2e.conftest import scrape

SAMPLING = SamplingParams(max_tokens=100, ignore_eos=True)
COUPLED = Exactness(ExactnessLevel.COUPLED_HISTORY)
DRAFTED = "paceline_speculation_drafted_tokens_total"


def step(client: Client, run: str, number: int) -> list[Sample]:
    """Return a step whose samples have the same noise in every step and run."""
    groups = [Group(f"p{n}", [3 + n, 4, 5], 4) for n in range(4)]
    return list(client.run(run, seed=21).rollout(number, groups, SAMPLING, exactness=COUPLED))


def tokens(samples: Sequence[Sample]) -> dict[SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def drafted(samples: Sequence[Sample]) -> int:
    return sum(sample.provenance.drafted for sample in samples)


def speculated(client: Client, run: str, first: int) -> list[Sample]:
    """Steps of a run until one is drafted for: history comes back in the background."""
    deadline = time.monotonic() + 60
    number = first
    while True:
        samples = step(client, run, number)
        if drafted(samples):
            return samples
        assert time.monotonic() < deadline, "no step was drafted for"
        number += 1


def verified(platform: Platform, client: Client) -> dict[str, float]:
    """Draft tokens that each instance has verified."""
    return {
        instance.instance_id: sum(
            float(line.rsplit(" ", 1)[1])
            for line in scrape(platform, instance.metrics_address).splitlines()
            if line.startswith(DRAFTED)
        )
        for instance in client.instances()
    }


def change(client: Client, **knobs: object) -> float:
    """Set the fleet's knobs; the seconds until every instance works by them."""
    began = time.monotonic()
    while True:
        done = client.set_knobs("", KnobSetting(client.knobs().revision, knobs))
        if not done.pending:
            assert done.applied == ("instance-0", "instance-1")
            return time.monotonic() - began
        assert time.monotonic() < began + 60, done


def test_the_kill_switch_stops_all_drafting_within_a_second_and_no_sample_changes(
    platform: Platform, client: Client
) -> None:
    plain = tokens(step(client, "kill", 0))
    assert tokens(speculated(client, "kill", 1)) == plain
    # Until both instances have drafted.
    for number in range(1000, 1100):
        if all(verified(platform, client).values()):
            break
        assert tokens(step(client, "kill", number)) == plain
    # The best of many: on a machine that is busy with other things any call may take a second.
    for _ in range(20):
        if (seconds := change(client, speculation=False)) < 1.0:
            break
        change(client, speculation=True)
    before = verified(platform, client)
    assert all(before.values()), "both instances have drafted"
    assert seconds < 1.0
    for number in range(2000, 2002):
        samples = step(client, "kill", number)
        assert tokens(samples) == plain
        assert drafted(samples) == 0
    assert verified(platform, client) == before
    change(client, speculation=True, mode="toggle")
    assert tokens(speculated(client, "kill", 2200)) == plain


@pytest.mark.parametrize("mode", ["fixed", "adaptive", "solver", "toggle", "planner"])
def test_every_mode_gives_the_same_samples_and_says_what_it_did(client: Client, mode: str) -> None:
    began = time.time()
    change(client, mode=mode)
    run = f"mode-{mode}"
    first = tokens(step(client, run, 0))
    assert tokens(speculated(client, run, 1)) == first
    for decision in client.watch_decisions(run, began):
        if decision.kind == "speculation" and decision.details["drafts"]:
            break
    assert decision.run_id == run
    assert decision.details["mode"] == mode
    assert "engine steps verified drafts" in decision.reason
    assert sum(decision.details["reasons"].values()) == decision.details["engine_steps"]


def test_without_the_policy_service_the_knobs_stay_in_force(platform: Platform, client: Client) -> None:
    change(client, speculation=False)
    plain = tokens(step(client, "alone", 0))
    known = client.knobs()
    platform.kill("policy")
    try:
        with platform.client(retry=RetryPolicy(seconds=0)) as impatient, pytest.raises(UnavailableError):
            impatient.set_knobs("", KnobSetting(known.revision, {}))
        for number in range(1, 3):
            samples = step(client, "alone", number)
            assert tokens(samples) == plain
            assert drafted(samples) == 0
    finally:
        platform.restart("policy")
    assert client.knobs() == known
    change(client, speculation=True)
    assert tokens(speculated(client, "alone", 3)) == plain
