"""A reallocator over fake instances that move samples among themselves, with a real gateway and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import migration_pb2_grpc
from services.platform.redis.connection import Keys, connect
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.registry import Registry
from services.platform.tasks import end
from services.reallocator.config import ReallocatorConfig
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.planning.learned_costs import LearnedCosts, MoveCosts
from services.reallocator.planning.throughput import Roofline
from services.reallocator.reallocator import Reallocator
from tests.integration.gateway.conftest import Cluster, until
from tests.support.fake_instance import FakeInstance
from tests.support.fake_migration import FakeMigration


class Figure5:
    """Step times shaped as in RLHFSpec's Figure 5: flat to a dozen samples, then in proportion."""

    def __init__(self, prefill: float = 0.0) -> None:
        """`prefill`: seconds for each token of a prompt; 0: nothing is known of it."""
        self.prefill = prefill

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        read = np.asarray(rows, np.float64) - np.asarray(requests, np.float64)
        return np.maximum(0.0078, 0.00069 * np.asarray(requests, np.float64)) + self.prefill * read


class Known(Roofline):
    """Nothing is learned: how fast fakes step says how busy the machine is."""

    def observe(self, samples: int, seconds: float, tokens: float, context: float) -> None:
        """Do nothing."""


class Running:
    """A reallocator in this process."""

    def __init__(self, redis_url: str, namespace: str, prefill: float = 0.0, **settings: Any) -> None:
        given = {"decision_steps": 16, "poll_seconds": 0.02, **settings}
        self.config = ReallocatorConfig(redis_url=redis_url, namespace=namespace, **given)
        # All are alike.
        roofline = Known(Figure5(prefill).seconds, 64)
        self.redis = connect(self.config)
        self.prometheus = CollectorRegistry()
        self.learned = LearnedCosts(MoveCosts(self.config.ways()))
        self.decisions = DecisionLog(self.redis, namespace)
        self.reallocator = Reallocator(
            self.config,
            Registry(self.redis, Keys(namespace)),
            self.decisions,
            ReallocatorMetrics(self.prometheus),
            lambda record: roofline,
            self.learned,
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.reallocator.run())

    async def stop(self) -> None:
        if self.task is not None:
            await end([self.task])
        await self.redis.aclose()

    async def told(self, kind: str) -> list[DecisionRecord]:
        """Decisions of a kind, once there are some: they are written beside the moves, or after them."""
        found: list[DecisionRecord] = []

        async def some() -> bool:
            found[:] = [each for each in await self.decisions.recent() if each.kind == kind]
            return bool(found)

        await until(some, f"there is a decision {kind}")
        return found

    def metric(self, name: str, **labels: str) -> float:
        return self.prometheus.get_sample_value(f"paceline_reallocator_{name}", labels) or 0.0


class Fleet:
    """Fakes that can move samples to each other."""

    def __init__(self, cluster: Cluster, stack: AsyncExitStack) -> None:
        self.cluster = cluster
        self.fakes: dict[str, FakeInstance] = {}
        self.movers: dict[str, FakeMigration] = {}
        self._stack = stack

    async def join(self, name: str, *, hold_at: int | None = None) -> FakeInstance:
        fake = FakeInstance(self.cluster.redis_url, self.cluster.namespace, name, step_seconds=0.002)
        mover = FakeMigration(fake, self.fakes)
        fake.hold_at = hold_at
        fake.beside.append(
            lambda server: migration_pb2_grpc.add_MigrationServiceServicer_to_server(mover, server)
        )
        self.movers[name] = mover
        return await self._stack.enter_async_context(fake)

    def release(self) -> None:
        for fake in self.fakes.values():
            fake.hold_at = None

    def counts(self) -> dict[str, int]:
        return {name: len(fake.running()) for name, fake in self.fakes.items()}

    def moves(self) -> int:
        return sum(len(mover.moves) for mover in self.movers.values())

    def reallocator(self, **settings: Any) -> Running:
        running = Running(self.cluster.redis_url, self.cluster.namespace, **settings)
        self._stack.push_async_callback(running.stop)
        running.start()
        return running


@pytest.fixture
async def cluster(redis_url: str, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url, namespace)
    yield cluster
    await cluster.close()


@pytest.fixture
async def fleet(cluster: Cluster) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(cluster, stack)
