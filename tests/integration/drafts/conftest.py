"""Store processes of one's own, clients of them, and stubs, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.internal.v1 import draft_pb2 as pb
from paceline.internal.v1 import draft_pb2_grpc as rpc
from services.drafts.client import DraftStores
from services.local.child import Child, ProcessSpec, stop_together
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import Registry
from services.platform.tasks import end
from tests.support.waiting import until
from tests.support.zygote import launch
from tests.unit.drafts.rollouts import make

CALL = 60.0
"""Deadline of every call and every wait, in seconds: far above what anything takes."""


async def connected(stores: DraftStores, wanted: int) -> None:
    """Return when a client is connected to so many replicas.

    A call would otherwise fail on a busy machine, where connecting takes long."""
    await until(lambda: len(stores.replicas) == wanted, f"{wanted} replicas are found")
    async with asyncio.timeout(CALL):
        await asyncio.gather(*(replica.connected() for replica in stores._replicas.values()))


async def refused(stores: DraftStores) -> bool:
    """Return True if what is put is lost, and nobody is called just after that: a little later they are."""
    assert await stores.put([make("a")]) == 0
    return not stores.available


class StoreProcess:
    """One replica: `python -m services.drafts`, and a stub to it."""

    def __init__(self, child: Child, config: ServiceConfig, stack: AsyncExitStack) -> None:
        self.child = child
        self._config = config
        self._stack = stack
        self.stub: Any = None

    async def start(self) -> None:
        """Return when it is ready."""
        await asyncio.to_thread(self.child.start)
        await asyncio.to_thread(self.child.wait_ready, time.monotonic() + CALL)
        self.stub = await self.connect(self._config)

    async def connect(self, config: ServiceConfig) -> Any:
        """Return a stub with the settings of another client."""
        assert self.child.ready is not None
        channel = open_channel(self.child.ready.address, config)
        return rpc.DraftServiceStub(await self._stack.enter_async_context(channel))

    async def restart(self, *, kill: bool) -> None:
        """Replace the process, after SIGKILL or SIGTERM."""
        await asyncio.to_thread(self.child.stop, 0 if kill else CALL)
        await self.start()

    async def stats(self) -> pb.GetDraftStatsResponse:
        return await self.stub.GetDraftStats(pb.GetDraftStatsRequest(), timeout=CALL)

    def log(self) -> str:
        return self.child.spec.log.read_text()

    def metrics_url(self) -> str:
        assert self.child.ready is not None
        return f"http://127.0.0.1:{self.child.ready.metrics_port}/metrics"


class Deployment:
    """Makes replicas and clients on one namespace, and ends them with the test."""

    def __init__(self, redis_url: str, namespace: str, folder: Path, spawner: ThreadPoolExecutor) -> None:
        self.folder = folder
        self.stack = AsyncExitStack()
        self._settings = {"redis_url": redis_url, "namespace": namespace}
        self._spawner = spawner
        self._children: list[Child] = []

    def config(self, **settings: Any) -> ServiceConfig:
        return ServiceConfig(**self._settings, **settings)

    async def replica(
        self, index: int = 0, *flags: str, token: str | None = None, snapshots: bool = True
    ) -> StoreProcess:
        """Start drafts-<index>; returns when it is ready."""
        name = f"drafts-{index}"
        run = f"{name}.{len(self._children)}"
        ready = self.folder / f"{run}.ready.json"
        argv = [
            *(sys.executable, "-m", "services.drafts", "--port=0", f"--replica-id={name}"),
            *(f"--redis-url={self._settings['redis_url']}", f"--namespace={self._settings['namespace']}"),
            f"--ready-file={ready}",
            *([f"--snapshot-dir={self.folder / 'snapshots'}"] if snapshots else []),
            *flags,
        ]
        environment = {"PACELINE_TOKEN": token} if token else {}
        child = Child(
            ProcessSpec(run, argv, self.folder / f"{run}.log", ready, environment=environment),
            self._spawner,
            launch,
        )
        self._children.append(child)
        process = StoreProcess(child, self.config(token=token), self.stack)
        await process.start()
        return process

    async def freeze(self, replica: StoreProcess) -> None:
        """Stop a process until SIGCONT. It is registered all the time, however long that is."""
        replica.child.signal(signal.SIGSTOP)
        name = replica.child.spec.name.partition(".")[0]
        config = self.config()
        async with connect(config) as redis:
            await redis.pexpire(Keys(config.namespace).registry("drafts", name), int(2 * CALL * 1000))

    async def client(self, wanted: int = 1, *, seconds: float = CALL, **settings: Any) -> DraftStores:
        """Return a client that is connected to so many replicas. `seconds` is its timeout."""
        config = self.config(**settings)
        redis = await self.stack.enter_async_context(connect(config))
        stores = DraftStores(config, Registry(redis, Keys(config.namespace)), timeout=seconds)
        watching = asyncio.create_task(stores.run())
        self.stack.push_async_callback(stores.close)
        self.stack.push_async_callback(end, [watching])
        await connected(stores, wanted)
        return stores

    async def close(self) -> None:
        await self.stack.aclose()
        await asyncio.to_thread(stop_together, self._children, 0)


@pytest.fixture
async def deployment(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[Deployment]:
    with ThreadPoolExecutor(1) as spawner:
        deployment = Deployment(redis_url, namespace, tmp_path, spawner)
        yield deployment
        await deployment.close()
