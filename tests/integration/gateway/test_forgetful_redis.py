"""A Redis that forgets what it acknowledged: every sample is delivered once and equal, or the loss is named."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.errors import FailedPrecondition
from services.contracts.gateway_keys import BatchKeys, GatewayKeys
from services.gateway.config import GatewayConfig
from services.gateway.drain import drain
from services.gateway.journal.fenced_records import Fenced
from services.gateway.journal.journal import Journal
from services.platform.redis.connection import connect
from services.platform.redis.embedded import EmbeddedRedis
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    check_samples,
    chunked_tokens,
    details,
    make_batch,
    until,
)
from tests.integration.gateway.held import Request, held, hold_on, once_each, read
from tests.support.redis_servers import RedisServer, form_cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server of our own, which may be emptied, killed and cut short."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def cluster(server: EmbeddedRedis, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(server.start(), namespace)
    yield cluster
    await cluster.close()


@pytest.fixture
async def redis(cluster: Cluster) -> AsyncIterator[Any]:
    client = connect(GatewayConfig(redis_url=cluster.redis_url))
    yield client
    await client.aclose()


async def _forget(redis: Any, cluster: Cluster, request: Request, *names: str) -> None:
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    await redis.delete(*(getattr(keys, name) for name in names))


_VANISHING = [("events",), ("done",), ("events", "done"), ("meta",), ("meta", "events", "done")]


@pytest.mark.parametrize("names", _VANISHING)
async def test_keys_that_vanish_under_a_running_gateway_are_written_again(
    cluster: Cluster, redis: Any, names: tuple[str, ...]
) -> None:
    request = make_batch(groups=6, samples=4)
    gateway, fake = await held(cluster, request)
    head = await read(gateway, request, 2)
    await _forget(redis, cluster, request, *names)
    fake.hold_at = None
    tail = await gateway.trainer.collect(request, cursor=head[-1].cursor)
    check_samples(request, head + tail)
    assert gateway.metric("journal_holes_total", kind="gone" if "meta" in names else "hole") == 1
    assert gateway.metric("resubmissions_total", cause="journal") == 0
    # Redis has it all again: another gateway delivers it.
    await gateway.kill()
    second = await cluster.gateway()
    check_samples(request, await second.trainer.collect(request))


async def test_what_neither_redis_nor_the_memory_has_is_generated_again(cluster: Cluster, redis: Any) -> None:
    request = make_batch(groups=6, samples=4)
    gateway, fake = await held(cluster, request, max_result_bytes=0)
    head = await read(gateway, request, 3)
    await _forget(redis, cluster, request, "events", "done")
    fake.hold_at = None
    tail = await gateway.trainer.collect(request, cursor=head[-1].cursor)
    once_each(request, head + tail)
    assert gateway.metric("resubmissions_total", cause="journal") > 3


async def test_samples_that_vanish_after_the_end_of_a_batch_are_generated_again(
    cluster: Cluster, redis: Any
) -> None:
    request = make_batch(groups=2, samples=4)
    gateway = await cluster.gateway(lease_seconds=30.0, max_result_bytes=0)
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))
    await _forget(redis, cluster, request, "events")
    once_each(request, await gateway.trainer.collect(request))


async def test_tokens_that_vanish_become_no_zeros(cluster: Cluster, redis: Any) -> None:
    request = make_batch(groups=1, samples=4, ignore_eos=True)
    gateway = await cluster.gateway(lease_seconds=30.0)
    fake = await cluster.instance("i0")
    fake.hold_at = 12
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(request)
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    # The last token is not settled.
    await until(lambda: _chunked(redis, cluster, request, 11, 4), "the journal has eleven tokens of each")
    early = await redis.dump(keys.chunks)
    fake.hold_at = 24
    await until(lambda: _chunked(redis, cluster, request, 23, 4), "it has all that came")
    # As after a replica that lacks the last writes.
    await redis.restore(keys.chunks, 0, early, replace=True)
    fake.hold_at = 36
    await until(lambda: _chunked(redis, cluster, request, 35, 4), "it has them all again")
    assert gateway.metric("journal_holes_total", kind="torn") == 4
    await redis.hdel(keys.chunks, "3:0")
    await gateway.kill()
    fake.accepted.clear()
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    fake.hold_at = None
    check_samples(request, await second.trainer.collect(request))
    assert sorted(len(item.prefix_token_ids) for item in fake.accepted) == [0, 35, 35, 35]


async def test_an_ended_sample_whose_chunks_vanish_is_generated_again(cluster: Cluster, redis: Any) -> None:
    request = make_batch(groups=6, samples=4)
    gateway = await cluster.gateway(lease_seconds=30.0, max_result_bytes=0)
    fake = await cluster.instance("i0")
    fake.hold_at = 6
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(request)
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    await until(lambda: fake.running() and all(s.length == 6 for s in fake.running()), "they are held")
    running = len(fake.running())
    await until(lambda: _chunked(redis, cluster, request, 5, running), "the journal has five tokens of each")
    fake.hold_at = None
    # All that ended after their sixth token have chunks, and nothing of them is in memory.
    record = gateway.gateway.leadership.leading().recovery.records.get(("run", request.batch_id))
    assert record is not None
    await until(lambda: record.is_complete, "all have ended")
    chunked = [value for value in await redis.hvals(keys.done) if not value.endswith(b":0:0")]
    assert len(chunked) >= running > 3
    await redis.delete(keys.chunks)
    fake.accepted.clear()
    once_each(request, await gateway.trainer.collect(request))
    assert len(fake.accepted) == len(chunked)
    # A gateway that comes anew finds it out by itself.
    await redis.delete(keys.chunks)
    await gateway.kill()
    second = await cluster.gateway()
    check_samples(request, await second.trainer.collect(request))


async def _chunked(redis: Any, cluster: Cluster, request: Request, tokens: int, samples: int) -> bool:
    """Return True if so many samples have so many tokens in chunks."""
    found = await chunked_tokens(redis, cluster.namespace, request)
    return sum(each == tokens for each in found.values()) == samples


async def _on_disk(url: str) -> None:
    """Wait until all that Redis has answered is in its file. While the disk is slow it answers before it writes."""
    async with connect(GatewayConfig(redis_url=url)) as store, store.client() as redis:

        async def written() -> bool:
            await redis.set("the end", 1)
            local, _ = await redis.waitaof(1, 0, 1000)
            return bool(local)

        await until(written, "Redis has written all")


async def test_an_append_only_file_that_is_cut_short_costs_nothing_but_work(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    cluster = Cluster(server.start(), "ns")
    try:
        request = make_batch(groups=8, samples=4, max_tokens=60)
        gateway, fake = await held(cluster, request)
        await _on_disk(cluster.redis_url)
        (log,) = await asyncio.to_thread(lambda: list(tmp_path.glob("appendonlydir/*.incr.aof")))
        size = (await asyncio.to_thread(log.stat)).st_size
        ended = await hold_on(gateway, fake, request, 35)
        head = await read(gateway, request, ended)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(os.truncate, log, size)
        server.start()
        # A gateway that comes anew finds less than was delivered: it generates the rest under later cursors.
        await gateway.kill()
        second = await cluster.gateway()
        await cluster.serving(second, 1)
        fake.hold_at = None
        tail = await second.trainer.collect(request, cursor=head[-1].cursor)
        once_each(request, head + tail)
        seen = {(event.sample.prompt_id, event.sample.slot) for event in head}
        assert seen & {(event.sample.prompt_id, event.sample.slot) for event in tail}, "nothing was lost"
    finally:
        await cluster.close()
        server.stop()


async def test_flushall_in_mid_step_is_survived(cluster: Cluster, redis: Any) -> None:
    request = make_batch(groups=6, samples=4)
    gateway, fake = await held(cluster, request)
    head = await read(gateway, request, 2)
    await redis.flushall()
    fake.hold_at = None
    tail = await gateway.trainer.collect(request, cursor=head[-1].cursor)
    check_samples(request, head + tail)


async def test_when_redis_and_the_gateway_have_both_forgotten_the_loss_is_named(
    cluster: Cluster, redis: Any
) -> None:
    request = make_batch(groups=6, samples=4)
    gateway, fake = await held(cluster, request)
    cursor = (await read(gateway, request, 2))[-1].cursor
    await gateway.kill()
    await redis.flushall()
    second = await cluster.gateway()
    ack = rollout_pb2.AckRolloutsRequest(run_id="run", batch_id=request.batch_id, cursor=cursor)
    for call in (
        second.trainer.collect(request, cursor),
        second.trainer.rollouts.AckRollouts(ack, timeout=CALL),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.DATA_LOSS
        assert f"run/{request.batch_id}" in error.value.details()
        assert str(cursor) in error.value.details()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await second.trainer.collect(request)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    await until(lambda: not fake.running(), "the instance has dropped the samples")


async def _has(redis: Any, keys: BatchKeys, ended: int) -> bool:
    return await redis.hlen(keys.events) == ended


async def _has_chunk(redis: Any, namespace: str, request: Request, sample: Any) -> bool:
    index = 4 * int(sample.item.prompt_id[1:]) + sample.item.slot
    return (await chunked_tokens(redis, namespace, request)).get(index, 0) == sample.length - 1


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis Cluster of three nodes."""
    folder = tmp_path_factory.mktemp("nodes")
    servers = [RedisServer.of_cluster(folder / str(number)) for number in range(3)]
    try:
        form_cluster([server.start() for server in servers])
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
    finally:
        for server in servers:
            server.kill()


