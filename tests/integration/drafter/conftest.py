"""Drafter services, instances that take drafters, and a feed as the gateway fills it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ResponseError

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.contracts.learner import (
    GROUP,
    DrafterKeys,
    Fed,
    FedRewards,
    FedSample,
    PublishedDrafter,
    encode_entry,
    read_published,
)
from services.drafter.config import DrafterConfig
from services.drafter.feed.collector import prompt_hash
from services.drafter.process import SERVICE, DrafterProcess
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.registry import Registry
from services.platform.service import LEADING
from services.platform.tasks import end
from tests.support.fake_draft_model import FakeDraftModel
from tests.support.fake_learner import FACTORY, log_of
from tests.support.zygote import Forked, forked

CALL = 60.0
"""Deadline of every call and every wait, in seconds: far above what anything takes."""
SHARE = 0.25
"""Of prompts that are held out."""
# Quick where something is waited for.
_QUICK: dict[str, Any] = {
    "report_seconds": 0.05,
    "settle_seconds": 0.05,
    "reward_wait_seconds": 60.0,
    "held_out_share": SHARE,
    "publish_samples": 2,
    "publish_cooldown": 1,
    "canary_least_tokens": 64,
}


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds."""
    try:
        async with asyncio.timeout(CALL):
            while True:
                result = condition()
                if await result if isinstance(result, Awaitable) else result:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited in vain until {what}")


def prompts(count: int, *, held_out: bool) -> list[tuple[int, ...]]:
    """Prompts that are held out, or not."""
    found = []
    number = 0
    while len(found) < count:
        number += 1
        prompt = (1, 2, number)
        if (prompt_hash(prompt) < SHARE * 2**64) is held_out:
            found.append(prompt)
    return found


def step(
    number: int, learned: int = 3, held_out: int = 2, run_id: str = "run", version: int = 1
) -> list[Fed]:
    """Return the samples of a step, two of each prompt, with their rewards last."""
    batch = (run_id, f"step-{number}")
    chosen = prompts(learned, held_out=False) + prompts(held_out, held_out=True)
    samples = [
        FedSample(batch, f"p{prompt[2]}", slot, 7, version, prompt, tuple(range(5 + slot)))
        for prompt in chosen
        for slot in range(2)
    ]
    rewards = {(each.prompt_id, each.slot): float(each.slot) for each in samples}
    return [*samples, FedRewards(batch, rewards)]


class Running:
    """A drafter service in this process, and a stub of it."""

    def __init__(self, config: DrafterConfig) -> None:
        self.registry = CollectorRegistry()
        self._config = config
        self.process = DrafterProcess(config, self.registry, learner=FACTORY)
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self.stub: Any

    async def start(self) -> None:
        await self.process.start()
        self._task = asyncio.create_task(self.process.run())
        self._channel = grpc.aio.insecure_channel(self.process.server.address)
        self.stub = rpc.LearnerServiceStub(self._channel)

    async def leads(self) -> bool:
        """Return True once the registry says so: gateways look there."""
        records = await Registry(self.process.redis, Keys(self._config.namespace)).list(SERVICE)
        record = records.get(self._config.instance_id)
        return record is not None and record.state == LEADING

    async def kill(self) -> None:
        """End it; harmless when it was done before. The lease is free at once."""
        if self._task is not None:
            task, self._task = self._task, None
            await end([task])
            assert self._channel is not None
            await self._channel.close()
            await self.process.stop(0)

    async def get(self) -> pb.GetLearnerResponse:
        return await self.stub.GetLearner(pb.GetLearnerRequest(), timeout=CALL)

    async def roll_back(self, reason: str) -> pb.RollBackResponse:
        return await self.stub.RollBack(pb.RollBackRequest(reason=reason), timeout=CALL)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_drafter_{name}", labels) or 0.0


class Killable:
    """A drafter service as a process."""

    def __init__(self, flags: list[str], folder: Path) -> None:
        self._flags = flags
        self._ready_file = folder / "ready.json"
        self.log = folder / "drafter.log"
        self._process: Forked | None = None

    async def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "tests.support.fake_learner_service", *self._flags]
            command.append(f"--ready-file={self._ready_file}")
            self._process = await asyncio.to_thread(forked, command, os.environ, log)
        async with asyncio.timeout(CALL):
            while not self._ready_file.exists():
                assert self._process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash does; harmless when it was done before."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """End it as an operator does; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(CALL)


