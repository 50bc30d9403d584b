"""Batches that live across versions: samples that fall too far behind begin anew, or end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from paceline import AsyncClient, Group, SamplingParams, Stale, VersionSpan
from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, make_batch, until
from tests.integration.gateway.test_in_flight import check_versions
from tests.integration.gateway.test_open_batches import add, close, opening, refused
from tests.integration.gateway.test_weights import finish, stage, start
from tests.support.fake_instance import FakeInstance

CONTINUE = weight_pb2.IN_FLIGHT_CONTINUE
REGENERATE = rollout_pb2.STALE_REGENERATE
Request = rollout_pb2.SubmitRolloutsRequest
REFUSED = (
    "paceline_rpc_requests_total",
    {"component": "gateway", "method": "paceline.v1.RolloutService/OpenBatch", "code": "UNAVAILABLE"},
)


async def opened(cluster: Cluster, request: Request, **fields: Any) -> tuple[RunningGateway, FakeInstance]:
    """Return a gateway with an instance that holds samples at five tokens, and the request's batch opened."""
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0", max_running=64)
    fake.hold_at = 5
    await cluster.serving(gateway, 1)
    await gateway.trainer.rollouts.OpenBatch(opening(request, **fields), timeout=CALL)
    return gateway, fake


async def reached(gateway: RunningGateway, request: Request, length: int, samples: int) -> None:
    """Wait until the gateway has so many tokens of so many samples."""
    batch = gateway.gateway.leadership.leading().batches.by_key["run", request.batch_id].batch
    await until(lambda: sum(len(each.tokens) == length for each in batch.samples) == samples, "they are held")


async def push(gateway: RunningGateway, version: int) -> None:
    update_id = (await start(gateway.trainer, version)).update_id
    await stage(gateway.trainer, update_id)
    await finish(gateway.trainer, update_id, CONTINUE)


async def collected(gateway: RunningGateway, request: Request) -> dict[str, list[Any]]:
    """Return the version spans of the samples of each prompt, each checked token by token."""
    found: dict[str, list[Any]] = {}
    for event in await gateway.trainer.collect(request):
        found.setdefault(event.sample.prompt_id, []).append(check_versions(request, event.sample))
    return found


async def test_samples_that_are_too_old_are_generated_anew_and_all_others_go_on(cluster: Cluster) -> None:
    request = make_batch(groups=3, ignore_eos=True)
    gateway, fake = await opened(cluster, request, max_staleness=1, stale=REGENERATE)
    await add(gateway, request, 0)
    await reached(gateway, request, 5, 4)
    await push(gateway, 1)
    fake.hold_at = 10
    await add(gateway, request, 1)
    await reached(gateway, request, 10, 8)
    await push(gateway, 2)
    assert gateway.metric("stale_samples_total", outcome="regenerated") == 4
    await reached(gateway, request, 10, 8)
    await push(gateway, 3)
    assert gateway.metric("stale_samples_total", outcome="regenerated") == 8
    await add(gateway, request, 2)
    await reached(gateway, request, 10, 12)
    fake.hold_at = None
    await close(gateway, request)
    found = await collected(gateway, request)
    assert found["p0"] == [[(0, 10, 2), (10, 40, 3)]] * 4
    assert found["p1"] == found["p2"] == [[(0, 40, 3)]] * 4


async def test_within_its_staleness_a_sample_keeps_its_tokens(cluster: Cluster) -> None:
    request = make_batch(groups=1, ignore_eos=True)
    gateway, fake = await opened(cluster, request, max_staleness=2, stale=REGENERATE)
    await add(gateway, request, 0)
    for version in (1, 2):
        await reached(gateway, request, fake.hold_at or 0, 4)
        await push(gateway, version)
        fake.hold_at = 5 * (version + 1)
    fake.hold_at = None
    await close(gateway, request)
    for (begin, *_), *_, (_, end, last) in (await collected(gateway, request))["p0"]:
        assert (begin, end, last) == (0, 40, 2)
    assert gateway.metric("stale_samples_total", outcome="regenerated") == 0


async def test_a_batch_that_refuses_ends_them_and_takes_no_more(cluster: Cluster) -> None:
    request = make_batch(groups=3, ignore_eos=True)
    gateway, fake = await opened(cluster, request, max_staleness=1)
    await add(gateway, request, 0)
    await reached(gateway, request, 5, 4)
    await push(gateway, 1)
    assert (await add(gateway, request, 1)).added == 4, "within its staleness"
    await reached(gateway, request, 5, 8)
    await push(gateway, 2)
    code, reason, found = await refused(add(gateway, request, 2))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BATCH_STALE")
    assert dict(found["ErrorInfo"].metadata) == {"current": "2", "policy_version": "0", "max_staleness": "1"}
    fake.hold_at = None
    await close(gateway, request)
    samples = [event.sample for event in await gateway.trainer.collect(request)]
    ended = [each for each in samples if each.status == sample_pb2.SAMPLE_STATUS_ABORTED]
    assert {each.prompt_id for each in ended} == {"p0"}
    assert [len(each.tokens.token_ids) for each in ended] == [5] * 4, "with the tokens that they had"
    assert len(samples) == 8


async def test_a_batch_of_one_version_takes_no_more_once_that_is_gone(cluster: Cluster) -> None:
    request = make_batch(groups=2)
    gateway, fake = await opened(cluster, request)
    fake.hold_at = None
    await add(gateway, request, 0)
    stream = gateway.trainer.stream(request)
    for _ in range(4):
        await stream.read()
    update_id = (await start(gateway.trainer, 1)).update_id
    await stage(gateway.trainer, update_id)
    await finish(gateway.trainer, update_id)
    code, reason, _ = await refused(add(gateway, request, 1))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_MISMATCH")
    await close(gateway, request)
    assert await stream.read() is grpc.aio.EOF