async def test_a_gateway_and_its_successor_work_on_a_redis_cluster(nodes: str, namespace: str) -> None:
    cluster = Cluster(nodes, namespace)
    try:
        gateway = await cluster.gateway()
        fakes = [await cluster.instance(name) for name in ("i0", "i1")]
        await cluster.serving(gateway, 2)
        # Each batch has a slot of its own.
        for _ in range(4):
            request = make_batch(groups=3, samples=2)
            await gateway.trainer.submit(request)
            check_samples(request, await gateway.trainer.collect(request))
        for fake in fakes:
            fake.hold_at = 10
        kept = make_batch(groups=3, samples=2)
        await gateway.trainer.submit(kept)
        await gateway.kill()
        for fake in fakes:
            fake.hold_at = None
        successor = await cluster.gateway()
        check_samples(kept, await successor.trainer.collect(kept))
    finally:
        await cluster.close()


async def test_a_redis_cluster_that_forgets_is_survived_like_one_server(nodes: str, namespace: str) -> None:
    cluster = Cluster(nodes, namespace)
    redis = connect(GatewayConfig(redis_url=nodes))
    try:
        request = make_batch(groups=6, samples=4)
        gateway, fake = await held(cluster, request)
        head = await read(gateway, request, 2)
        await _forget(redis, cluster, request, "events")
        fake.hold_at = 30
        await until(lambda: all(s.length == 30 for s in fake.running()), "the rest is held again")
        await until(lambda: gateway.metric("journal_holes_total", kind="hole") == 1, "the hole is found")
        keys, left = BatchKeys(namespace, ("run", request.batch_id)), fake.running()
        await until(lambda: _has(redis, keys, 24 - len(left)), "all that has ended is there again")
        await until(
            lambda: _has_chunk(redis, namespace, request, left[0]), "and the tokens of one that has not"
        )
        assert await _ack(gateway, request, head[0].cursor) == 1
        await gateway.kill()
        await until(lambda: not fake.running(), "the instance has dropped the samples")
        fake.accepted.clear()
        second = await cluster.gateway()
        await cluster.serving(second, 1)
        fake.hold_at = None
        tail = await second.trainer.collect(request, cursor=head[-1].cursor)
        check_samples(request, head + tail)
        assert max(len(item.prefix_token_ids) for item in fake.accepted) > 20
    finally:
        await cluster.close()
        await redis.aclose()


