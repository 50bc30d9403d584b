"""Knobs and decisions as a trainer sees them: through the SDK and a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from paceline import (
    AbortedError,
    AsyncClient,
    EffectiveKnobs,
    InvalidArgumentError,
    KnobSetting,
    RetryPolicy,
    UnavailableError,
)
from paceline.convert.fleet import knobs_to_proto
from paceline.types import Decision
from services.contracts.knobs import Knobs
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.platform.redis.decision_log import DecisionRecord
from services.platform.tasks import end
from tests.integration.policy.conftest import CALL, Fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[AsyncClient]:
    """A client of a gateway on the fleet's Redis."""
    config = GatewayConfig(port=0, redis_url=fleet.config.redis_url, namespace=fleet.config.namespace)
    gateway = Gateway(config, CollectorRegistry())
    await gateway.start()
    running = asyncio.create_task(gateway.run())
    try:
        brief = RetryPolicy(seconds=1)
        async with AsyncClient(gateway.address, timeout=CALL, leaders_only=False, retry=brief) as client:
            yield client
    finally:
        await end([running])
        await gateway.stop(0)


async def test_knobs_are_set_and_read_and_a_stale_change_is_refused(
    fleet: Fleet, client: AsyncClient
) -> None:
    instance = await fleet.instance("i0", pool="spot")
    await fleet.linked(await fleet.policy(), 1)
    nothing = await client.knobs()
    assert nothing == KnobSetting(0, {})
    change = await client.set_knobs("", KnobSetting(nothing.revision, {"speculation": False}))
    assert change.applied == ("i0",)
    assert instance.knobs == {"speculation": False}
    assert await client.knobs() == KnobSetting(change.revision, {"speculation": False})
    with pytest.raises(AbortedError, match=f"revision {change.revision}") as refused:
        await client.set_knobs("", KnobSetting(nothing.revision, {"mode": "fixed"}))
    assert refused.value.reason == "STALE_REVISION"
    await client.set_knobs("", KnobSetting(0, {"draft_cap": 3}), pool="spot")
    assert (await client.knobs(pool="spot")).knobs == {"draft_cap": 3}
    assert instance.knobs == {"speculation": False, "draft_cap": 3}


async def test_knobs_in_use_are_told_with_who_uses_them(fleet: Fleet, client: AsyncClient) -> None:
    policy = await fleet.policy()
    (default,) = (await client.knobs()).effective
    assert default == EffectiveKnobs(Knobs().model_dump(mode="json"), ())
    for name, own in {"i0": Knobs(draft_cap=8), "i1": Knobs(draft_cap=8), "i2": Knobs(margin=0.5)}.items():
        instance = await fleet.instance(name, pool="spot" if name == "i2" else "")
        instance.report.own_knobs.CopyFrom(knobs_to_proto(own.model_dump(mode="json")))
    await fleet.linked(policy, 3)
    await client.set_knobs("", KnobSetting(0, {"mode": "fixed"}))
    await client.set_knobs("", KnobSetting(0, {"draft_cap": 3}), pool="spot")
    found = await client.knobs()
    assert found.knobs == {"mode": "fixed"}
    assert [each.instance_ids for each in found.effective] == [("i0", "i1"), ("i2",)]
    assert [[each.knobs[name] for name in ("mode", "draft_cap", "margin")] for each in found.effective] == [
        ["fixed", 8, 0.02],
        ["fixed", 3, 0.5],
    ]
    assert found.pending == ()
    (spot,) = (await client.knobs(pool="spot")).effective
    assert spot.instance_ids == ("i2",)


async def test_knobs_of_an_instance_that_has_not_confirmed_them_are_not_said_to_be_in_use(
    fleet: Fleet, client: AsyncClient
) -> None:
    instances = [await fleet.instance(name) for name in ("i0", "i1")]
    for each in instances:
        each.report.own_knobs.SetInParent()
    await fleet.linked(await fleet.policy(answer_seconds=0.1), 2)
    instances[1].deaf = True
    change = await client.set_knobs("", KnobSetting(0, {"mode": "fixed"}))
    assert change.pending == ("i1",)
    found = await client.knobs()
    assert [each.instance_ids for each in found.effective] == [("i0",)]
    assert found.pending == ("i1",)


async def test_a_refusal_says_which_field_it_is_about(fleet: Fleet, client: AsyncClient) -> None:
    await fleet.policy()
    with pytest.raises(InvalidArgumentError) as refused:
        await client.set_knobs("", KnobSetting(0, {"margin": -1, "mode": "toggle"}))
    assert [each.field for each in refused.value.violations] == ["knobs.margin"]


async def test_without_a_policy_service_it_says_so(fleet: Fleet, client: AsyncClient) -> None:
    with pytest.raises(UnavailableError, match="keep the knobs"):
        await client.knobs()


async def test_decisions_are_watched_from_a_time_on_and_by_run(fleet: Fleet, client: AsyncClient) -> None:
    began = time.time()
    for decision in (
        DecisionRecord("toggle", "early", 0.5, {"requests": 3}, began - 100, "run"),
        DecisionRecord("toggle", "mine", 0.5, {"requests": 3}, began + 1, "run"),
        DecisionRecord("toggle", "of another", 0.0, {}, began + 2, "other"),
        DecisionRecord("scaling", "of all", 0.0, {}, began + 3),
    ):
        await fleet.decisions_log.write(decision)
    found: list[Decision] = []
    async with asyncio.timeout(CALL):
        async for read in client.watch_decisions("run", began):
            found.append(read)
            if len(found) == 2:
                break
    assert [(each.reason, each.run_id) for each in found] == [("mine", "run"), ("of all", "")]
    assert found[0].predicted_gain == 0.5
    assert found[0].details == {"requests": 3}
    assert found[0].time == pytest.approx(began + 1)
    async with asyncio.timeout(CALL):
        kept = [each.reason async for each in client.watch_decisions(kept=True)]
        mine = [each.reason async for each in client.watch_decisions("run", began, kept=True)]
    assert kept == ["early", "mine", "of another", "of all"]
    assert mine == ["mine", "of all"]
