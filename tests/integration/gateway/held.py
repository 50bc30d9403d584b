"""A batch in mid-step: some of its samples have ended, the others wait at a token."""

from __future__ import annotations

from typing import Any

from paceline.v1 import rollout_pb2
from tests.integration.gateway.conftest import Cluster, RunningGateway, check_complete, until
from tests.support.fake_instance import FakeInstance

Request = rollout_pb2.SubmitRolloutsRequest
Events = list[rollout_pb2.StreamRolloutsResponse]


async def held(cluster: Cluster, request: Request, **settings: Any) -> tuple[RunningGateway, FakeInstance]:
    """Return a gateway that works on a batch of which some samples have ended and others wait at token 20."""
    gateway = await cluster.gateway(lease_seconds=30.0, **settings)
    fake = await cluster.instance("i0", max_running=64)
    fake.hold_at = 20
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(request)
    assert await journaled(gateway, fake, request) > 3
    return gateway, fake


async def hold_on(gateway: RunningGateway, fake: FakeInstance, request: Request, at: int) -> int:
    """Let the samples that are held go on to a later token; return how many of the batch have ended."""
    before = len(fake.running())
    fake.hold_at = at
    ended = await journaled(gateway, fake, request)
    assert len(fake.running()) < before
    return ended


async def journaled(gateway: RunningGateway, fake: FakeInstance, request: Request) -> int:
    """Wait until all samples that run are held, and the journal has the others; return their number."""
    record = gateway.gateway.leadership.leading().recovery.records.get(("run", request.batch_id))
    assert record is not None
    await until(lambda: len(fake.accepted) >= record.total, "all samples are placed")
    await until(
        lambda: fake.running() and all(s.length == fake.hold_at for s in fake.running()), "the rest is held"
    )
    ended = record.total - len(fake.running())
    await until(lambda: record.safe == ended, "the journal has what has ended")
    return ended


async def read(gateway: RunningGateway, request: Request, count: int) -> Events:
    """Return the first events of a batch."""
    stream = gateway.trainer.stream(request)
    events = [await stream.read() for _ in range(count)]
    stream.cancel()
    return events


def once_each(request: Request, events: Events) -> None:
    """Every sample is there, equal to an undisturbed one; what came twice is equal, as the SDK drops it."""
    cursors = [event.cursor for event in events]
    assert cursors == sorted(set(cursors))
    wanted = {(group.prompt_id, slot) for group in request.groups for slot in range(group.samples)}
    assert {(event.sample.prompt_id, event.sample.slot) for event in events} == wanted
    for event in events:
        check_complete(request, event.sample)
