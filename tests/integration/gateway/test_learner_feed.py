"""Finished samples and their rewards reach the learner's stream, and nothing waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paceline import AsyncClient, InvalidArgumentError, Reward, SampleRequest, SamplingParams
from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2
from services.contracts.learner import (
    DrafterHistory,
    DrafterKeys,
    Fed,
    FedBatchEnd,
    FedRewards,
    FedSample,
    PublishedDrafter,
)
from services.contracts.learner import decode_entry as decode
from services.gateway.config import GatewayConfig
from services.gateway.feeds.learner import LearnerFeed
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.platform.tasks import end
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, make_batch, until
from tests.integration.gateway.test_open_batches import hand_in


@pytest.fixture
async def redis(cluster: Cluster) -> Any:
    redis = connect(ServiceConfig(redis_url=cluster.redis_url, namespace=cluster.namespace))
    return await cluster.stack.enter_async_context(redis)


async def learner(cluster: Cluster, redis: Any) -> Registration:
    registration = Registration(
        redis, Keys(cluster.namespace), InstanceRecord("drafter", "drafter-0", address="127.0.0.1:1")
    )
    await registration.register()
    beating = asyncio.create_task(registration.run())
    cluster.stack.push_async_callback(end, [beating])
    return registration


def feed_of(gateway: RunningGateway) -> LearnerFeed:
    feed = gateway.gateway.leadership.leading().feed
    assert feed is not None
    return feed


async def entries(cluster: Cluster, redis: Any) -> list[Fed]:
    found = await redis.xrange(DrafterKeys(cluster.namespace).feed)
    return [decode(fields) for _, fields in found]


async def report(gateway: RunningGateway, request: Any, rewards: dict[tuple[str, int], float]) -> int:
    message = rollout_pb2.ReportRewardsRequest(
        run_id=request.run_id,
        batch_id=request.batch_id,
        rewards=[
            rollout_pb2.Reward(prompt_id=prompt_id, slot=slot, reward=reward)
            for (prompt_id, slot), reward in rewards.items()
        ],
    )
    return (await gateway.trainer.rollouts.ReportRewards(message, timeout=CALL)).matched


async def test_samples_of_generate_calls_and_their_rewards_are_fed_by_step(
    cluster: Cluster, redis: Any
) -> None:
    await learner(cluster, redis)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await until(lambda: feed_of(gateway).active, "the gateway has seen the learner")
    asked = [
        SampleRequest("run", "p", [1, 2], slot=slot, step=4, sampling=SamplingParams(max_tokens=9))
        for slot in range(2)
    ]
    resumed = replace(asked[0], prompt_id="resumed", prefix_token_ids=[7], prefix_logprobs=[-1.0])
    nameless = replace(asked[0], prompt_id="")
    async with AsyncClient(gateway.gateway.address) as client:
        for request in (*asked, resumed, nameless):
            assert [event async for event in client.generate(request)]
        rewards = [Reward("p", 0, 0.5), Reward("p", 1, 1.5), Reward("p", 2, 1.0), Reward("", 0, 1.0)]
        assert await client.report_single_rewards("run", 4, rewards) == 2
        assert await client.report_single_rewards("run", 5, rewards) == 0
        with pytest.raises(InvalidArgumentError) as refused:
            await client.report_single_rewards("a run", 4, rewards)
        assert [violation.field for violation in refused.value.violations] == ["run_id"]
    await until(lambda: gateway.metric("learner_feed_entries_total", outcome="fed") == 3, "all is fed")
    *fed, last = await entries(cluster, redis)
    assert last == FedRewards(("run", "generate/4"), {("p", 0): 0.5, ("p", 1): 1.5})
    assert [each.key for each in fed] == [("run", "generate/4", "p", slot) for slot in range(2)]  # type: ignore[union-attr]


@pytest.mark.parametrize("opened", [False, True], ids=["submitted", "opened"])
async def test_samples_and_rewards_are_fed_as_they_were_delivered(
    cluster: Cluster, redis: Any, opened: bool
) -> None:
    await learner(cluster, redis)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await until(lambda: feed_of(gateway).active, "the gateway has seen the learner")
    request = make_batch(groups=3, samples=2)
    await hand_in(gateway, request, opened=opened)
    samples = [event.sample for event in await gateway.trainer.collect(request)]
    rewards = {(sample.prompt_id, sample.slot): float(place) for place, sample in enumerate(samples)}
    assert await report(gateway, request, rewards | {("unknown", 0): 1.0}) == 6
    await until(lambda: gateway.metric("learner_feed_entries_total", outcome="fed") == 8, "all is fed")
    *fed, ended, last = await entries(cluster, redis)
    assert ended == FedBatchEnd((request.run_id, request.batch_id)), "before there are rewards"
    assert last == FedRewards((request.run_id, request.batch_id), rewards)
    prompts = {group.prompt_id: tuple(group.prompt_token_ids) for group in request.groups}
    assert {each.key: each for each in fed} == {  # type: ignore[union-attr]
        (request.run_id, request.batch_id, sample.prompt_id, sample.slot): FedSample(
            (request.run_id, request.batch_id),
            sample.prompt_id,
            sample.slot,
            sample.seed,
            request.policy_version,
            prompts[sample.prompt_id],
            tuple(sample.tokens.token_ids),
        )
        for sample in samples
    }


async def test_only_exact_samples_are_fed_and_seeds_only_where_the_noise_decides_alone(
    cluster: Cluster, redis: Any
) -> None:
    await learner(cluster, redis)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await until(lambda: feed_of(gateway).active, "the gateway has seen the learner")
    coupled = sample_pb2.Exactness(level=sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY)
    first = make_batch(groups=1, samples=2, exactness=coupled)
    first.batch_id = "coupled"
    cooler = make_batch(groups=1, samples=2)
    cooler.batch_id = "cooler"
    cooler.sampling.temperature = 0.6
    for request in (first, cooler):
        await gateway.trainer.submit(request)
        await gateway.trainer.collect(request)
    await until(lambda: gateway.metric("learner_feed_entries_total", outcome="fed") == 3, "two are fed")
    *samples, ended = await entries(cluster, redis)
    assert ended == FedBatchEnd((cooler.run_id, "cooler"))
    assert len(samples) == 2
    for each in samples:
        assert isinstance(each, FedSample)
        assert each.batch == (cooler.run_id, "cooler")
        assert each.seed is None


async def test_without_a_learner_nothing_is_fed_or_kept(cluster: Cluster, redis: Any) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=2)
    await gateway.trainer.submit(request)
    samples = [event.sample for event in await gateway.trainer.collect(request)]
    await report(gateway, request, {(sample.prompt_id, sample.slot): 1.0 for sample in samples})
    # What came before the learner is not for it, so it cannot have been kept.
    await learner(cluster, redis)
    await until(lambda: feed_of(gateway).active, "the gateway has seen the learner")
    later = make_batch(groups=1, samples=1)
    later.batch_id = "later"
    await gateway.trainer.submit(later)
    await gateway.trainer.collect(later)
    await until(lambda: gateway.metric("learner_feed_entries_total", outcome="fed") == 2, "it is fed")
    assert [each.batch[1] for each in await entries(cluster, redis)] == ["later", "later"]


async def test_a_learner_that_is_gone_for_a_moment_finds_what_came_meanwhile(
    cluster: Cluster, redis: Any
) -> None:
    registration = await learner(cluster, redis)
    gateway = await cluster.gateway(learner_linger_seconds=60)
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await until(lambda: feed_of(gateway).active, "the gateway has seen the learner")
    await registration.deregister()
    request = make_batch(groups=1, samples=2)
    await gateway.trainer.submit(request)
    await gateway.trainer.collect(request)
    await until(lambda: gateway.metric("learner_feed_entries_total", outcome="fed") == 3, "they are fed")


async def test_what_waits_is_bounded_and_the_oldest_go(cluster: Cluster, redis: Any) -> None:
    await learner(cluster, redis)
    gateway = await cluster.gateway()
    config = GatewayConfig(redis_url=cluster.redis_url, namespace=cluster.namespace)
    registry = Registry(redis, Keys(cluster.namespace))
    feed = LearnerFeed(config, redis, registry, gateway.gateway._metrics, most_waiting=1000)
    running = [asyncio.create_task(feed._look())]
    await until(lambda: feed.active, "it has seen the learner")
    await end(running)
    for number in range(20):
        feed.reward(("run", str(number)), [rollout_pb2.Reward(prompt_id="p", slot=0, reward=1.0)])
    assert gateway.metric("learner_feed_entries_total", outcome="dropped") == 20 - 1000 // 128
    running = [asyncio.create_task(feed.run())]
    await until(lambda: gateway.metric("learner_feed_entries_total", outcome="fed") == 7, "the rest is fed")
    await end(running)
    assert [each.batch[1] for each in await entries(cluster, redis)] == [str(n) for n in range(13, 20)]


async def test_the_stream_is_bounded_in_bytes_and_what_is_trimmed_is_counted(
    cluster: Cluster, redis: Any
) -> None:
    await learner(cluster, redis)
    gateway = await cluster.gateway()
    config = GatewayConfig(
        redis_url=cluster.redis_url, namespace=cluster.namespace, learner_feed_bytes=16 << 20
    )
    feed = LearnerFeed(config, redis, Registry(redis, Keys(cluster.namespace)), gateway.gateway._metrics)
    running = [asyncio.create_task(feed.run())]
    key, response = DrafterKeys(cluster.namespace).feed, tuple(range(32_768))
    # As it was before there was a bound.
    await redis.xadd(key, {"response": bytes(20 << 20)})
    for slot in range(200):
        # 128 KiB each, 25 MiB in all; between them what is small.
        feed._waiting.put(FedSample(("run", "b"), "p", slot, None, 1, (1, 2), response))
        feed._waiting.put(FedRewards(("run", "b"), {("p", slot): 1.0}))
        await until(
            lambda slot=slot: gateway.metric("learner_feed_entries_total", outcome="fed") == 2 * slot + 2,
            "it is fed",
        )
        assert await redis.memory_usage(key, samples=0) <= 16 << 20
    await end(running)
    kept = await entries(cluster, redis)
    assert gateway.metric("learner_feed_entries_total", outcome="trimmed") == 401 - len(kept)
    # The latest are there, in order, and no more went than had to.
    assert [each.slot for each in kept if isinstance(each, FedSample)][-1] == 199
    assert 80 <= sum(isinstance(each, FedSample) for each in kept) <= 127


@pytest.mark.parametrize("fed", [True, False])
async def test_the_drafters_version_is_told_with_or_without_a_learner(
    cluster: Cluster, redis: Any, fed: bool
) -> None:
    gateway = await cluster.gateway(learner_feed=fed)
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    history = DrafterHistory(PublishedDrafter(7, "/somewhere", "ab"))
    await redis.set(DrafterKeys(cluster.namespace).published, history.to_json())

    async def is_told() -> bool:
        said = await gateway.trainer.weights.GetVersions(weight_pb2.GetVersionsRequest(), timeout=CALL)
        return said.drafter_version == 7

    await until(is_told, "it is told")