async def test_the_next_gateway_renews_what_is_too_old_by_what_was_published(cluster: Cluster) -> None:
    request = make_batch(groups=1, ignore_eos=True)
    gateway, fake = await opened(cluster, request, max_staleness=0, stale=REGENERATE)
    await add(gateway, request, 0)
    await reached(gateway, request, 5, 4)
    journal = gateway.gateway.leadership.leading().recovery.records.get(("run", request.batch_id))
    assert journal is not None
    await until(lambda: gateway.metric("journal_chunks_total") == 4, "the journal has their tokens")
    # Past the point of no return: the next gateway goes forward.
    fake.apply_gate.clear()
    update_id = (await start(gateway.trainer, 1)).update_id
    await stage(gateway.trainer, update_id)
    call = gateway.trainer.weights.FinishUpdate(
        weight_pb2.FinishUpdateRequest(update_id=update_id, in_flight=CONTINUE), timeout=CALL
    )
    await until(lambda: gateway.gateway.leadership.leading().book.is_applying(), "weights are applied")
    code, _, found = await refused(add(gateway, make_batch_of(request), 0))
    assert code is grpc.StatusCode.UNAVAILABLE, "between two versions"
    assert "RetryInfo" in found
    await gateway.kill()
    call.cancel()
    fake.apply_gate.set()
    fake.hold_at = None
    second = await cluster.gateway()
    await until(lambda: second.gateway.leadership.leading().book.version == 1, "it went forward")
    await close(second, request)
    assert await collected(second, request) == {"p0": [[(0, 40, 1)]] * 4}


def make_batch_of(request: Request) -> Request:
    """Return a group that the batch does not have."""
    other = make_batch(groups=1)
    other.batch_id = request.batch_id
    other.groups[0].prompt_id = "other"
    return other


@pytest.mark.parametrize("fields", [{"stale": REGENERATE}, {"stale": 7, "max_staleness": 1}])
async def test_a_treatment_without_a_bound_and_an_unknown_one_are_refused(
    cluster: Cluster, fields: dict[str, int]
) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1)
    code, _, found = await refused(
        gateway.trainer.rollouts.OpenBatch(opening(request, **fields), timeout=CALL)
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert found["BadRequest"].field_violations[0].field == "stale"


async def test_a_submitted_rollout_of_the_sdk_goes_on_across_versions(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0", max_running=64)
    fake.hold_at = 5
    await cluster.serving(gateway, 1)
    groups, sampling = [Group("p0", [1, 2], 4)], SamplingParams(max_tokens=20, ignore_eos=True)
    async with AsyncClient(gateway.gateway.address) as client, client.run("run") as run:
        kept = await run.rollout(0, groups, sampling, max_staleness=1)
        anew = await run.rollout(1, groups, sampling, max_staleness=0, stale=Stale.REGENERATE)
        for rollout in (kept, anew):
            await reached(gateway, Request(batch_id=rollout.batch.batch_id), 5, 4)
        await push(gateway, 1)
        fake.hold_at = None
        spans = [{sample.version_spans async for sample in rollout} for rollout in (kept, anew)]
    assert spans == [{(VersionSpan(0, 5, 0), VersionSpan(5, 20, 1))}, {(VersionSpan(0, 20, 1),)}]


async def test_a_batch_that_is_opened_between_two_versions_begins_under_the_next(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0", max_running=64)
    await cluster.serving(gateway, 1)
    fake.apply_gate.clear()
    update_id = (await start(gateway.trainer, 1)).update_id
    await stage(gateway.trainer, update_id)
    finishing = asyncio.create_task(finish(gateway.trainer, update_id, CONTINUE))
    await until(lambda: gateway.gateway.leadership.leading().book.is_applying(), "weights are applied")
    request = make_batch(groups=1, ignore_eos=True)
    for call in (
        gateway.trainer.rollouts.OpenBatch(opening(request, max_staleness=1), timeout=CALL),
        gateway.trainer.submit(make_batch(max_staleness=1)),
    ):
        code, _, found = await refused(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 0.5
    groups, sampling = [Group("p0", [1, 2], 4)], SamplingParams(max_tokens=20, ignore_eos=True)
    async with AsyncClient(gateway.gateway.address) as client, client.run("run") as run:
        entering = run.open_batch(0, sampling, policy_version=0, max_staleness=1)
        opens = asyncio.create_task(entering.__aenter__())
        await until(lambda: (gateway.registry.get_sample_value(*REFUSED) or 0) >= 2, "it was refused as well")
        fake.apply_gate.set()
        await finishing
        batch = await opens
        await batch.add(groups)
        await batch.close()
        assert {sample.version_spans async for sample in batch} == {(VersionSpan(0, 20, 1),)}


async def test_a_batch_is_opened_for_no_version_that_is_over_its_staleness(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0", max_running=64)
    await cluster.serving(gateway, 1)
    for version in (1, 2):
        await push(gateway, version)
    request = make_batch(groups=1, ignore_eos=True)
    code, reason, _ = await refused(
        gateway.trainer.rollouts.OpenBatch(opening(request, max_staleness=1), timeout=CALL)
    )
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BATCH_STALE")
    for number, fields in enumerate(({"max_staleness": 2}, {"max_staleness": 1, "stale": REGENERATE})):
        request.batch_id = f"b{number}"
        await gateway.trainer.rollouts.OpenBatch(opening(request, **fields), timeout=CALL)
        await add(gateway, request, 0)
        await close(gateway, request)
        assert await collected(gateway, request) == {"p0": [[(0, 40, 2)]] * 4}
