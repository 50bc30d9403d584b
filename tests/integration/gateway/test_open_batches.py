"""Open batches: groups that are added while samples run come back like those of a batch submitted whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from paceline.v1 import rollout_pb2
from services.contracts.gateway_keys import BatchKeys
from services.gateway.config import GatewayConfig
from services.gateway.journal.journal import Journal
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    SampleStream,
    check_samples,
    details,
    make_batch,
    until,
)
from tests.support.fake_instance import FakeInstance

Request = rollout_pb2.SubmitRolloutsRequest


def opening(request: Request, **fields: Any) -> rollout_pb2.OpenBatchRequest:
    """Return the request that opens the batch without its groups."""
    return rollout_pb2.OpenBatchRequest(
        run_id=request.run_id,
        batch_id=request.batch_id,
        step=request.step,
        policy_version=request.policy_version,
        sampling=request.sampling,
        run_seed=request.run_seed,
        **fields,
    )


async def add(gateway: RunningGateway, request: Request, *numbers: int) -> rollout_pb2.AddSamplesResponse:
    """Add groups of the request to its batch."""
    groups = [request.groups[number] for number in numbers]
    message = rollout_pb2.AddSamplesRequest(run_id=request.run_id, batch_id=request.batch_id, groups=groups)
    return await gateway.trainer.rollouts.AddSamples(message, timeout=CALL)


async def close(gateway: RunningGateway, request: Request) -> rollout_pb2.CloseBatchResponse:
    message = rollout_pb2.CloseBatchRequest(run_id=request.run_id, batch_id=request.batch_id)
    return await gateway.trainer.rollouts.CloseBatch(message, timeout=CALL)


async def status(gateway: RunningGateway, request: Request) -> rollout_pb2.BatchStatus:
    message = rollout_pb2.GetBatchRequest(run_id=request.run_id, batch_id=request.batch_id)
    return (await gateway.trainer.rollouts.GetBatch(message, timeout=CALL)).batch


async def hand_in(gateway: RunningGateway, request: Request, *, opened: bool) -> None:
    """Submit a batch, or open it, add its groups and close it: the same comes of both."""
    if not opened:
        await gateway.trainer.submit(request)
        return
    await gateway.trainer.rollouts.OpenBatch(opening(request), timeout=CALL)
    await add(gateway, request, *range(len(request.groups)))
    await close(gateway, request)


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Return code, reason and details of the error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    found = details(raised.value)
    return raised.value.code(), found["ErrorInfo"].reason, found


async def opened(cluster: Cluster, request: Request, **settings: Any) -> tuple[RunningGateway, FakeInstance]:
    """Return a gateway with one instance, and the request's batch opened."""
    gateway = await cluster.gateway(lease_seconds=30.0, **settings)
    fake = await cluster.instance("i0", max_running=64)
    await cluster.serving(gateway, 1)
    answer = await gateway.trainer.rollouts.OpenBatch(opening(request), timeout=CALL)
    assert not answer.already_opened
    return gateway, fake


async def read(stream: SampleStream, count: int) -> list[rollout_pb2.StreamRolloutsResponse]:
    return [await stream.read() for _ in range(count)]


async def rest(stream: SampleStream) -> list[rollout_pb2.StreamRolloutsResponse]:
    """Return what is still to come."""
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def test_groups_are_added_while_samples_are_read_and_the_stream_ends_with_the_close(
    cluster: Cluster,
) -> None:
    request = make_batch(groups=3)
    gateway, _ = await opened(cluster, request)
    stream = gateway.trainer.stream(request)
    assert (await add(gateway, request, 0)) == rollout_pb2.AddSamplesResponse(added=4, total=4)
    events = await read(stream, 4)
    assert all(event.open for event in events)
    now = await status(gateway, request)
    assert (now.open, now.total, now.finished) == (True, 4, 4)
    assert (await add(gateway, request, 1)).total == 8
    events += await read(stream, 4)
    # What is there already is passed over, as after an answer that was lost.
    assert (await add(gateway, request, 0, 1)) == rollout_pb2.AddSamplesResponse(added=0, total=8)
    assert (await add(gateway, request, 1, 2)) == rollout_pb2.AddSamplesResponse(added=4, total=12)
    assert await close(gateway, request) == rollout_pb2.CloseBatchResponse(total=12)
    events += await rest(stream)
    check_samples(request, events)
    assert await close(gateway, request) == rollout_pb2.CloseBatchResponse(total=12, already_closed=True)
    assert not (await status(gateway, request)).open
    # One that is read again from its end is told that nothing more comes.
    last = [event async for event in gateway.trainer.events(request, events[-1].cursor)]
    assert [(event.open, event.HasField("sample"), event.total) for event in last] == [(False, False, 12)]


