"""Weight updates while samples are unfinished: they end as they are, or go on, each token of its version."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.convert.rollouts import version_spans
from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2
from services.contracts.gateway_keys import GatewayKeys
from services.contracts.seeds import sample_seed
from services.gateway.config import GatewayConfig
from services.gateway.state.update_book import InFlightTreatment, UpdatePhase, WeightUpdate
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    check_samples,
    chunked_tokens,
    make_batch,
    until,
)
from tests.integration.gateway.test_weights import finish, refused, stage, start, versions
from tests.support.fake_instance import FakeInstance, token_at

HELD = 5
ABORT, CONTINUE = weight_pb2.IN_FLIGHT_ABORT, weight_pb2.IN_FLIGHT_CONTINUE
Spans = list[tuple[int, int, int]]


def spans_of(sample: sample_pb2.Sample) -> Spans:
    return [(span.begin, span.end, span.policy_version) for span in version_spans(sample.tokens.versions)]


def check_versions(request: rollout_pb2.SubmitRolloutsRequest, sample: sample_pb2.Sample) -> Spans:
    """Check that every token is the one of the version whose span it is in; return the spans."""
    seed = sample_seed(request.run_seed, request.step, sample.prompt_id, sample.slot)
    spans, want = spans_of(sample), list[tuple[int, float]]()
    for begin, end, version in spans:
        assert begin == len(want) < end
        want += [token_at(seed, position, version) for position in range(begin, end)]
    assert list(zip(sample.tokens.token_ids, sample.tokens.logprobs, strict=True)) == want
    return spans


async def held(cluster: Cluster, *names: str, **settings: Any) -> tuple[RunningGateway, list[FakeInstance]]:
    """Return a gateway and instances whose samples are kept from going beyond HELD tokens."""
    gateway = await cluster.gateway(**settings)
    fakes = [await cluster.instance(name, max_running=4) for name in names]
    for fake in fakes:
        fake.hold_at = HELD
    await cluster.serving(gateway, len(fakes))
    return gateway, fakes


async def halfway(gateway: RunningGateway, request: rollout_pb2.SubmitRolloutsRequest, samples: int) -> None:
    """Submit a batch, and wait until the gateway has HELD tokens of so many samples."""
    await gateway.trainer.submit(request)
    term = gateway.gateway.leadership.term
    assert term is not None
    batch = term.batches.by_key[request.run_id, request.batch_id].batch
    await until(
        lambda: sum(len(sample.tokens) == HELD for sample in batch.samples) == samples, "they are held"
    )


async def staged(gateway: RunningGateway) -> str:
    update_id = (await start(gateway.trainer)).update_id
    await stage(gateway.trainer, update_id)
    return update_id


async def test_samples_go_on_under_the_new_version_and_say_so(cluster: Cluster) -> None:
    gateway, fakes = await held(cluster, "i0", "i1", room_factor=1.0)
    request = make_batch(ignore_eos=True)
    # Four run on each, and four wait.
    await halfway(gateway, request, 8)
    update_id = await staged(gateway)
    finished = await finish(gateway.trainer, update_id, CONTINUE)
    assert (finished.policy_version, finished.continued_samples, finished.aborted_samples) == (1, 12, 0)
    assert await finish(gateway.trainer, update_id, CONTINUE) == finished
    later = make_batch(version=1)
    await gateway.trainer.submit(later)
    await refused(gateway.trainer.submit(make_batch(version=0)), "FAILED_PRECONDITION")
    for fake in fakes:
        fake.hold_at = None
    found = [check_versions(request, event.sample) for event in await gateway.trainer.collect(request)]
    assert sorted(found) == [[(0, HELD, 0), (HELD, 40, 1)]] * 8 + [[(0, 40, 1)]] * 4
    check_samples(later, await gateway.trainer.collect(later))
    assert gateway.metric("in_flight_samples_total", outcome="continued") == 12


async def test_samples_that_keep_their_kv_say_so_after_their_gateway_and_instance_are_lost(
    cluster: Cluster,
) -> None:
    """The marks are in the journal; what is resumed from it computes its KV again."""
    gateway, (fake,) = await held(cluster, "i0")
    request = make_batch(samples=1, ignore_eos=True)
    await halfway(gateway, request, 3)
    finished = await finish(gateway.trainer, await staged(gateway), weight_pb2.IN_FLIGHT_KEEP_KV)
    assert (finished.continued_samples, [each.kept_samples for each in finished.instances]) == (3, [3])
    fake.hold_at = 2 * HELD
    redis = connect(GatewayConfig(redis_url=cluster.redis_url, namespace=cluster.namespace))
    await until(
        lambda: _journaled(redis, cluster.namespace, request, 3 * (2 * HELD - 1)),
        "the journal has their tokens",
    )
    await redis.aclose()
    await gateway.kill()
    fake.hold_at = None
    successor = await cluster.gateway()
    samples = [event.sample for event in await successor.trainer.collect(request)]
    # The last token of a lost sample is sampled again.
    begin, cut, end = 0, HELD, 2 * HELD - 1
    want = [(begin, cut, 0), (cut, end, 1), (end, 40, 1)]
    assert [check_versions(request, sample) for sample in samples] == [want] * 3
    marked = [[span.mixed_kv for span in version_spans(sample.tokens.versions)] for sample in samples]
    assert marked == [[False, True, False]] * 3
    assert not any(sample.provenance.lossless for sample in samples)


async def test_an_instance_that_dies_while_samples_go_on(cluster: Cluster) -> None:
    gateway, (first, second) = await held(cluster, "i0", "i1", room_factor=1.0)
    request = make_batch(ignore_eos=True)
    await halfway(gateway, request, 8)
    update_id = await staged(gateway)
    second.apply_gate.clear()
    finishing = asyncio.create_task(finish(gateway.trainer, update_id, CONTINUE))
    await until(lambda: first.applied == [1], "the first has the new weights")
    first.hold_at = 2 * HELD
    await until(
        lambda: sorted(sample.length for sample in first.running()) == [2 * HELD] * 4, "its samples go on"
    )
    await second.kill()
    finished = await asyncio.wait_for(finishing, CALL)
    assert [(each.instance_id, each.applied) for each in finished.instances] == [("i0", True), ("i1", False)]
    first.hold_at = None
    found = [check_versions(request, event.sample) for event in await gateway.trainer.collect(request)]
    # The last token of a lost sample is sampled again, by the new version.
    lost = [(0, HELD - 1, 0), (HELD - 1, 40, 1)]
    assert sorted(found) == [lost] * 4 + [[(0, HELD, 0), (HELD, 40, 1)]] * 4 + [[(0, 40, 1)]] * 4


async def test_samples_that_are_aborted_come_with_their_tokens(cluster: Cluster) -> None:
    gateway, fakes = await held(cluster, "i0", "i1", room_factor=1.0)
    request = make_batch(ignore_eos=True)
    await halfway(gateway, request, 8)
    finished = await finish(gateway.trainer, await staged(gateway), ABORT)
    assert (finished.policy_version, finished.aborted_samples, finished.continued_samples) == (1, 12, 0)
    assert [fake.applied for fake in fakes] == [[1], [1]]
    samples = [event.sample for event in await gateway.trainer.collect(request)]
    assert {sample.status for sample in samples} == {sample_pb2.SAMPLE_STATUS_ABORTED}
    assert sorted(check_versions(request, sample) for sample in samples) == [[]] * 4 + [[(0, HELD, 0)]] * 8
    assert gateway.metric("in_flight_samples_total", outcome="aborted") == 12


async def test_a_refused_update_stays_staged_and_keeps_no_run_waiting(cluster: Cluster) -> None:
    gateway, (fake,) = await held(cluster, "i0")
    request = make_batch(samples=1, ignore_eos=True)
    await halfway(gateway, request, 3)
    update_id = await staged(gateway)
    await refused(finish(gateway.trainer, update_id), "FAILED_PRECONDITION")
    other = make_batch(samples=1, max_tokens=HELD)
    other.run_id = "another"
    await gateway.trainer.submit(other)
    check_samples(other, await gateway.trainer.collect(other))
    assert (await versions(gateway.trainer)).update_id == update_id
    fake.hold_at = None
    check_samples(request, await gateway.trainer.collect(request))
    assert (await finish(gateway.trainer, update_id)).policy_version == 1


@pytest.mark.parametrize("treatment", [InFlightTreatment.CONTINUE, InFlightTreatment.ABORT])
async def test_a_gateway_that_dies_while_it_applies(cluster: Cluster, treatment: InFlightTreatment) -> None:
    gateway, (fake,) = await held(cluster, "i0")
    request = make_batch(samples=1, ignore_eos=True)
    await halfway(gateway, request, 3)
    config = GatewayConfig(redis_url=cluster.redis_url, namespace=cluster.namespace)
    redis = connect(config)
    await until(
        lambda: _journaled(redis, cluster.namespace, request, 3 * (HELD - 1)), "the journal has their tokens"
    )
    await gateway.kill()
    # What a gateway leaves that dies between the point of no return and the publication.
    left = WeightUpdate("u1", "run", 1, UpdatePhase.APPLYING, 0.0, "/weights/1", "", treatment)
    await redis.set(GatewayKeys(cluster.namespace).update, left.to_json())
    await redis.aclose()
    fake.hold_at = None
    successor = await cluster.gateway()
    samples = [event.sample for event in await successor.trainer.collect(request)]
    assert (await versions(successor.trainer)).policy_version == 1
    found = [check_versions(request, sample) for sample in samples]
    if treatment is InFlightTreatment.CONTINUE:
        assert found == [[(0, HELD - 1, 0), (HELD - 1, 40, 1)]] * 3
    else:
        assert found == [[(0, HELD - 1, 0)]] * 3
        assert {sample.status for sample in samples} == {sample_pb2.SAMPLE_STATUS_ABORTED}


async def _journaled(redis: Any, namespace: str, request: Any, tokens: int) -> bool:
    return sum((await chunked_tokens(redis, namespace, request)).values()) == tokens


async def test_spans_outlive_the_gateway(cluster: Cluster) -> None:
    gateway, (fake,) = await held(cluster, "i0")
    request = make_batch(samples=1, ignore_eos=True)
    await halfway(gateway, request, 3)
    await finish(gateway.trainer, await staged(gateway), CONTINUE)
    fake.hold_at = 2 * HELD
    redis = connect(GatewayConfig(redis_url=cluster.redis_url, namespace=cluster.namespace))
    tokens = 3 * (2 * HELD - 1)
    await until(lambda: _journaled(redis, cluster.namespace, request, tokens), "the journal has their tokens")
    await redis.aclose()
    await gateway.kill()
    fake.hold_at = None
    successor = await cluster.gateway()
    found = [check_versions(request, event.sample) for event in await successor.trainer.collect(request)]
    assert found == [[(0, HELD, 0), (HELD, 40, 1)]] * 3
