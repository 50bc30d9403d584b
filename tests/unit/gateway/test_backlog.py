"""Finished samples that Redis does not take: above their bound nothing is taken from instances or given to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from services.contracts.errors import ResourceExhausted
from services.gateway.journal.writer import JournalBacklog
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.placement import InstanceSlots
from services.gateway.scheduler.turns import Pace
from services.gateway.scheduler.work_link import WorkLink
from services.platform.tasks import ExponentialBackoff, end
from tests.unit.gateway.scheduler_parts import VERSION, SchedulerParts, a_batch, finished, tokens, turn


def make(most_bytes: int = 100) -> tuple[JournalBacklog, CollectorRegistry]:
    registry = CollectorRegistry()
    return JournalBacklog(most_bytes, GatewayMetrics(registry)), registry


@given(st.lists(st.integers(-80, 80)))
def test_a_pause_begins_above_the_bound_and_ends_at_half_of_it(changes: list[int]) -> None:
    backlog, registry = make()
    paused = False
    for change in changes:
        backlog.add(max(change, -backlog.nbytes))
        paused = backlog.nbytes > 100 or (paused and backlog.nbytes > 50)
        assert backlog.paused == paused
        assert registry.get_sample_value("paceline_gateway_paused") == paused
        assert registry.get_sample_value("paceline_gateway_unwritten_ratio") == backlog.nbytes / 100
    backlog.clear()
    assert (backlog.nbytes, backlog.paused) == (0, False)
    assert registry.get_sample_value("paceline_gateway_paused") == 0


async def test_who_waits_is_told_of_beginning_and_end_and_new_batches_are_refused_between() -> None:
    backlog, _ = make()
    begins = backlog.changed.next_change()
    backlog.add(100)
    backlog.check()
    assert not begins.is_set()
    backlog.add(1)
    assert begins.is_set()
    with pytest.raises(ResourceExhausted, match="101 bytes"):
        backlog.check()
    ends = backlog.changed.next_change()
    backlog.add(-50)
    assert not ends.is_set()
    backlog.add(-1)
    assert ends.is_set()
    backlog.check()


async def test_nothing_is_placed_in_a_pause_and_everything_after_it() -> None:
    parts = SchedulerParts()
    parts.backlog.add(1001)
    link, receiver = parts.link("a"), parts.link("b")
    running = parts.scheduler.add(a_batch(2))
    await turn()
    assert (link.items, receiver.items, parts.metric("queued_samples")) == ([], [], 2)
    assert not parts.placer.place_on(running, 0, "b")
    parts.backlog.clear()
    parts.placer.pump_soon()
    await turn()
    assert len(link.items) + len(receiver.items) == 2
    # An event that was read before a pause is dealt with in it.
    parts.backlog.add(1001)
    placed = next(each for each in (link, receiver) if each.items)
    parts.events.responded(placed, tokens(placed.items[0].handle, 5, 0))
    parts.events.responded(placed, finished(placed.items[0].handle))
    assert (running.batch.ended, running.batch.ended_tokens) == (1, 2)


class ScriptedCall:
    """Work stream of an instance that says what the test puts into `responses`."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[pb.WorkResponse] = asyncio.Queue()

    def Work(self, requests: AsyncIterator[pb.WorkRequest]) -> ScriptedCall:
        return self

    def cancel(self) -> None:
        pass

    def __aiter__(self) -> ScriptedCall:
        return self

    async def __anext__(self) -> pb.WorkResponse:
        return await self.responses.get()


async def test_an_instance_is_not_listened_to_in_a_pause() -> None:
    backlog, _ = make()
    call, heard = ScriptedCall(), asyncio.Queue[pb.WorkResponse]()
    stub: Any = call
    slots = InstanceSlots("a", VERSION, 8, 0.0)

    def receive(link: WorkLink, response: pb.WorkResponse) -> None:
        heard.put_nowait(response)

    link = WorkLink("a", 1, slots, ExponentialBackoff(1, 1), stub, receive, Pace(60.0), backlog)
    task = asyncio.create_task(link.run())
    call.responses.put_nowait(tokens(1, 5))
    assert (await heard.get()).deltas[0].tokens.token_ids == [5]
    backlog.add(101)
    for value in (6, 7):
        call.responses.put_nowait(tokens(1, value))
    await turn()
    # One was taken from the stream, and is kept back; the other is left with the instance.
    assert (heard.qsize(), call.responses.qsize()) == (0, 1)
    backlog.clear()
    assert [(await heard.get()).deltas[0].tokens.token_ids for _ in range(2)] == [[6], [7]]
    await end([task])


async def test_samples_for_a_busy_instance_go_out_together_and_others_at_once() -> None:
    backlog, _ = make()
    sent = asyncio.Queue[pb.WorkRequest]()

    class Taking(ScriptedCall):
        def Work(self, requests: AsyncIterator[pb.WorkRequest]) -> Taking:
            self.taking = asyncio.create_task(self.take(requests))
            return self

        async def take(self, requests: AsyncIterator[pb.WorkRequest]) -> None:
            async for request in requests:
                sent.put_nowait(request)

    stub: Any = Taking()
    slots, interval = InstanceSlots("a", VERSION, 8, 0.0), [0.5]
    link = WorkLink(
        "a",
        1,
        slots,
        ExponentialBackoff(1, 1),
        stub,
        lambda *_: None,
        Pace(60.0),
        backlog,
        lambda: interval[0],
        lambda: 0.7,
    )
    task = asyncio.create_task(link.run())
    attempt: Any = None
    async with asyncio.timeout(60):
        link.give(attempt, pb.WorkItem(handle=1))
        first = await sent.get()
        assert [item.handle for item in first.start] == [1]
        assert seconds_of(first.report_interval) == 0.7
        for handle in (2, 3):
            link.give(attempt, pb.WorkItem(handle=handle))
        second = await sent.get()
        assert [item.handle for item in second.start] == [2, 3]
        assert not second.HasField("report_interval")
        # From now on it would be very long.
        interval[0] = 1e6
        link.give(attempt, pb.WorkItem(handle=4))
        await turn()
        assert sent.empty()
        link.give(attempt, pb.WorkItem(handle=5, streamed=True))
        assert [item.handle for item in (await sent.get()).start] == [4, 5]
        link.give(attempt, pb.WorkItem(handle=6))
        link.abort(6)
        last = await sent.get()
        assert ([item.handle for item in last.start], list(last.abort)) == ([6], [6])
    await end([task, stub.taking])
