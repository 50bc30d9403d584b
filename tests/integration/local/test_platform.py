"""The launcher with all that needs no engine: Redis, gateway, draft stores, bubble coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from paceline.internal.v1 import draft_pb2 as pb
from paceline.internal.v1 import draft_pb2_grpc as rpc
from paceline.transport.channel import call_metadata
from services.contracts.rollout import to_proto
from services.local import Platform, PlatformConfig, PlatformError
from services.local.child import Child
from services.local.config import RestartPolicy
from tests.support.zygote import launch
from tests.unit.drafts.rollouts import make

CALL = 60.0


@pytest.fixture
def config(tmp_path: Path) -> PlatformConfig:
    """No instances: a model is only looked for."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return PlatformConfig(
        model=model,
        instances=0,
        folder=tmp_path / "platform",
        draft_stores=2,
        draft_options=("--snapshot-interval-seconds=0.05",),
    )


@pytest.fixture
def platform(config: PlatformConfig) -> Iterator[Platform]:
    with Platform(config, launch=launch) as platform:
        yield platform


def address(child: Child | None) -> str:
    assert child is not None
    assert child.ready is not None
    return child.ready.address


def call(child: Child, method: str, request: object) -> pb.GetDraftStatsResponse:
    metadata = call_metadata(child.spec.environment["PACELINE_TOKEN"])
    with grpc.insecure_channel(address(child)) as channel:
        stub = rpc.DraftServiceStub(channel)
        return getattr(stub, method)(request, timeout=CALL, wait_for_ready=True, metadata=metadata)


def stats(child: Child) -> pb.GetDraftStatsResponse:
    return call(child, "GetDraftStats", pb.GetDraftStatsRequest())


def put(child: Child) -> None:
    call(child, "PutRollouts", iter([pb.PutRolloutsRequest(rollouts=[to_proto(make())])]))


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + CALL
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_every_process_runs_and_is_shown(config: PlatformConfig) -> None:
    with Platform(config) as platform:
        assert [child.spec.name for child in platform.processes] == [
            "gateway",
            "drafts-0",
            "drafts-1",
            "bubbles",
            "policy",
            "reallocator",
        ]
        assert all(child.alive and child.ready for child in platform.processes)
        platform.check()
        # All of them out of one process that has imported what they need.
        zygotes = {psutil.Process(child.pid).parent().parent().pid for child in platform.processes}
        assert len(zygotes) == 1
    assert not any(map(psutil.pid_exists, zygotes))


def test_a_draft_store_comes_back_with_its_rollouts(platform: Platform, config: PlatformConfig) -> None:
    store = platform.process("drafts-1")
    put(store)
    until(lambda: stats(store).HasField("snapshot_at"))
    platform.kill("drafts-1")
    platform.check()  # it is meant to be dead
    platform.restart("drafts-1")
    assert stats(store).rollouts == 1
    platform.restart("drafts-1", kill=True)
    assert stats(store).rollouts == 1
    assert stats(platform.process("drafts-0")).rollouts == 0
    assert [each.name for each in config.snapshots.iterdir()] == ["drafts-1.drafts"]


def test_the_coordinator_is_replaced(platform: Platform) -> None:
    bubbles = platform.process("bubbles")
    platform.kill("bubbles")
    assert not bubbles.alive
    platform.check()
    platform.restart("bubbles")
    first = bubbles.pid
    platform.restart("bubbles", kill=True)
    assert bubbles.pid != first
    assert bubbles.alive


def test_one_that_dies_by_itself_is_noticed(platform: Platform) -> None:
    platform.process("drafts-0").kill()
    with pytest.raises(PlatformError, match="drafts-0 ended"):
        platform.check()


def test_they_can_be_left_out(config: PlatformConfig) -> None:
    alone = replace(config, draft_stores=0, bubbles=False, policy=False, reallocator=False)
    with Platform(alone, launch=launch) as platform:
        assert [child.spec.name for child in platform.processes] == ["gateway"]
        with pytest.raises(PlatformError, match="not configured"):
            platform.kill("bubbles")


def test_a_platform_with_a_new_redis_begins_without_drafts_and_restarts_what_dies(
    config: PlatformConfig,
) -> None:
    config = replace(config, restarts=RestartPolicy(initial=0.05))
    with Platform(config, launch=launch) as first:
        put(first.process("drafts-0"))
    assert list(config.snapshots.iterdir())
    with Platform(config, launch=launch) as second:
        store = second.process("drafts-0")
        assert stats(store).rollouts == 0
        killed = store.pid
        second.kill("drafts-0")
        until(lambda: store.alive and store.pid != killed and store.ready)
        assert stats(store).rollouts == 0