async def test_what_cannot_be_added_is_refused_with_its_reason_and_disturbs_nothing(cluster: Cluster) -> None:
    request = make_batch(groups=2)
    gateway, _ = await opened(cluster, request, max_open_batch_samples=10)
    await add(gateway, request, 0)
    other = make_batch(groups=2)
    other.batch_id = request.batch_id
    other.groups[0].samples = 5
    code, reason, found = await refused(add(gateway, other, 1, 0))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS")
    assert "groups[1]" in found["ResourceInfo"].description
    assert (await status(gateway, request)).total == 4, "nothing of it was added"
    other.groups[1].prompt_token_ids[0] = 10**6
    code, _, found = await refused(add(gateway, other, 1))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert found["BadRequest"].field_violations[0].field == "groups[0].prompt_token_ids[0]"
    other.groups[1].prompt_token_ids[0] = 1
    other.groups[1].samples = 7
    code, _, found = await refused(add(gateway, other, 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "RetryInfo" not in found
    code, reason, found = await refused(gateway.trainer.submit(request))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS")
    assert "it was opened" in found["ResourceInfo"].description
    reopened = opening(request)
    reopened.run_seed += 1
    code, reason, found = await refused(gateway.trainer.rollouts.OpenBatch(reopened, timeout=CALL))
    assert (code, found["ErrorInfo"].metadata["field"]) == (grpc.StatusCode.ALREADY_EXISTS, "run_seed")
    again = await gateway.trainer.rollouts.OpenBatch(opening(request), timeout=CALL)
    assert again.already_opened
    await add(gateway, request, 1)
    await close(gateway, request)
    other.groups[1].prompt_id = "late"
    code, reason, _ = await refused(add(gateway, other, 1))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BATCH_CLOSED")
    assert (await add(gateway, request, 0, 1)).added == 0, "what it has may be named again"
    check_samples(request, await gateway.trainer.collect(request))


async def test_admission_asks_to_come_again_while_the_gateway_is_full(cluster: Cluster) -> None:
    request = make_batch(groups=3, ignore_eos=True)
    gateway, fake = await opened(cluster, request, max_queued_samples=9)
    fake.hold_at = 10
    await add(gateway, request, 0, 1)
    code, _, found = await refused(add(gateway, request, 2))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found["RetryInfo"].retry_delay.seconds == 5
    fake.hold_at = None
    await until(lambda: gateway.gateway.leadership.leading().batches.unfinished == 0, "all have ended")
    assert (await add(gateway, request, 2)).added == 4
    await close(gateway, request)
    check_samples(request, await gateway.trainer.collect(request))


async def test_no_more_batches_are_opened_than_samples_may_be_queued(cluster: Cluster) -> None:
    gateway, _ = await opened(cluster, make_batch(groups=0), max_queued_samples=2)
    await gateway.trainer.rollouts.OpenBatch(opening(make_batch(groups=0)), timeout=CALL)
    third = opening(make_batch(groups=0))
    code, _, found = await refused(gateway.trainer.rollouts.OpenBatch(third, timeout=CALL))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "RetryInfo" in found


async def test_a_closed_batch_without_groups_is_complete(cluster: Cluster) -> None:
    request = make_batch(groups=0)
    gateway, _ = await opened(cluster, request)
    await close(gateway, request)
    (event,) = [event async for event in gateway.trainer.events(request)]
    assert (event.open, event.total) == (False, 0)
    assert gateway.gateway.leadership.leading().batches.by_key == {}


async def test_acknowledged_samples_of_an_open_batch_leave_and_more_are_added(cluster: Cluster) -> None:
    request = make_batch(groups=2)
    gateway, _ = await opened(cluster, request)
    await add(gateway, request, 0)
    stream = gateway.trainer.stream(request)
    events = await read(stream, 4)
    ack = rollout_pb2.AckRolloutsRequest(run_id="run", batch_id=request.batch_id, cursor=events[-1].cursor)
    assert (await gateway.trainer.rollouts.AckRollouts(ack, timeout=CALL)).trimmed == 4
    await add(gateway, request, 1)
    await close(gateway, request)
    events += await rest(stream)
    check_samples(request, events)


async def test_a_cancelled_batch_is_closed_and_its_named_samples_alone_are_not(cluster: Cluster) -> None:
    request = make_batch(groups=2, ignore_eos=True)
    gateway, fake = await opened(cluster, request, abort_timeout_seconds=CALL)
    fake.hold_at = 10
    await add(gateway, request, 0)
    one = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id)
    one.samples.add(prompt_id="p0", slot=1)
    assert (await gateway.trainer.rollouts.CancelRollouts(one, timeout=CALL)).cancelled == 1
    assert (await status(gateway, request)).open
    await add(gateway, request, 1)
    every = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id)
    assert (await gateway.trainer.rollouts.CancelRollouts(every, timeout=CALL)).cancelled == 7
    assert len(await gateway.trainer.collect(request)) == 8
    assert not (await status(gateway, request)).open