# Acknowledgement ---------------------------------------------------------------------------------------


async def _ack(gateway: RunningGateway, request: Request, cursor: int) -> int:
    ack = rollout_pb2.AckRolloutsRequest(run_id="run", batch_id=request.batch_id, cursor=cursor)
    return int((await gateway.trainer.rollouts.AckRollouts(ack, timeout=CALL)).trimmed)


async def test_acknowledged_samples_are_trimmed_and_not_streamed_again(cluster: Cluster, redis: Any) -> None:
    request = make_batch(groups=6, samples=4)
    gateway, fake = await held(cluster, request)
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    kept = await redis.hlen(keys.events)
    head = await read(gateway, request, 3)
    assert [await _ack(gateway, request, head[1].cursor) for _ in range(2)] == [2, 0]
    assert await redis.hlen(keys.events) == kept - 2
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.collect(request, cursor=head[0].cursor)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert details(error.value)["ErrorInfo"].metadata["acknowledged"] == str(head[1].cursor)
    fake.hold_at = None
    tail = await gateway.trainer.collect(request, cursor=head[1].cursor)
    check_samples(request, head[:2] + tail)
    assert gateway.metric("journal_holes_total", kind="hole") == 0
    # A successor knows it too.
    await gateway.kill()
    second = await cluster.gateway(acknowledged_seconds=100)
    assert [event.cursor for event in await second.trainer.collect(request, head[1].cursor)] == [
        event.cursor for event in tail
    ]
    assert await _ack(second, request, tail[-1].cursor) == len(tail)
    assert not await redis.exists(keys.events)
    assert 0 < await redis.ttl(keys.meta) <= 100
    assert 0 < await redis.ttl(keys.done) <= 100