class World:
    """One namespace: instances, drafter services, the feed, and what can be seen of it all."""

    def __init__(self, redis_url: str, namespace: str, folder: Path) -> None:
        self.config = ServiceConfig(redis_url=redis_url, namespace=namespace)
        self.stack = AsyncExitStack()
        self.redis: Any = connect(self.config)
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        self.control = folder / "control"
        self.control.mkdir()
        self.keys = DrafterKeys(namespace)

    def settings(self, name: str, **settings: Any) -> dict[str, Any]:
        own = {
            "port": 0,
            "redis_url": self.config.redis_url,
            "namespace": self.config.namespace,
            "instance_id": name,
            "model": self.model,
            "folder": self.folder / "drafters",
        }
        return own | _QUICK | settings

    async def instance(self, instance_id: str = "i0") -> FakeDraftModel:
        return await self.stack.enter_async_context(FakeDraftModel(self.config, instance_id))

    async def learner(self, name: str = "drafter-0", *, leading: bool = True, **settings: Any) -> Running:
        running = Running(DrafterConfig(**self.settings(name, **settings)))
        await running.start()
        self.stack.push_async_callback(running.kill)
        if leading:
            await until(running.leads, "the learner leads")
        return running

    async def process(self, name: str = "drafter-0", **settings: Any) -> Killable:
        # It is over soon when the process was killed.
        given = self.settings(name, lease_seconds=1.5, **settings)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        killable = Killable(flags, self.folder)
        self.stack.callback(killable.kill)
        await killable.start()
        return killable

    async def feed(self, entries: Iterable[Fed]) -> None:
        """As the gateway does; all at once, so that no step ends between two of its samples."""
        async with self.redis.pipeline(transaction=True) as pipe:
            for each in entries:
                pipe.xadd(self.keys.feed, encode_entry(each))
            await pipe.execute()

    def did(self, what: str) -> list[dict[str, Any]]:
        """What learners did."""
        return [each for each in log_of(self.control) if each["did"] == what]

    def learned(self) -> list[str]:
        """Names of the samples that were learned from, each as often as it was."""
        return [name for each in self.did("updated") for name in each["names"]]

    def tell(self, name: str, on: bool = True) -> None:
        """Controls the learner."""
        path = self.control / name
        path.touch() if on else path.unlink(missing_ok=True)

    async def published(self) -> PublishedDrafter | None:
        return await read_published(self.redis, self.config.namespace)

    async def version(self) -> int:
        published = await self.published()
        return published.version if published is not None else 0

    async def publishes(self, version: int) -> None:
        """Wait for a version."""

        async def is_there() -> bool:
            return await self.version() >= version

        await until(is_there, f"version {version} is published")

    async def unacknowledged(self) -> int:
        """Entries that were taken and not acknowledged; -1 before anybody was there to take them."""
        try:
            return (await self.redis.xpending(self.keys.feed, GROUP))["pending"]
        except ResponseError:
            return -1

    async def entries(self) -> int:
        return await self.redis.xlen(self.keys.feed)

    async def decisions(self, kind: str) -> list[DecisionRecord]:
        log = DecisionLog(self.redis, self.config.namespace)
        return [each for each in await log.recent(1000) if each.kind == kind]

    async def decided(self, kind: str, count: int = 1) -> list[DecisionRecord]:
        async def is_there() -> bool:
            return len(await self.decisions(kind)) >= count

        await until(is_there, f"{count} decisions {kind}")
        return await self.decisions(kind)

    def figures(self) -> dict[str, Any]:
        """Return the manifest of the latest state."""
        latest = max((self.folder / "drafters/state").glob("state-*/manifest.json"))
        return json.loads(latest.read_text())


@pytest.fixture
async def world(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    world = World(redis_url, namespace, tmp_path)
    monkeypatch.setenv("FAKE_LEARNER", str(world.control))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield world
    await world.stack.aclose()
    await world.redis.aclose()
