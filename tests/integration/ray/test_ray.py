"""The platform on a local Ray cluster, with real engines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

import paceline
from paceline import Client, Group, RetryPolicy, SamplingParams
from paceline.types import InstanceState
from services.ray.config import RayConfig
from tests.support.local_ray import LOCAL_RAY
from tests.support.models import tiny_model

ray = pytest.importorskip("ray")

from services.ray.platform import RayPlatform  # noqa: E402

pytestmark = pytest.mark.timeout(1200)

START_SECONDS = 480
"""Most that an instance may take: Ray starts a fresh process for each, which imports vLLM, two at a time."""

LONG = SamplingParams(max_tokens=700, ignore_eos=True)
QUICK = SamplingParams(max_tokens=3, ignore_eos=True)
PATIENT = RetryPolicy(seconds=60, initial=0.1, maximum=1.0)


@pytest.fixture(scope="module")
def platform(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPlatform]:
    config = RayConfig(
        model=str(tiny_model(tmp_path_factory.mktemp("model"))),
        instances=2,
        draft_stores=0,
        bubbles=False,
        policy=False,
        reallocator=False,
        port=0,
        gpus=0,
        redis_url=redis_url,
        namespace="on-ray",
        token="the token of the tests",
        start_seconds=START_SECONDS,
        stop_seconds=15,
        instance_flags=[
            "--dtype=float32",
            "--max-num-seqs=32",
            "--kv-cache-memory-bytes=134217728",
            "--threads-bind=0",
        ],
    )
    ray.init(**LOCAL_RAY, namespace=config.ray_namespace)
    platform = RayPlatform(config)
    try:
        platform.start()
        yield platform
    finally:
        with suppress(Exception):
            platform.stop()
        ray.shutdown()


@pytest.fixture
def client(platform: RayPlatform) -> Iterator[Client]:
    with Client(
        platform.gateway_address(), token="the token of the tests", insecure=True, retry=PATIENT
    ) as client:
        until(lambda: len(serving(client)) == 2)
        yield client


def until(holds: Callable[[], Any], seconds: float = START_SECONDS) -> None:
    """Wait for what includes the start of two instances, each of which imports vLLM."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def serving(client: Client) -> dict[str, int]:
    """Epochs of the instances that serve."""
    found = client.instances()
    return {each.instance_id: each.epoch for each in found if each.state is InstanceState.SERVING}


def pid_of(processes: dict[str, Any], name: str) -> int:
    assert processes[name] is not None
    return int(processes[name].pid)


def groups() -> list[Group]:
    long = [Group(f"p{n}", [3 + n, 4, 5], 4) for n in range(4)]
    return [*long, Group("quick", [3, 4], 1, QUICK)]


def test_the_processes_are_those_of_every_platform(platform: RayPlatform, client: Client) -> None:
    processes = platform.processes()
    assert set(processes) == {"gateway", "instance-0", "instance-1"}
    for name, ready in processes.items():
        assert ready is not None
        module = "services.gateway" if name == "gateway" else "services.generation"
        assert module in psutil.Process(ready.pid).cmdline()
    with (
        Client(platform.gateway_address(), retry=RetryPolicy(seconds=0)) as stranger,
        pytest.raises(paceline.UnauthenticatedError),
    ):
        stranger.instances()


def test_a_second_start_finds_what_is_there(platform: RayPlatform) -> None:
    before = platform.processes()
    platform.start()
    assert platform.processes() == before


def test_a_step_survives_the_death_of_an_actor_and_what_dies_comes_back(
    platform: RayPlatform, client: Client
) -> None:
    undisturbed = {
        sample.key: sample.token_ids.tolist() for sample in client.run("a", seed=4).rollout(0, groups(), LONG)
    }
    epochs, before = serving(client), platform.processes()
    samples = iter(client.run("b", seed=4).rollout(0, groups(), LONG))
    first = next(samples)
    assert first.prompt_id == "quick", "the long ones have begun"
    ray.kill(platform.actor("instance-0"), no_restart=False)
    rest = list(samples)
    assert {each.key: each.token_ids.tolist() for each in [first, *rest]} == undisturbed
    until(lambda: not psutil.pid_exists(pid_of(before, "instance-0")))
    # And a process without its actor; the two come back together, which saves a minute.
    os.kill(pid_of(before, "instance-1"), signal.SIGKILL)
    until(lambda: all(serving(client).get(name, 0) > epoch for name, epoch in epochs.items()))
    after = platform.processes()
    assert all(pid_of(after, name) != pid_of(before, name) for name in epochs)
    assert pid_of(after, "gateway") == pid_of(before, "gateway")
    assert len(list(client.run("c", seed=4).rollout(0, groups()[:1], QUICK))) == 4


# Last: nothing runs after it.
def test_down_leaves_no_process_behind(platform: RayPlatform) -> None:
    pids = [ready.pid for ready in platform.processes().values() if ready is not None]
    assert len(pids) == 3
    platform.stop()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert platform.actor("gateway") is None