async def test_rewards_of_acknowledged_samples_are_known_and_the_batch_may_be_submitted_again(
    cluster: Cluster,
) -> None:
    request = make_batch(groups=2, samples=2)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(request)
    first = await gateway.trainer.collect(request)
    await _ack(gateway, request, first[-1].cursor)
    report = rollout_pb2.ReportRewardsRequest(run_id="run", batch_id=request.batch_id)
    report.rewards.add(prompt_id="p1", slot=1, reward=1.0)
    report.rewards.add(prompt_id="p1", slot=2, reward=1.0)
    assert (await gateway.trainer.rollouts.ReportRewards(report, timeout=CALL)).matched == 1
    # Its trainer was restarted and has forgotten them.
    assert not (await gateway.trainer.submit(request)).already_submitted
    again = await gateway.trainer.collect(request)
    check_samples(request, again)
    assert again[0].cursor > first[-1].cursor


async def test_a_cursor_that_was_never_given_out_is_refused(cluster: Cluster) -> None:
    request = make_batch(groups=1, samples=1)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(request)
    (event,) = await gateway.trainer.collect(request)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _ack(gateway, request, event.cursor + 1)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Terms, cancellations, refusals ------------------------------------------------------------------------


async def test_a_former_leader_that_wakes_can_neither_take_a_batch_nor_write_to_it(
    cluster: Cluster, redis: Any
) -> None:
    request = make_batch(groups=6, samples=4)
    gateway, fake = await held(cluster, request)
    term = gateway.gateway.leadership.leading()
    key = ("run", request.batch_id)
    former = Journal(redis, cluster.namespace, term.journal.term - 1, 60, 60)
    record = term.recovery.records.get(key)
    assert record is not None
    cancel = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id)
    for call in (
        former.adopt(key, with_request=True),
        former.create(record, b""),
        former.cancel(cancel),
        former.acknowledge(record, [0]),
        former.discard(key),
    ):
        with pytest.raises(Fenced):
            await call
    fake.hold_at = None
    check_samples(request, await gateway.trainer.collect(request))
    assert gateway.metric("journal_holes_total", kind="hole") == 0


