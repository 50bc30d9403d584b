"""The trainer's loop over the SDK while gateways come and go: every sample once, and equal."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import paceline
from paceline import AsyncClient, Group, RetryPolicy, SamplingParams
from paceline.batches.parts import parts_of
from services.contracts.seeds import sample_seed
from services.platform.redis.connection import connect
from services.platform.tasks import end
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, until
from tests.support.fake_instance import FakeInstance, response_of
from tests.support.ports import free_port

GROUPS = [Group(f"p{number}", [1, 2, 3 + number], 8) for number in range(4)]
LIMIT, HOLD = 40, 4
STEP, SEED = 3, 11


def expected() -> dict[tuple[str, int], list[int]]:
    """The tokens of every sample of an undisturbed run."""
    keys = [(group.prompt_id, slot) for group in GROUPS for slot in range(group.samples)]
    return {key: response_of(sample_seed(SEED, STEP, *key), 0, LIMIT)[0] for key in keys}


LEASE = 10.0
"""Seconds of a leader's lease: longer than any stall, in which a standby must not take over."""
EARLY = sum(len(tokens) <= HOLD for tokens in expected().values())
"""Samples that end although the instance holds all others back."""


class Loop:
    """A trainer that reads one step; the instance holds most samples back until it is told to go on."""

    def __init__(self, client: AsyncClient, fake: FakeInstance) -> None:
        self._client = client
        self._fake = fake
        self._reading: asyncio.Task[None] | None = None
        self.samples: list[paceline.Sample] = []

    async def begin(self) -> None:
        """Submit, and read what ends although the others are held back."""
        assert 0 < EARLY < len(expected())
        self._fake.hold_at = HOLD
        run = self._client.run("run", seed=SEED)
        rollout = await run.rollout(STEP, GROUPS, SamplingParams(max_tokens=LIMIT))
        self._reading = asyncio.create_task(self._read(rollout))
        await until(lambda: len(self.samples) == EARLY, "the short samples are delivered")

    async def finish(self) -> None:
        """Let the samples go on, and check them."""
        assert self._reading is not None
        self._fake.hold_at = None
        await asyncio.wait_for(self._reading, CALL)
        got = [((sample.prompt_id, sample.slot), sample.token_ids.tolist()) for sample in self.samples]
        assert len(got) == len(expected())
        assert dict(got) == expected()

    async def _read(self, rollout: paceline.AsyncRollout) -> None:
        async for sample in rollout:
            self.samples.append(sample)


async def client_of(*gateways: RunningGateway) -> AsyncClient:
    addresses = ",".join(each.gateway.address for each in gateways)
    return AsyncClient(addresses, retry=RetryPolicy(seconds=CALL, maximum=0.5))


@pytest.fixture
async def leader(cluster: Cluster) -> RunningGateway:
    """A gateway at a port that is still free when it has ended."""
    return await cluster.gateway(port=free_port(), lease_seconds=LEASE)


@pytest.fixture
async def fake(cluster: Cluster, leader: RunningGateway) -> FakeInstance:
    fake = await cluster.instance("i0")
    await cluster.serving(leader, 1)
    return fake


@pytest.mark.parametrize("alive", [False, True], ids=["killed", "demoted but alive"])
async def test_a_stream_goes_on_at_the_next_leader(
    cluster: Cluster, leader: RunningGateway, fake: FakeInstance, alive: bool
) -> None:
    standby = await cluster.gateway(leading=False, lease_seconds=LEASE)
    async with await client_of(leader, standby) as client:
        loop = Loop(client, fake)
        await loop.begin()
        if alive:
            # Its server goes on, and answers that another gateway leads.
            assert leader.task is not None
            await end([leader.task])
        else:
            await leader.kill()
        await cluster.serving(standby, 1)
        await loop.finish()
        assert (await client.versions()).policy_version == 0


async def test_a_store_that_forgot_everything_and_a_new_gateway_are_not_seen_by_the_trainer(
    cluster: Cluster, leader: RunningGateway, fake: FakeInstance
) -> None:
    redis = connect(fake.config)
    async with await client_of(leader) as client:
        loop = Loop(client, fake)
        await loop.begin()
        port = leader.gateway.server.port
        await leader.kill()
        await redis.delete(*[key async for key in redis.scan_iter(f"{cluster.namespace}:*")])
        await redis.aclose()
        await fake.kill()
        fresh = await cluster.gateway(port=port)
        again = await cluster.instance("i1")
        await cluster.serving(fresh, 1)
        assert len(loop.samples) == EARLY
        await loop.finish()
        assert len(again.accepted) == len(expected())


async def test_a_trainer_that_starts_over_reads_steps_that_were_acknowledged(
    leader: RunningGateway, fake: FakeInstance
) -> None:
    for _ in range(3):
        async with await client_of(leader) as client, client.run("run", seed=SEED) as run:
            rollout = await run.rollout(STEP, GROUPS, SamplingParams(max_tokens=LIMIT))
            samples = [sample async for sample in rollout]
            assert await rollout.ack() == len(expected())
            got = {(sample.prompt_id, sample.slot): sample.token_ids.tolist() for sample in samples}
            assert (len(samples), got) == (len(got), expected())


async def test_a_connection_that_is_too_old_is_made_anew_in_mid_stream(cluster: Cluster) -> None:
    gateway = await cluster.gateway(
        max_connection_age_seconds=1, max_connection_age_grace_seconds=0, lease_seconds=30.0
    )
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    stream = {"component": "gateway", "method": "paceline.v1.RolloutService/StreamRollouts"}

    def streams() -> float:
        return gateway.registry.get_sample_value("paceline_rpc_seconds_count", stream) or 0.0

    async with await client_of(gateway) as client:
        loop = Loop(client, fake)
        await loop.begin()
        await until(lambda: streams() >= 1, "the first stream has been cut")
        await loop.finish()


async def test_parts_of_a_large_batch_are_the_samples_of_the_whole(
    cluster: Cluster, leader: RunningGateway, fake: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.batches.rollout.parts_of", partial(parts_of, most_samples=16))
    monkeypatch.setattr("paceline.batches.parts.TURN_SECONDS", 0.5)
    async with await client_of(leader) as client:
        loop = Loop(client, fake)
        await loop.begin()
        batches = leader.gateway.leadership.leading().batches.by_key
        assert sorted(batches) == [("run", f"step-000003.v0.0.part{number}of2") for number in (1, 2)]
        await loop.finish()
