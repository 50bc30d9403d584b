"""What dies in the middle of a step costs time, and nothing else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import paceline
from paceline import Client, Group, RetryPolicy, SamplingParams, WeightFolder
from services.local import Platform
from tests.e2e.conftest import VOCAB

LONG = SamplingParams(max_tokens=600, min_tokens=500, ignore_eos=True)
PATIENT = RetryPolicy(attempts=60, initial=0.1, maximum=1.0)


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with platform.client(retry=PATIENT) as client:
        yield client


@pytest.fixture(autouse=True)
def whole_fleet(platform: Platform) -> Iterator[None]:
    """Every test leaves two serving instances behind."""
    yield
    for index, child in enumerate(platform.instances):
        if not child.alive:
            platform.restart_instance(index)
    platform.wait_serving(2, time.monotonic() + 120)


def groups(count: int = 8, samples: int = 4) -> list[Group]:
    return [Group(f"p{n}", [3 + n % (VOCAB - 4), 4, 5], samples) for n in range(count)]


def by_key(samples: list[paceline.Sample]) -> dict[paceline.SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def test_a_killed_instance_costs_no_sample(platform: Platform, client: Client) -> None:
    undisturbed = list(client.run("calm", seed=1).rollout(0, groups(), LONG))
    rollout = client.run("killed", seed=1).rollout(0, groups(), LONG)
    _wait_until_running(client, "instance-0")
    platform.kill(0)
    samples = list(rollout)
    assert Counter(sample.key for sample in samples) == Counter(sample.key for sample in undisturbed)
    assert by_key(samples) == by_key(undisturbed), "resumed samples go on with the same noise"
    assert {sample.status for sample in samples} == {paceline.SampleStatus.TRUNCATED}
    resumed = [sample for sample in samples if sample.provenance.resubmissions]
    assert resumed, "nothing ran on the killed instance"
    for sample in resumed:
        assert sample.provenance.instance_spans[-1].instance_id == "instance-1"


def test_a_killed_instance_serves_again_only_with_the_current_weights(
    platform: Platform, client: Client, model: Path, tmp_path: Path
) -> None:
    platform.kill(0)
    state: dict[str, Any] = load_file(model / "model.safetensors")
    run = client.run("weights", seed=1, weights=WeightFolder(tmp_path / "weights", model))
    version = run.push_weights({name: tensor * 1.5 for name, tensor in state.items()}).version
    seen: list[tuple[paceline.InstanceState, int]] = []
    watching = threading.Event()

    def watch() -> None:
        with platform.client(retry=PATIENT) as watcher:
            for fleet in watcher.watch_fleet():
                watching.set()
                found = [i for i in fleet if i.instance_id == "instance-0"]
                seen.extend((i.state, i.policy_version) for i in found)
                if seen and seen[-1] == (paceline.InstanceState.SERVING, version):
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert watching.wait(20)
    platform.restart_instance(0)
    watcher.join(60)
    assert not watcher.is_alive()
    assert {v for state_, v in seen if state_ is paceline.InstanceState.SERVING} == {version}
    assert seen[0][0] is not paceline.InstanceState.SERVING
    samples = list(run.rollout(0, groups(), SamplingParams(max_tokens=60)))
    places = {span.instance_id for s in samples for span in s.provenance.instance_spans}
    assert places == {"instance-0", "instance-1"}
    assert {span.policy_version for s in samples for span in s.version_spans} == {version}


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_a_gateway_restart_in_the_middle_is_invisible(platform: Platform, client: Client, kill: bool) -> None:
    undisturbed = list(client.run(f"calm-{kill}", seed=2).rollout(0, groups(), LONG))
    rollout = client.run(f"restarted-{kill}", seed=2).rollout(0, groups(), LONG)
    samples: list[paceline.Sample] = []
    restarting = threading.Thread(target=platform.restart_gateway, kwargs={"kill": kill})
    _wait_until_running(client, "instance-0")
    restarting.start()
    samples.extend(rollout)
    restarting.join(60)
    assert Counter(s.key for s in samples) == Counter(s.key for s in undisturbed)
    assert by_key(samples) == by_key(undisturbed)


def test_a_removed_instance_hands_its_samples_over(platform: Platform, client: Client) -> None:
    undisturbed = list(client.run("calm-removed", seed=3).rollout(0, groups(), LONG))
    rollout = client.run("removed", seed=3).rollout(0, groups(), LONG)
    _wait_until_running(client, "instance-1")
    platform.remove(1)
    assert by_key(list(rollout)) == by_key(undisturbed)
    assert platform.instances[1].returncode == 0


def test_a_paused_fleet_goes_on_where_it_was(client: Client) -> None:
    undisturbed = list(client.run("calm-paused", seed=4).rollout(0, groups(), LONG))
    rollout = client.run("paused", seed=4).rollout(0, groups(), LONG)
    assert sorted(client.pause()) == ["instance-0", "instance-1"]
    states = {instance.state for instance in client.instances()}
    assert states == {paceline.InstanceState.PAUSED}
    client.resume()
    assert by_key(list(rollout)) == by_key(undisturbed)


def _wait_until_running(client: Client, instance_id: str) -> None:
    """Returns when the instance reports samples in its engine."""
    for fleet in client.watch_fleet():
        if any(i.instance_id == instance_id and i.load.running for i in fleet):
            return
