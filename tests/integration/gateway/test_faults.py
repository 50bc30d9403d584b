"""Instances, gateways and Redis die in mid-step: every sample comes back exactly once, and the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from paceline.v1 import fleet_pb2, rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKeys, GatewayKeys
from services.gateway.config import GatewayConfig
from services.platform.redis.connection import connect
from services.platform.redis.embedded import EmbeddedRedis
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    Trainer,
    check_samples,
    chunked_tokens,
    make_batch,
    until,
)
from tests.support.fake_instance import FakeInstance


async def _all_held(fakes: list[FakeInstance], count: int, length: int) -> None:
    """Wait until `count` samples run on the instances and all have `length` tokens."""
    await until(
        lambda: [s.length for fake in fakes for s in fake.running()] == [length] * count,
        f"{count} samples have {length} tokens",
    )


async def test_the_samples_of_a_killed_instance_go_on_elsewhere(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = 12
    await cluster.serving(gateway, 2)
    request = make_batch(groups=4, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    await _all_held(fakes, 16, 12)
    batch = gateway.gateway.leadership.leading().batches.by_key["run", request.batch_id].batch
    await until(lambda: min(len(s.tokens) for s in batch.samples) >= 8, "the gateway has some of each")
    on_first = len(fakes[0].running())
    assert 0 < on_first < 16
    before = len(fakes[1].accepted)
    await fakes[0].kill()
    await until(lambda: len(fakes[1].running()) == 16, "the survivor has them all")
    moved = fakes[1].accepted[before:]
    assert len(moved) == on_first
    # All that was reported but the last token, which is sampled again; it reports every fourth or so.
    assert {len(item.prefix_token_ids) for item in moved} <= set(range(7, 12))
    fakes[1].hold_at = None
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert sum(event.sample.provenance.resubmissions for event in events) == on_first
    moved_spans = [[s.instance_id for s in e.sample.provenance.instance_spans] for e in events]
    assert moved_spans.count(["i0", "i1"]) == on_first
    assert gateway.metric("resubmissions_total", cause="lost") == on_first


async def test_samples_of_an_instance_that_died_before_its_first_report_begin_again(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name, flush_every=1 << 30) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = 12
    await cluster.serving(gateway, 2)
    request = make_batch(groups=4, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    await _all_held(fakes, 16, 12)
    lost = len(fakes[0].running())
    await fakes[0].kill()
    await until(lambda: len(fakes[1].running()) == 16, "the survivor has them all")
    assert all(not item.prefix_token_ids for item in fakes[1].accepted)
    fakes[1].hold_at = None
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert sum(event.sample.provenance.resubmissions for event in events) == lost > 0
    # What was generated where nobody heard of it is nobody's.
    assert {s.instance_id for e in events for s in e.sample.provenance.instance_spans} == {"i1"}


async def test_a_frozen_instance_is_noticed_and_ignored_when_it_wakes(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = 12
    await cluster.serving(gateway, 2)
    request = make_batch(groups=4, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    await _all_held(fakes, 16, 12)
    fakes[0].freeze()
    await until(lambda: len(fakes[1].running()) == 16, "the survivor has them all")
    # It wakes while its samples run elsewhere, and would go on to send what it had.
    fakes[0].hold_at = fakes[1].hold_at = 20
    fakes[0].unfreeze()
    await _all_held(fakes[1:], 16, 20)
    await until(lambda: not fakes[0].running(), "its stream is gone, and its samples with it")
    fakes[1].hold_at = None
    check_samples(request, await gateway.trainer.collect(request))
    # The same process serves again: for the version that the fleet started with its word has to do.
    await cluster.serving(gateway, 2)


async def test_work_waits_for_a_new_process_when_no_instance_is_left(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 9
    await cluster.serving(gateway, 1)
    request = make_batch(groups=2, samples=2)
    await gateway.trainer.submit(request)
    await until(lambda: len(fake.accepted) == 4, "all are placed")
    await fake.kill()
    await until(lambda: not gateway.links(), "the loss is noticed")
    await cluster.instance("i0")
    check_samples(request, await gateway.trainer.collect(request))


async def test_an_instance_that_refuses_gets_a_pause_and_others_get_the_work(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    fakes[0].refuse_with = grpc.StatusCode.RESOURCE_EXHAUSTED
    await cluster.serving(gateway, 2)
    request = make_batch()
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))
    assert fakes[0].accepted == []
    assert gateway.metric("refusals_total", instance_id="i0", code="RESOURCE_EXHAUSTED") > 0


async def test_samples_that_are_refused_everywhere_fail_and_do_not_hang(cluster: Cluster) -> None:
    gateway = await cluster.gateway(max_attempts=3, refusal_pause_seconds=0.01)
    fake = await cluster.instance("i0")
    fake.refuse_with = grpc.StatusCode.RESOURCE_EXHAUSTED
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=2)
    await gateway.trainer.submit(request)
    events = await gateway.trainer.collect(request)
    assert [event.sample.status for event in events] == [sample_pb2.SAMPLE_STATUS_FAILED] * 2
    assert "3 attempts" in events[0].sample.error


async def test_an_invalid_sample_fails_with_the_instances_words(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.refuse_with = grpc.StatusCode.INVALID_ARGUMENT
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=1)
    await gateway.trainer.submit(request)
    (event,) = await gateway.trainer.collect(request)
    assert event.sample.status == sample_pb2.SAMPLE_STATUS_FAILED
    failure = event.sample.failure
    assert (failure.code, failure.field, failure.reason) == (code_pb2.INVALID_ARGUMENT, "seed", "refused")
    assert event.sample.error == "seed: refused"


async def test_a_drained_instance_hands_its_samples_over(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = 12
    await cluster.serving(gateway, 2)
    request = make_batch(groups=4, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    await _all_held(fakes, 16, 12)
    count = len(fakes[0].running())
    reply = await gateway.trainer.fleet.Drain(fleet_pb2.DrainRequest(instance_id="i0"), timeout=CALL)
    assert reply.handed_over == count
    await until(lambda: len(fakes[1].running()) == 16, "the other has them all")
    fakes[1].hold_at = None
    check_samples(request, await gateway.trainer.collect(request))
    assert gateway.metric("resubmissions_total", cause="handed_over") == count


async def test_a_restarted_gateway_goes_on_where_the_last_one_was_cut_off(cluster: Cluster) -> None:
    first = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(first, 2)
    fakes[0].hold_at = fakes[1].hold_at = 20
    request = make_batch(groups=6, samples=4)
    await first.trainer.submit(request)
    stream = first.trainer.stream(request)
    head = [await stream.read() for _ in range(3)]
    await until(lambda: sum(len(f.accepted) for f in fakes) == 24, "all are placed")
    await until(lambda: all(s.length == 20 for f in fakes for s in f.running()), "the rest is held")
    journal = connect(GatewayConfig(redis_url=cluster.redis_url))

    async def has_most() -> bool:
        return 19 in (await chunked_tokens(journal, cluster.namespace, request)).values()

    await until(has_most, "the journal has all settled tokens of one of them")
    await first.kill()
    for fake in fakes:
        await until(lambda fake=fake: not fake.running(), "the instances have dropped the samples")
        fake.accepted.clear()
    second = await cluster.gateway()
    await cluster.serving(second, 2)
    for fake in fakes:
        fake.hold_at = None
    tail = await second.trainer.collect(request, cursor=head[-1].cursor)
    check_samples(request, head + tail)
    assert (await second.trainer.submit(request)).already_submitted
    resumed = [item for fake in fakes for item in fake.accepted]
    # The last one is drawn again.
    assert max(len(item.prefix_token_ids) for item in resumed) == 19
    await journal.aclose()


async def test_a_cancellation_survives_a_restart(cluster: Cluster) -> None:
    # The first gateway does not live to give the answer up.
    first = await cluster.gateway(abort_timeout_seconds=CALL)
    fake = await cluster.instance("i0")
    fake.hold_at, fake.deaf = 8, True
    await cluster.serving(first, 1)
    request = make_batch(groups=1, samples=2, ignore_eos=True)
    await first.trainer.submit(request)
    await until(lambda: [s.length for s in fake.running()] == [8, 8], "both are held")
    journal = connect(GatewayConfig(redis_url=cluster.redis_url))

    async def has_all() -> bool:
        return (await chunked_tokens(journal, cluster.namespace, request)).get(0) == 7

    await until(has_all, "the journal has the settled tokens")
    cancel = rollout_pb2.CancelRolloutsRequest(
        run_id="run",
        batch_id=request.batch_id,
        keep_partial=True,
        samples=[rollout_pb2.SampleKey(prompt_id="p0", slot=0)],
    )
    await first.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)
    await first.kill()
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    fake.hold_at, fake.deaf = None, False
    events = {e.sample.slot: e.sample for e in await second.trainer.collect(request)}
    assert events[0].status == sample_pb2.SAMPLE_STATUS_ABORTED
    assert len(events[0].tokens.token_ids) == 7
    assert events[1].status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    await journal.aclose()


async def test_a_standby_takes_over_when_the_leader_ends(cluster: Cluster) -> None:
    # Of a stall that is shorter than the lease nobody takes over.
    leader = await cluster.gateway(lease_seconds=10.0)
    standby = await cluster.gateway(leading=False, lease_seconds=10.0)
    fake = await cluster.instance("i0")
    fake.hold_at = 10
    await cluster.serving(leader, 1)
    request = make_batch(ignore_eos=True)
    await leader.trainer.submit(request)
    await _all_held([fake], 12, 10)
    await leader.kill()
    await until(lambda: standby.gateway.leadership.term is not None, "the standby leads")
    fake.hold_at = None
    check_samples(request, await standby.trainer.collect(request))


async def test_a_leader_that_lost_its_lease_writes_nothing_more(cluster: Cluster) -> None:
    leader = await cluster.gateway(lease_seconds=30.0)
    fake = await cluster.instance("i0")
    fake.hold_at = 10
    await cluster.serving(leader, 1)
    request = make_batch(ignore_eos=True)
    await leader.trainer.submit(request)
    await _all_held([fake], 12, 10)
    # As if it had been frozen for longer than its lease: another one holds it and owns the batch.
    redis = connect(GatewayConfig(redis_url=cluster.redis_url))
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    later = leader.gateway.leadership.leading().journal.term + 1
    await redis.set(GatewayKeys(cluster.namespace).lease, later)
    await redis.set(f"{GatewayKeys(cluster.namespace).lease}:term", later)
    await redis.hset(keys.meta, "term", later)
    fake.hold_at = None
    await until(lambda: leader.gateway.leadership.term is None, "the leader steps down")
    assert await redis.hlen(keys.events) == await redis.hlen(keys.done) == 0
    # The other one goes, and the batch is taken over by whoever leads next.
    await redis.delete(f"{cluster.namespace}:{{gateway}}:lease")
    await until(lambda: leader.gateway.leadership.term is not None, "it leads again")
    check_samples(request, await leader.trainer.collect(request))
    await redis.aclose()


async def _read(trainer: Any, request: Any, stream: Any) -> list[Any]:
    """All events of a stream. One that had not begun when Redis went away is asked for again, as trainers do."""
    try:
        return [event async for event in stream]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return [event async for event in trainer.stream(request)]


async def test_redis_may_be_restarted_in_mid_step(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    cluster = Cluster(server.start(), "ns")
    try:
        gateway = await cluster.gateway(lease_seconds=30.0)
        fakes = [await cluster.instance(name) for name in ("i0", "i1")]
        for fake in fakes:
            fake.hold_at = 10
        await cluster.serving(gateway, 2)
        request = make_batch(groups=6, samples=4)
        await gateway.trainer.submit(request)
        stream = gateway.trainer.stream(request)
        await until(lambda: sum(len(f.accepted) for f in fakes) == 24, "all are placed")
        await until(lambda: all(s.length == 10 for f in fakes for s in f.running()), "all are held")
        await asyncio.to_thread(server.stop)
        # The instances finish their samples while nothing can be journaled.
        for fake in fakes:
            fake.hold_at = None
        await until(lambda: not any(f.running() for f in fakes), "all samples have ended")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.trainer.submit(make_batch())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        server.start()
        check_samples(request, await _read(gateway.trainer, request, stream))
        assert gateway.metric("instance_losses_total", instance_id="i0") == 0
        again = make_batch()
        # The first call may still meet a connection to the old server, and is answered UNAVAILABLE.
        await until(lambda: _accepted(gateway.trainer, again), "the next batch is accepted")
        check_samples(again, await gateway.trainer.collect(again))
    finally:
        await cluster.close()
        server.stop()


# With real processes and real signals ------------------------------------------------------------------

STEP = 0.02
"""Seconds of a step of an instance, so that there is a middle of a step."""


class Process:
    """A process of ours, ended with the test."""

    def __init__(self, *command: str) -> None:
        self.command = command

    async def __aenter__(self) -> Process:
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-m", *self.command)
        return self

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


def _gateway_process(cluster: Cluster, ready: Path) -> Process:
    return Process(
        "services.gateway", "--port", "0", "--redis-url", cluster.redis_url,
        "--namespace", cluster.namespace, "--ready-file", str(ready), "--lease-seconds", "1",
    )  # fmt: skip


def _instance_process(cluster: Cluster, name: str, *flags: str) -> Process:
    return Process(
        "tests.support.fake_instance", "--id", name, "--redis-url", cluster.redis_url,
        "--namespace", cluster.namespace, "--step-seconds", str(STEP), *flags,
    )  # fmt: skip


async def _connect(ready: Path) -> Trainer:
    await until(ready.exists, "the gateway is ready")
    address = json.loads(await asyncio.to_thread(ready.read_text))["address"]
    return Trainer(grpc.aio.insecure_channel(address))


async def test_sigkill_of_the_gateway_and_of_an_instance_lose_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    request = make_batch(groups=8, samples=4, max_tokens=120)
    await cluster.instance("i1", step_seconds=STEP)
    async with (
        _instance_process(cluster, "i0") as victim,
        _gateway_process(cluster, tmp_path / "ready.json") as first,
    ):
        trainer = await _connect(tmp_path / "ready.json")
        await until(lambda: _two_serve(trainer), "both instances serve")
        await until(lambda: _accepted(trainer, request), "the batch is accepted")
        stream = trainer.stream(request)
        head = [await stream.read() for _ in range(4)]
        victim.signal(signal.SIGKILL)
        head.append(await stream.read())
        first.signal(signal.SIGKILL)
        await first.process.wait()
        second = await cluster.gateway()
        tail = await second.trainer.collect(request, head[-1].cursor)
        check_samples(request, head + tail)


async def test_sigstop_of_an_instance_loses_nothing(cluster: Cluster) -> None:
    request = make_batch(groups=8, samples=4, max_tokens=100, ignore_eos=True)
    gateway = await cluster.gateway()
    await cluster.instance("i1", step_seconds=STEP)
    # It ends none of its samples, however late the signal is.
    async with _instance_process(cluster, "i0", "--hold-at", "9") as victim:
        await cluster.serving(gateway, 2)
        await gateway.trainer.submit(request)
        events = asyncio.create_task(gateway.trainer.collect(request))
        victim.signal(signal.SIGSTOP)
        collected = await events
        victim.signal(signal.SIGCONT)
        check_samples(request, collected)
        assert sum(event.sample.provenance.resubmissions for event in collected) > 0


async def _two_serve(trainer: Trainer) -> bool:
    try:
        reply = await trainer.fleet.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=CALL)
    except grpc.aio.AioRpcError:
        return False
    return [i.state for i in reply.instances] == [fleet_pb2.INSTANCE_STATE_SERVING] * 2


async def _accepted(trainer: Trainer, request: rollout_pb2.SubmitRolloutsRequest) -> bool:
    try:
        return bool((await trainer.submit(request)).samples)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
