"""Links follow the registry: one for each process, and none for what must not be dialled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.drafts.client import DraftStores
from services.gateway.api.bubble_coordinator import CoordinatorClient
from services.gateway.config import GatewayConfig
from services.generation.pregeneration.pregenerator import CoordinatorConnection
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import Link, Links, open_channel
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.security import certificates
from services.platform.tasks import Notifier, end
from services.reallocator.config import ReallocatorConfig
from services.reallocator.members import PolledInstances, Rooflines
from tests.support.certificates import Authority, replace

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


class Idle(Link):
    """A link that calls nothing."""

    async def call(self) -> float:
        return 3600.0


class OneReading:
    """A registry with one process of each service, which is read once."""

    def __init__(self) -> None:
        self._records = {"a": record("a")}

    async def list(self, service: str) -> Records:
        return self._records

    async def watch(self, service: str, __: float, tell: Callable[[Records], Awaitable[None]]) -> None:
        await tell(self._records)

    def present(self, service: str, __: float) -> Any:
        return SimpleNamespace(read=partial(self.list, service))


async def dialled_by_links(config: ServiceConfig, registry: Any) -> bool:
    failures = Counter("failures", "Of the test.", registry=CollectorRegistry())
    links = Links(registry, lambda found: Idle(found, config, Notifier(), failures), lambda _: None)
    await links.run()
    return bool(links.known)


async def dialled_by_a_client_of_the_draft_store(config: ServiceConfig, registry: Any) -> bool:
    stores = DraftStores(config, registry)
    await stores.run()
    found = bool(stores.replicas)
    await stores.close()
    return found


async def dialled_by_the_reallocator(config: ServiceConfig, registry: Any) -> bool:
    members = PolledInstances(config, registry, Rooflines(ReallocatorConfig()))
    await members.refresh()
    found = bool(members.known)
    await members.close()
    return found


async def dialled_by_an_instance(config: ServiceConfig, registry: Any) -> bool:
    connection = CoordinatorConnection(config, registry)
    await connection.find()
    await connection.leave()
    return True


async def dialled_by_a_client_of_the_coordinator(config: ServiceConfig, registry: Any) -> bool:
    found: list[bool] = []
    client = CoordinatorClient(cast("GatewayConfig", config), registry, lambda: found.append(True))
    await client.run()
    return bool(found)


@pytest.mark.parametrize(
    "dialled",
    [
        dialled_by_links,
        dialled_by_a_client_of_the_draft_store,
        dialled_by_the_reallocator,
        dialled_by_an_instance,
        dialled_by_a_client_of_the_coordinator,
    ],
)
@pytest.mark.parametrize("changed", ["the key alone", "no authorities", "no token"])
async def test_peers_that_join_while_secrets_are_being_replaced_are_dialled_with_the_last_good_ones(
    dialled: Callable[[ServiceConfig, Any], Awaitable[bool]],
    changed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certificates, "CHECK_SECONDS", 0.0)
    authority = Authority(tmp_path, "ours")
    tls, token = authority.tls("peer"), tmp_path / "token"
    token.write_text("t")
    config = ServiceConfig(tls=tls, token_file=token)
    # As every service does when it starts.
    await open_channel("127.0.0.1:1", config).close()
    assert tls.key_file is not None
    assert tls.ca_file is not None
    match changed:
        case "the key alone":
            other = authority.tls("other").key_file
            assert other is not None
            replace(tls.key_file, other.read_bytes())
        case "no authorities":
            tls.ca_file.unlink()
        case "no token":
            replace(token, b"")
    assert await dialled(config, OneReading())
