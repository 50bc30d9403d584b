"""Many instances that answer, change, get samples or are lost at once: each turn of the event loop stays short."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from services.gateway.journal.writer import JournalBacklog
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.placement import InstanceSlots
from services.gateway.scheduler.turns import Pace
from services.gateway.scheduler.work_link import Attempt, WorkLink
from services.platform.tasks import ExponentialBackoff, end
from tests.support.token_columns import columns
from tests.unit.gateway.fake_engine import FakeWorkCall, rpc_error
from tests.unit.gateway.roster_parts import Fleet
from tests.unit.gateway.scheduler_parts import VERSION, a_batch, turn


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    fleet = Fleet(monkeypatch)
    yield fleet
    await end([fleet.task])


async def test_instances_that_answer_at_once_are_taken_in_one_after_the_other(fleet: Fleet) -> None:
    fleet.roster.pace = Pace(0.0)
    engines = [fleet.engine(f"instance-{number}") for number in range(5)]
    answer = asyncio.Event()
    for engine in engines:
        engine.gates["GetStatus"] = answer
    await fleet.registry.show(*engines)
    for engine in engines:
        await engine.called("GetStatus")
    answer.set()
    taken = [0]
    async with asyncio.timeout(60):
        while taken[-1] < len(engines):
            await asyncio.sleep(0)
            taken.append(len(fleet.parts.placer.links))
    assert max(after - before for before, after in itertools.pairwise(taken)) == 1


async def test_watchers_are_woken_once_in_a_turn_however_many_instances_change(fleet: Fleet) -> None:
    engines = [fleet.engine(name) for name in "abc"]
    await fleet.registry.show(*engines)
    for name in "abc":
        await fleet.serving(name)
    await turn()
    before = fleet.roster.changed.next_change()
    for connection in fleet.roster.live():
        fleet.roster.quarantine(connection, "its weights are unknown")
    assert not before.is_set(), "within the turn"
    await turn()
    assert before.is_set()
    shown = fleet.parts.metric("instances", state="stale")
    assert shown == 3
    fleet.roster.notify()
    after = fleet.roster.changed.next_change()
    await turn()
    assert not after.is_set(), "nothing has changed since"


async def test_instances_that_are_lost_at_once_are_given_up_one_after_the_other(fleet: Fleet) -> None:
    engines = [fleet.engine(f"instance-{number}") for number in range(4)]
    await fleet.registry.show(*engines)
    for engine in engines:
        await fleet.serving(engine.instance_id)
    fleet.roster.pace = Pace(0.0)
    for engine in engines:
        engine.streams[0].messages.put_nowait(rpc_error(grpc.StatusCode.UNAVAILABLE))
    left = [len(engines)]
    async with asyncio.timeout(60):
        while left[-1]:
            await asyncio.sleep(0)
            left.append(len(fleet.roster.connections))
    assert max(before - after for before, after in itertools.pairwise(left)) == 1


class Stub:
    """Instances that take whatever is sent and answer nothing. `sent`: requests to all of them."""

    def __init__(self) -> None:
        self.sent: list[pb.WorkRequest] = []
        self.tasks: list[asyncio.Task[None]] = []

    def Work(self, requests: AsyncIterator[pb.WorkRequest]) -> FakeWorkCall:
        self.tasks.append(asyncio.create_task(self._take(requests)))
        return FakeWorkCall()

    async def _take(self, requests: AsyncIterator[pb.WorkRequest]) -> None:
        async for request in requests:
            self.sent.append(request)


async def test_samples_given_to_a_fleet_at_once_go_out_to_one_instance_after_the_other() -> None:
    pace, batch, stub = Pace(0.0), a_batch(samples=4), Stub()
    backlog = JournalBacklog(1, GatewayMetrics(CollectorRegistry()))
    instances: Any = stub
    links = []
    for index in range(len(batch.samples)):
        slots = InstanceSlots(f"instance-{index}", VERSION, 1)
        backoff = ExponentialBackoff(1.0, 1.0)
        link = WorkLink(slots.instance_id, 1, slots, backoff, instances, lambda *_: None, pace, backlog)
        link.give(Attempt(batch, index, 1, "p", 1.0), pb.WorkItem(handle=next(link.handles)))
        links.append(asyncio.create_task(link.run()))
    counts = [0]
    async with asyncio.timeout(60):
        while counts[-1] < len(links):
            await asyncio.sleep(0)
            counts.append(len(stub.sent))
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1
    await end([*links, *stub.tasks])


async def test_a_long_message_is_processed_in_parts_and_in_order() -> None:
    call, seen = FakeWorkCall(), list[pb.WorkResponse]()
    stub: Any = SimpleNamespace(Work=lambda requests: call)
    slots, backoff = InstanceSlots("a", VERSION, 1), ExponentialBackoff(1.0, 1.0)

    def receive(_: WorkLink, response: pb.WorkResponse) -> None:
        seen.append(response)

    backlog = JournalBacklog(1, GatewayMetrics(CollectorRegistry()))
    link = WorkLink("a", 1, slots, backoff, stub, receive, Pace(0.0), backlog)
    long, short = pb.WorkResponse(), pb.WorkResponse()
    for handle in range(150):
        long.deltas.add(handle=handle, tokens=columns([handle], [-1.0]))
        long.finished.add(handle=handle)
    long.refused.add(handle=1000)
    short.finished.add(handle=1001)
    for message in (long, short, None):
        call.messages.put_nowait(message)
    await link.run()
    assert [len(each.deltas) + len(each.finished) + len(each.refused) for each in seen[-2:]] == [1, 1]
    assert max(len(each.deltas) + len(each.finished) for each in seen) < 100
    together = pb.WorkResponse()
    for each in seen[:-1]:
        together.MergeFrom(each)
    assert together == long
    assert seen[-1] == short
    kinds = [field.name for each in seen for field, _ in each.ListFields()]
    assert kinds == [
        *["deltas"] * kinds.count("deltas"),
        *["finished"] * (kinds.count("finished") - 1),
        "refused",
        "finished",
    ]
