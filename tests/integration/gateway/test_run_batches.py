"""Batches of a run as a whole: listed, looked at, and ended with their run."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from paceline import AsyncClient, RunEnded
from paceline.errors import NotFoundError
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKeys
from services.gateway.config import GatewayConfig
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import CALL, Cluster, check_samples, make_batch, until
from tests.integration.gateway.held import held


async def test_batches_are_listed_with_what_has_ended_of_them(cluster: Cluster) -> None:
    request = make_batch()
    gateway, _ = await held(cluster, request)
    other = make_batch(groups=1)
    other.run_id = "other"
    await gateway.trainer.submit(other)
    async with AsyncClient(gateway.gateway.address) as client:
        everything = [each async for each in client.batches()]
        assert [(each.run_id, each.batch_id) for each in everything] == [
            ("run", request.batch_id),
            ("other", other.batch_id),
        ]
        (mine,) = [each async for each in client.batches("run")]
        assert mine == everything[0] == await client.batch("run", request.batch_id)
        assert (mine.step, mine.policy_version, mine.total, mine.acknowledged) == (3, 0, 12, 0)
        assert 3 < mine.finished < 12
        await client.ack("run", request.batch_id, mine.cursor)
        assert (await client.batch("run", request.batch_id)).acknowledged == mine.finished
        with pytest.raises(NotFoundError):
            await client.batch("run", "of-nobody")


async def test_the_end_of_a_run_cancels_and_lets_go_of_its_samples_and_of_no_others(cluster: Cluster) -> None:
    request = make_batch()
    gateway, fake = await held(cluster, request, abort_timeout_seconds=CALL)
    other = make_batch(groups=1)
    other.run_id = "other"
    await gateway.trainer.submit(other)
    reading = gateway.trainer.stream(request)
    assert (await reading.read()).sample.status == sample_pb2.SAMPLE_STATUS_COMPLETED
    hint = rollout_pb2.HintNextBatchRequest(
        run_id="run", step=9, groups=request.groups, sampling=request.sampling
    )
    await gateway.trainer.rollouts.HintNextBatch(hint, timeout=CALL)
    unfinished = 12 - (await _status(cluster, request)).finished

    async with AsyncClient(gateway.gateway.address) as client:
        run = client.run("run")
        assert await run.end() == RunEnded(batches=1, cancelled=unfinished)
        status = await client.batch("run", request.batch_id)
        assert (status.finished, status.acknowledged) == (12, 12)
        assert await run.end() == RunEnded(batches=0, cancelled=0)
    keys = BatchKeys(cluster.namespace, ("run", request.batch_id))
    async with connect(GatewayConfig(redis_url=cluster.redis_url)) as redis:
        assert await redis.exists(keys.events, keys.chunks) == 0
    assert "run" not in gateway.gateway.leadership.leading().hinting.book.runs

    # What the others have in work goes on, and the run may begin again with a batch of the same name.
    fake.hold_at = None
    check_samples(other, await gateway.trainer.collect(other))
    single = rollout_pb2.GenerateRequest(run_id="run", prompt_token_ids=[1], sampling=request.sampling)
    before = gateway.metric("step_seconds_count")
    assert [event async for event in gateway.trainer.rollouts.Generate(single, timeout=CALL)]
    await gateway.trainer.rollouts.EndRun(rollout_pb2.EndRunRequest(run_id="run"), timeout=CALL)
    assert gateway.metric("step_seconds_count") == before + 1, "its single samples have a step"
    answer = await gateway.trainer.submit(request)
    assert not answer.already_submitted
    check_samples(request, await gateway.trainer.collect(request))


async def test_the_end_of_a_run_does_not_wait_for_what_the_run_begins_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ends at once, the first lets the run begin again, under a name that the second has found before."""
    request = make_batch()
    gateway, fake = await held(cluster, request)
    term = gateway.gateway.leadership.leading()
    known, looked, again = term.recovery.known, asyncio.Event(), asyncio.Event()

    async def late(*arguments: Any) -> Any:
        if asyncio.current_task() is second and cancelled.is_set():
            looked.set()
            await again.wait()
        return await known(*arguments)

    async def cancel(*arguments: Any) -> Any:
        found = await cancels(*arguments)
        cancelled.set()
        return found

    cancels, cancelled = term.submissions.cancel, asyncio.Event()
    monkeypatch.setattr(term.recovery, "known", late)
    monkeypatch.setattr(term.submissions, "cancel", cancel)
    second = asyncio.create_task(term.runs.end("run"))
    await asyncio.wait_for(looked.wait(), CALL)
    await term.runs.end("run")
    opened = rollout_pb2.OpenBatchRequest(
        run_id="run", batch_id=request.batch_id, step=3, sampling=request.sampling, run_seed=11
    )
    await gateway.trainer.rollouts.OpenBatch(opened, timeout=CALL)
    again.set()
    ended = await asyncio.wait_for(second, CALL)
    assert ended.batches == 0
    status = await _status(cluster, request)
    assert (status.open, status.total) == (True, 0)
    fake.hold_at = None


async def test_a_run_that_nobody_knows_has_ended_and_a_name_that_is_none_is_refused(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    answer = await gateway.trainer.rollouts.EndRun(rollout_pb2.EndRunRequest(run_id="nobody"), timeout=CALL)
    assert (answer.batches, answer.cancelled) == (0, 0)
    for name in ("", "a b", "x" * 200):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.trainer.rollouts.EndRun(rollout_pb2.EndRunRequest(run_id=name), timeout=CALL)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_run_ends_though_another_gateway_has_taken_over(cluster: Cluster) -> None:
    request = make_batch()
    gateway, fake = await held(cluster, request)
    successor = await cluster.gateway(leading=False, abort_timeout_seconds=CALL)
    await gateway.kill()
    await until(lambda: successor.gateway.leadership.term is not None, "the other gateway leads", 40.0)
    fake.hold_at = 30
    await cluster.serving(successor, 1)
    answer = await successor.trainer.rollouts.EndRun(rollout_pb2.EndRunRequest(run_id="run"), timeout=CALL)
    assert answer.batches == 1
    assert answer.cancelled > 0
    await until(lambda: not fake.running(), "the instance works on none of them")


async def _status(cluster: Cluster, request: rollout_pb2.SubmitRolloutsRequest) -> rollout_pb2.BatchStatus:
    wanted = rollout_pb2.GetBatchRequest(run_id=request.run_id, batch_id=request.batch_id)
    return (await cluster.gateways[0].trainer.rollouts.GetBatch(wanted, timeout=CALL)).batch
