"""A roster at work on instances and a registry that do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.instances import roster as module
from services.gateway.instances.roster import Roster
from services.gateway.state.fleet_health import FleetHealth, FleetRules, MemberState
from services.gateway.state.update_book import PublishedVersion, UpdateBook
from services.platform.redis.registry import InstanceRecord
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.scheduler_parts import VERSION, SchedulerParts

NOW = FleetRules(silence=0.0, retry_first=0.0, retry_most=0.0)
"""No patience: an instance is lost, and tried again, at once."""


class FakeRegistry:
    """Shows what the test lets it show, one reading after the other."""

    def __init__(self) -> None:
        self._readings: asyncio.Queue[dict[str, InstanceRecord] | None] = asyncio.Queue()

    async def watch(
        self,
        service: str,
        seconds: float,
        tell: Callable[[dict[str, InstanceRecord] | None], Awaitable[None]],
    ) -> None:
        while True:
            await tell(await self._readings.get())
            self._readings.task_done()

    async def show(self, *engines: FakeEngine) -> None:
        """Show records of these instances; return when they have been taken in."""
        await self._put(
            {
                each.instance_id: InstanceRecord(
                    "generation",
                    each.instance_id,
                    epoch=each.epoch,
                    address=each.instance_id,
                    state=each.state,
                    policy_version=each.version,
                    max_running=4,
                )
                for each in engines
            }
        )

    async def fail(self) -> None:
        """Be out of reach once."""
        await self._put(None)

    async def _put(self, reading: dict[str, InstanceRecord] | None) -> None:
        self._readings.put_nowait(reading)
        await self._readings.join()


class Fleet:
    """A roster at work. The published version has recorded weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.registry = FakeRegistry()
        self.health = FleetHealth(NOW)
        self.health.publish(VERSION, recorded=True, now=0.0)
        self.parts = SchedulerParts(fleet=self.health)
        config = GatewayConfig()
        registry: Any = self.registry
        self.book = UpdateBook(10.0, PublishedVersion(VERSION, "/weights/7", "sum", "u7"))
        self.roster = Roster(
            config, registry, self.health, self.book, self.parts.events, self.parts.placer, self.parts.metrics
        )
        monkeypatch.setattr(module, "open_channel", lambda address, config: self.engines[address])
        monkeypatch.setattr(module, "_LOAD_DELAY", 0.01)
        self.task = asyncio.create_task(self.roster.run())

    def engine(self, instance_id: str, **fields: Any) -> FakeEngine:
        engine = FakeEngine(instance_id, **{"version": VERSION, **fields})
        self.engines[instance_id] = engine
        return engine

    def state(self, instance_id: str) -> MemberState:
        return self.health.members[instance_id].state

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, looking whenever the roster notifies of a change."""
        async with asyncio.timeout(60):
            while not condition():
                await self.roster.changed.wait()

    async def serving(self, instance_id: str) -> None:
        await self.until(lambda: instance_id in self.parts.placer.links)