async def test_an_open_batch_of_nobody_is_closed_and_its_samples_are_kept(cluster: Cluster) -> None:
    request = make_batch(groups=2)
    gateway, _ = await opened(cluster, request, open_batch_idle_seconds=0.4)
    await add(gateway, request, 0, 1)
    await until(lambda: gateway.metric("closed_batches_total", cause="idle") == 1, "it was closed")
    code, reason, _ = await refused(_late(gateway, request))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BATCH_CLOSED")
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_batch_that_is_read_stays_open(cluster: Cluster) -> None:
    request = make_batch(groups=1)
    idle = make_batch(groups=0)
    gateway, _ = await opened(cluster, request, open_batch_idle_seconds=0.4)
    stream = gateway.trainer.stream(request)
    # It waits for samples, of which there are none yet.
    await until(lambda: _running(gateway, request).readers == 1, "the stream waits")
    await gateway.trainer.rollouts.OpenBatch(opening(idle), timeout=CALL)
    await until(lambda: gateway.metric("closed_batches_total", cause="idle") == 1, "the other was closed")
    assert (await add(gateway, request, 0)).added == 4
    await close(gateway, request)
    check_samples(request, await rest(stream))


async def test_the_deadline_ends_and_closes_an_open_batch(cluster: Cluster) -> None:
    request = make_batch(groups=1)
    gateway, fake = await opened(
        cluster, request, max_batch_seconds=0.5, abort_timeout_seconds=0.1, open_batch_idle_seconds=2.0
    )
    fake.hold_at = 10
    await add(gateway, request, 0)
    assert len(await gateway.trainer.collect(request)) == 4
    assert gateway.metric("closed_batches_total", cause="deadline") == 1


async def _late(gateway: RunningGateway, request: Request) -> None:
    late = make_batch(groups=3)
    late.batch_id = request.batch_id
    await add(gateway, late, 2)


async def _successor(cluster: Cluster) -> RunningGateway:
    """Return a gateway that has taken over and has the instance."""
    gateway = await cluster.gateway()
    await cluster.serving(gateway, 1)
    return gateway


def _running(gateway: RunningGateway, request: Request) -> Any:
    return gateway.gateway.leadership.leading().batches.by_key["run", request.batch_id]


