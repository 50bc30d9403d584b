"""What a trainer seldom means is warned of: equal samples, another's weights, failed samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline import Client, Group, SampleStatus, WeightFolder
from paceline.v1 import sample_pb2
from tests.integration.sdk import gateway_double
from tests.integration.sdk.gateway_double import GatewayDouble

GROUPS = [Group(name, [1, 2], 2) for name in "abc"]


@pytest.fixture
def client(gateway: GatewayDouble) -> Iterator[Client]:
    with Client(gateway.address, timeout=60) as client:
        yield client


def test_a_prompt_that_is_asked_for_twice_in_a_step_is_warned_of(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    run = client.run("r")
    first = {(each.prompt_id, each.slot): each.token_ids.tolist() for each in run.rollout(0, GROUPS)}
    run.rollout(0, [Group("d", [1], 2)])
    run.rollout(1, GROUPS)
    run.rollout(0, GROUPS[:1], policy_version=9)
    client.run("other").rollout(0, GROUPS)
    assert not caplog.messages
    again = {(each.prompt_id, each.slot): each.token_ids.tolist() for each in run.rollout(0, GROUPS[:2])}
    assert again.items() <= first.items(), "as the warning says"
    (said,) = caplog.messages
    assert "run r: in step 0 prompt 'a' and 1 others was requested before" in said


def test_weights_that_somebody_else_pushed_are_warned_of_once(
    gateway: GatewayDouble, client: Client, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    client.run("r").rollout(0, GROUPS)
    gateway.state.checksum = "index-sha256:1"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    own = client.run("r", weights=WeightFolder(tmp_path / "weights", tmp_path / "model"))
    own.push_weights({"w": np.zeros(2, np.float32)})
    own.rollout(1, GROUPS)
    client.run("r").rollout(2, GROUPS, policy_version=gateway.state.version)
    assert not caplog.messages, "the model of the start, one's own, or one that is named"
    stranger = client.run("r")
    for step in (3, 4):
        stranger.rollout(step, GROUPS)
    (said,) = caplog.messages
    assert f"run r: version {gateway.state.version} is served, which was pushed, and not by this run" in said


def test_steps_that_nobody_announces_are_warned_of_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    announced = client.run("announced")
    for step in range(9):
        announced.rollout(step, GROUPS)
        announced.hint(step + 1, GROUPS, policy_version=5)
    for rollout in client.run("ahead").rollouts([GROUPS] * 9):
        list(rollout)
    again = client.run("again")
    for step, version in ((0, 0), (1, 1), (2, 2), (2, 3), (1, 4)):
        again.rollout(step, GROUPS, policy_version=version)
    assert not caplog.messages
    silent = client.run("silent")
    for step in range(9):
        silent.rollout(step, GROUPS)
    (said,) = caplog.messages
    assert "run silent: the last 3 steps were not announced" in said


def test_failed_samples_are_counted(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gateway_double.samples_of

    def some_fail(batch: object) -> list[sample_pb2.Sample]:
        samples = made(batch)  # type: ignore[arg-type]
        for each in samples[1:3]:
            each.status, each.error = sample_pb2.SAMPLE_STATUS_FAILED, "no instance"
        return samples

    monkeypatch.setattr(gateway_double, "samples_of", some_fail)
    samples = list(client.run("r").rollout(7, GROUPS))
    assert sum(each.status is SampleStatus.FAILED for each in samples) == 2
    first, last = caplog.messages
    assert first == "step 7: prompt 'a' slot 1 failed: no instance"
    assert last.startswith("step 7: 2 of 6 samples failed")