async def test_a_batch_that_nobody_took_up_can_be_cancelled(cluster: Cluster, redis: Any) -> None:
    request = make_batch(groups=1, samples=4, ignore_eos=True)
    first = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(first, 1)
    await first.trainer.submit(request)
    await until(lambda: len(fake.running()) == 4, "the samples run")
    await first.kill()
    await redis.delete(GatewayKeys(cluster.namespace).batches)
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    cancel = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id)
    assert (await second.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)).cancelled == 4
    events = await second.trainer.collect(request)
    assert [event.sample.status for event in events] == [sample_pb2.SAMPLE_STATUS_ABORTED] * 4
    # What comes after the end leaves no key without an expiry.
    assert (await second.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)).cancelled == 0
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    assert [await redis.ttl(name) for name in keys.all if await redis.ttl(name) == -1] == []


async def test_a_batch_that_redis_refuses_holds_up_no_other(cluster: Cluster, redis: Any) -> None:
    gateway = await cluster.gateway(lease_seconds=30.0)
    fake = await cluster.instance("i0", max_running=64)
    fake.hold_at = 5
    await cluster.serving(gateway, 1)
    refused, other = make_batch(groups=1, samples=4, ignore_eos=True), make_batch()
    await gateway.trainer.submit(refused)
    await until(lambda: len(fake.running()) == 4, "its samples run")
    keys = BatchKeys(cluster.namespace, ("run", refused.batch_id))
    await redis.set(keys.events, "of another kind")
    fake.hold_at = None
    await until(lambda: gateway.metric("journal_errors_total") > 0, "it is refused")
    await gateway.trainer.submit(other)
    check_samples(other, await gateway.trainer.collect(other))
    await redis.delete(keys.events)
    check_samples(refused, await gateway.trainer.collect(refused))


async def test_batches_are_refused_while_redis_is_nearly_full(cluster: Cluster, redis: Any) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    # So much that what comes and goes with connections does not count.
    await redis.setrange(f"{cluster.namespace}:ballast", (64 << 20) - 1, b"x")
    used = (await redis.info("memory"))["used_memory"]
    try:
        await redis.config_set("maxmemory", int(used * 1.1))
        await until(lambda: gateway.metric("redis_memory_ratio") > 0.85, "the gateway sees it")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.trainer.submit(make_batch())
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error.value)["QuotaFailure"].violations[0].subject == "redis_memory"
        assert "RetryInfo" in details(error.value)
    finally:
        await redis.config_set("maxmemory", 0)
        await redis.delete(f"{cluster.namespace}:ballast")
    await until(lambda: gateway.metric("redis_memory_ratio") == 0, "there is room again")
    request = make_batch()
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_journal_of_another_format_is_refused_until_it_is_drained(
    cluster: Cluster, redis: Any
) -> None:
    keys = GatewayKeys(cluster.namespace)
    config = GatewayConfig(redis_url=cluster.redis_url, namespace=cluster.namespace)
    # As the first format had it: listed batches, and no version.
    await redis.sadd(keys.batches, "run:old")
    old = BatchKeys(cluster.namespace, ("run", "old"))
    await redis.hset(old.meta, "owner", "gateway-0")
    await redis.set(keys.published, "{}")
    journal = Journal(redis, cluster.namespace, 1, 60, 60)
    with pytest.raises(FailedPrecondition, match=r"python -m services\.gateway\.drain --namespace"):
        await journal.check_format()
    await redis.set(keys.lease, "7")
    with pytest.raises(RuntimeError, match="gateway 7 leads"):
        await drain(config)
    await redis.delete(keys.lease)
    assert await drain(config) == 1
    assert [await redis.exists(name) for name in (old.meta, keys.batches, keys.published)] == [0, 0, 1]
    await journal.check_format()
    await Journal(redis, cluster.namespace, 2, 60, 60).check_format()