# Failover -----------------------------------------------------------------------------------------------


async def test_the_next_gateway_goes_on_with_an_open_batch(cluster: Cluster) -> None:
    request = make_batch(groups=4)
    gateway, fake = await opened(cluster, request)
    fake.hold_at = 20
    await add(gateway, request, 0, 1)
    await add(gateway, request, 2)
    await until(lambda: len(fake.accepted) == 12, "all samples are placed")
    await gateway.kill()
    second = await _successor(cluster)
    fake.hold_at = None
    assert (await status(second, request)).open
    # The answer to the last addition was lost with the gateway, for all that the trainer knows.
    assert (await add(second, request, 2)) == rollout_pb2.AddSamplesResponse(added=0, total=12)
    assert (await add(second, request, 3)).added == 4
    events = await read(second.trainer.stream(request), 16)
    await second.kill()
    third = await _successor(cluster)
    await close(third, request)
    await third.kill()
    fourth = await _successor(cluster)
    assert not (await status(fourth, request)).open
    check_samples(request, await fourth.trainer.collect(request))
    assert {event.sample.seed for event in events} == {
        event.sample.seed for event in await fourth.trainer.collect(request)
    }


@pytest.mark.parametrize("written", [True, False], ids=["answer", "call"])
async def test_an_addition_that_is_cut_off_is_whole_or_absent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    request = make_batch(groups=3)
    gateway, _ = await opened(cluster, request)
    await add(gateway, request, 0)
    reached, original = asyncio.Event(), Journal.add

    async def cut_off(journal: Journal, *args: Any) -> None:
        if written:
            await original(journal, *args)
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Journal, "add", cut_off)
    adding = asyncio.create_task(add(gateway, request, 1))
    await reached.wait()
    monkeypatch.undo()
    await gateway.kill()
    (outcome,) = await asyncio.gather(adding, return_exceptions=True)
    assert isinstance(outcome, BaseException)
    second = await _successor(cluster)
    assert (await status(second, request)).total == (8 if written else 4)
    assert (await add(second, request, 1, 2)).total == 12
    await close(second, request)
    check_samples(request, await second.trainer.collect(request))


async def test_an_addition_that_only_redis_knows_is_settled_by_the_next_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is given up after Redis took it: the gateway does not learn of it, and another addition follows."""
    request = make_batch(groups=3)
    gateway, _ = await opened(cluster, request)
    original = Journal.add

    async def unanswered(journal: Journal, *args: Any) -> None:
        await original(journal, *args)
        raise ConnectionError("the answer is lost")

    monkeypatch.setattr(Journal, "add", unanswered)
    with pytest.raises(grpc.aio.AioRpcError):
        await add(gateway, request, 0)
    monkeypatch.undo()
    assert (await add(gateway, request, 1)).total == 4
    assert (await add(gateway, request, 0, 2)).total == 12
    await close(gateway, request)
    check_samples(request, await gateway.trainer.collect(request))
    await gateway.kill()
    second = await _successor(cluster)
    check_samples(request, await second.trainer.collect(request))


async def test_additions_that_redis_loses_are_recorded_again(cluster: Cluster) -> None:
    request = make_batch(groups=4)
    gateway, fake = await opened(cluster, request)
    redis: Any = connect(GatewayConfig(redis_url=cluster.redis_url))
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    fake.hold_at = 10
    await add(gateway, request, 0)
    before = {name: await redis.dump(name) for name in (keys.meta, keys.adds)}
    await add(gateway, request, 1)
    # As a replica that was promoted: the last write is gone.
    for name, value in before.items():
        await redis.restore(name, 0, value, replace=True)
    assert (await add(gateway, request, 2)).total == 12
    await redis.delete(*keys.all)
    assert (await add(gateway, request, 3)).total == 16
    await redis.aclose()
    await gateway.kill()
    second = await _successor(cluster)
    fake.hold_at = None
    assert (await status(second, request)).total == 16
    await close(second, request)
    check_samples(request, await second.trainer.collect(request))
