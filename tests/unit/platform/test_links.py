"""Links follow the registry: one for each process, and none for what must not be dialled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.platform.config import ServiceConfig
from services.platform.grpc.channel import Link, Links
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.tasks import Notifier, end

WAIT = 60.0
Records = dict[str, InstanceRecord] | None


class Listing:
    """A registry that shows what it is told to, whenever it changes."""

    def __init__(self) -> None:
        self._shown: asyncio.Queue[Records] = asyncio.Queue()

    def show(self, *records: InstanceRecord) -> None:
        self._shown.put_nowait({each.instance_id: each for each in records})

    def fail(self) -> None:
        self._shown.put_nowait(None)

    async def watch(self, _: str, __: float, tell: Callable[[Records], Awaitable[None]]) -> NoReturn:
        while True:
            await tell(await self._shown.get())


class Rounds(Link):
    """A link whose rounds are what the test makes of them."""

    def __init__(self, record: InstanceRecord, rig: Rig) -> None:
        if record.address == "forbidden:1":
            raise ValueError("will not send the token")
        super().__init__(record, ServiceConfig(redis_url="redis://nowhere"), rig.changed, rig.failures)
        self.rounds = 0
        self.fault: BaseException | None = None

    async def call(self) -> float:
        self.rounds += 1
        if self.fault is not None:
            raise self.fault
        return 3600.0


class Rig:
    def __init__(self) -> None:
        self.listing = Listing()
        self.changed = Notifier()
        self.failures = Counter("failures", "Of the test.", registry=CollectorRegistry())
        self.dialled: list[str] = []
        self.looked: list[Records] = []
        self.links = Links(cast("Registry", self.listing), self._dial, self.looked.append)
        self.task = asyncio.create_task(self.links.run())

    def _dial(self, record: InstanceRecord) -> Rounds:
        self.dialled.append(record.address)
        return Rounds(record, self)

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await end([rig.task])


def record(name: str, epoch: int = 1, address: str = "127.0.0.1:1") -> InstanceRecord:
    return InstanceRecord("generation", name, epoch, address)


async def test_there_is_a_link_to_each_process_and_a_new_one_to_the_next(rig: Rig) -> None:
    rig.listing.show(record("a"), record("b"))
    await rig.until(lambda: rig.links.known.keys() == {"a", "b"})
    first, kept = rig.links.known["a"], rig.links.known["b"]
    rig.listing.show(record("a", epoch=2), record("b"))
    await rig.until(lambda: rig.links.known.get("a", first) is not first)
    assert rig.links.known["b"] is kept
    rig.listing.show(record("b"))
    await rig.until(lambda: rig.links.known.keys() == {"b"})


async def test_in_an_outage_the_links_stay_and_it_is_told(rig: Rig) -> None:
    rig.listing.show(record("a"))
    rig.listing.fail()
    await rig.until(lambda: len(rig.looked) == 2)
    assert rig.looked[-1] is None
    assert rig.links.known.keys() == {"a"}


async def test_an_address_that_must_not_be_dialled_is_tried_once(rig: Rig) -> None:
    for _ in range(3):
        rig.listing.show(record("a", address="forbidden:1"), record("b"))
    await rig.until(lambda: len(rig.looked) == 3)
    assert rig.dialled == ["forbidden:1", "127.0.0.1:1"]
    assert rig.links.known.keys() == {"b"}


async def test_a_change_begins_a_round_and_a_defect_costs_its_link_only(rig: Rig) -> None:
    rig.listing.show(record("a"), record("b"))
    await rig.until(lambda: [each.rounds for each in rig.links.known.values()] == [1, 1])
    broken, kept = rig.links.known["a"], rig.links.known["b"]
    broken.fault = ZeroDivisionError()
    rig.changed.notify()
    await rig.until(lambda: (broken.rounds, kept.rounds) == (2, 2))
    rig.listing.show(record("a"), record("b"))
    await rig.until(lambda: rig.links.known.get("a", broken) is not broken)
    assert rig.links.known["b"] is kept


async def test_a_round_that_fails_is_counted_and_made_again(rig: Rig) -> None:
    rig.listing.show(record("a"))
    await rig.until(lambda: "a" in rig.links.known)
    link = rig.links.known["a"]
    nothing = grpc.aio.Metadata()
    link.fault = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "away")
    rig.changed.notify()
    await rig.until(lambda: link.rounds >= 4)
    assert rig.failures._value.get() >= 2
    link.fault = None
    before = link.rounds
    await rig.until(lambda: link.rounds > before)
    assert not rig.task.done()
