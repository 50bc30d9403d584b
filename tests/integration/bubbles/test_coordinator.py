"""The coordinator as a process: long polls, leases, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.times import seconds_of
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from tests.integration.bubbles.conftest import (
    APPLYING,
    CALL,
    ROLLOUT,
    UPDATE,
    Coordinator,
    Poller,
    make_hint,
    progress,
    registered,
)

Coordinate = Callable[..., Awaitable[Coordinator]]
LEASE_SECONDS = 5.0
"""Shorter than the silence of a gateway after which nothing of its run is given out."""


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Wait until the condition holds, and return it."""
    try:
        async with asyncio.timeout(CALL):
            while not (found := await condition()):  # noqa: ASYNC110 (it is in another process)
                await asyncio.sleep(0.01)
            return found
    except TimeoutError:
        pytest.fail(f"waited in vain until {what}")


async def held(coordinator: Coordinator) -> None:
    """Wait until one poll is held back. A clocked coordinator goes on to hold it until something happens."""

    async def one() -> bool:
        return (await asyncio.to_thread(coordinator.metrics))["paceline_bubbles_held_polls"] == 1

    await until(one, "a poll is held back")


async def test_it_registers_serves_items_of_the_step_and_leaves_cleanly(
    coordinate: Coordinate, redis_url: str, namespace: str
) -> None:
    coordinator = await coordinate(poll_steps=7)
    hint = make_hint()
    hint.exactness.level = 2
    hint.groups[1].sampling.max_tokens = 33
    assert await coordinator.tell(hints=[hint]) == [hint.hint_id]
    response = await Poller(coordinator, "a").poll()
    assert [(item.prompt_id, item.slot) for item in response.tasks] == [
        ("p0", 0),
        ("p1", 0),
        ("p0", 1),
        ("p1", 1),
    ]
    for item in response.tasks:
        group = hint.groups[int(item.prompt_id[1])]
        assert (item.run_id, item.step, item.seed) == ("run", 1, group.seeds[item.slot])
        assert item.prompt_token_ids == group.prompt_token_ids
        assert item.sampling == group.sampling
        assert item.exactness == hint.exactness
    assert response.poll_steps == 7
    assert len({item.lease for item in response.tasks}) == 4
    (record,) = (await registered(redis_url, namespace)).values()
    assert record.instance_id == "bubbles-0"
    assert await asyncio.to_thread(coordinator.stop) == 0
    assert await registered(redis_url, namespace) == {}


async def test_uncoupled_items_have_other_seeds(coordinate: Coordinate) -> None:
    coordinator = await coordinate(coupled=False)
    await coordinator.tell(hints=[make_hint()])
    items = (await Poller(coordinator, "a").poll()).tasks
    own = {seed for group in make_hint().groups for seed in group.seeds}
    assert len({item.seed for item in items} - own) == 4


async def test_a_held_poll_wakes_when_the_gateway_says_that_there_is_work(coordinate: Coordinate) -> None:
    coordinator = await coordinate(clocked=True)
    await coordinator.tell(waiting=1, unfinished=1, hints=[make_hint()])
    polling = asyncio.create_task(Poller(coordinator, "a").poll())
    await held(coordinator)
    await coordinator.tell(unfinished=1, hints=[make_hint()])
    assert len((await polling).tasks) == 4


async def test_a_poll_with_nothing_to_say_is_answered_when_its_time_is_over(coordinate: Coordinate) -> None:
    coordinator = await coordinate()
    response = await Poller(coordinator, "a").poll()
    assert (list(response.tasks), response.halt, response.sleep) == ([], False, False)


async def test_an_instance_that_runs_something_is_answered_at_once(coordinate: Coordinate) -> None:
    # One that is held is not answered by this coordinator.
    coordinator = await coordinate(clocked=True)
    await coordinator.tell(hints=[make_hint()])
    poller = Poller(coordinator, "a")
    items = (await poller.poll()).tasks
    for tokens in range(5):
        assert not (await poller.poll(progress(items, tokens))).tasks


async def test_of_two_polls_of_an_instance_only_the_newer_one_gets_items(coordinate: Coordinate) -> None:
    coordinator = await coordinate(clocked=True)
    await coordinator.tell(waiting=1, unfinished=1, hints=[make_hint()])
    older = asyncio.create_task(Poller(coordinator, "a").poll())
    await held(coordinator)
    newer = asyncio.create_task(Poller(coordinator, "a").poll())
    assert not (await older).tasks
    await held(coordinator)
    await coordinator.tell(hints=[make_hint()])
    assert len((await newer).tasks) == 4


async def test_nobody_gets_what_another_has_and_partial_items_go_on(coordinate: Coordinate) -> None:
    coordinator = await coordinate()
    await coordinator.tell(hints=[make_hint()])
    a, b = Poller(coordinator, "a"), Poller(coordinator, "b")
    first = (await a.poll(room=3)).tasks
    second = (await b.poll()).tasks
    assert (len(first), len(second)) == (3, 1)
    await a.poll(progress(first, 12, returned=True), room=0)
    assert await coordinator.coverage() == {(item.prompt_id, item.slot): (12, False) for item in first}
    third = (await b.poll(progress(second, 5))).tasks
    assert third
    assert {(item.prompt_id, item.slot) for item in third} <= {(item.prompt_id, item.slot) for item in first}
    await b.poll([*progress(second, 9, finished=True), *progress(third, 14, finished=True)], room=0)
    covered = await coordinator.coverage()
    assert all(covered[item.prompt_id, item.slot] == (14, True) for item in third)


async def test_a_step_that_begins_revokes_and_its_coverage_is_still_there(coordinate: Coordinate) -> None:
    coordinator = await coordinate()
    hints = [make_hint(1), make_hint(2)]
    await coordinator.tell(hints=hints)
    poller = Poller(coordinator, "a")
    items = (await poller.poll()).tasks
    assert {item.step for item in items} == {1}
    await poller.poll(progress(items, 4))
    await coordinator.tell(step=1, unfinished=4, hints=hints[1:])
    response = await poller.poll(progress(items, 6), serving=True)
    assert sorted(response.revoked) == sorted(item.lease for item in items)
    assert set((await coordinator.coverage()).values()) == {(6, False)}
    after = await poller.poll()
    assert {item.step for item in after.tasks} == {2}


async def test_leases_of_a_silent_instance_go_to_another(coordinate: Coordinate) -> None:
    coordinator = await coordinate(clocked=True, lease_seconds=LEASE_SECONDS)
    await coordinator.tell(hints=[make_hint()])
    dead = (await Poller(coordinator, "dead").poll()).tasks
    assert len(dead) == 4
    polling = asyncio.create_task(Poller(coordinator, "b").poll())
    await held(coordinator)

    async def looked_at() -> bool:
        return (await asyncio.to_thread(coordinator.metrics))["paceline_bubbles_leased_tasks"] == 4

    await until(looked_at, "the coordinator has looked at the leases, and has let them be")
    assert not polling.done()
    coordinator.advance(LEASE_SECONDS + 1)
    found = (await polling).tasks
    assert {(item.prompt_id, item.slot) for item in found} == {(item.prompt_id, item.slot) for item in dead}
    assert not {item.lease for item in found} & {item.lease for item in dead}


async def test_what_the_registry_says_of_instances_counts(
    coordinate: Coordinate, redis_url: str, namespace: str
) -> None:
    coordinator = await coordinate(intra_instance=True, intra_threshold=4, lease_seconds=3600)
    hints = [make_hint()]
    found: list[pb.PregenerationTask] = []

    async def given(poller: Poller, serving: bool) -> bool:
        await coordinator.tell(unfinished=4, hints=hints)
        found[:] = (await poller.poll(serving=serving)).tasks
        return bool(found)

    async with connect(ServiceConfig(redis_url=redis_url, namespace=namespace)) as redis:
        record = InstanceRecord("generation", "a", load={"running": 4, "waiting": 1})
        registration = Registration(redis, Keys(namespace), record, ttl=CALL)
        await registration.register()
        a, b = Poller(coordinator, "a"), Poller(coordinator, "b")
        assert not await given(a, serving=True)
        await registration.update(load={"running": 3, "waiting": 1})
        await until(lambda: given(a, serving=True), "it pre-generates beside few samples")
        assert len(found) == 4
        await registration.deregister()
        await until(lambda: given(b, serving=False), "its items go to another as soon as it is gone")


async def test_a_new_epoch_of_an_instance_voids_what_the_old_one_had(coordinate: Coordinate) -> None:
    coordinator = await coordinate()
    await coordinator.tell(hints=[make_hint()])
    old = Poller(coordinator, "a", epoch=1)
    items = (await old.poll()).tasks
    again = (await Poller(coordinator, "a", epoch=2).poll()).tasks
    assert len(again) == 4
    zombie = await old.poll(progress(items))
    assert sorted(zombie.revoked) == sorted(item.lease for item in items)
    assert not zombie.tasks


@pytest.mark.parametrize("mode", ["halt", "sleep", "pregenerate"])
async def test_the_barrier(coordinate: Coordinate, mode: str) -> None:
    coordinator = await coordinate(clocked=True, during_update=mode)
    halts = mode != "pregenerate"
    await coordinator.tell(unfinished=1, hints=[make_hint()])
    busy, idle = Poller(coordinator, "a"), Poller(coordinator, "b", room=0)
    items = (await busy.poll()).tasks
    await busy.poll(progress(items, 3))
    polling = asyncio.create_task(idle.poll())
    await held(coordinator)
    ended_at = coordinator.now
    await coordinator.tell(UPDATE, hints=[make_hint()])
    coordinator.advance(1)
    response = await busy.poll(progress(items, 4))
    assert (response.halt, response.sleep) == (halts, mode == "sleep")
    assert seconds_of(response.halted_at) == (ended_at if halts else 0)
    if halts:
        # It was held, and is told as well.
        asleep = await polling
        assert (asleep.halt, asleep.sleep) == (True, mode == "sleep")
    await coordinator.tell(APPLYING, hints=[make_hint()])
    response = await busy.poll(progress(items, 4))
    assert (response.halt, response.sleep, seconds_of(response.halted_at)) == (True, False, 0.0)
    if not halts:
        response = await polling
        assert (response.halt, response.sleep) == (True, False)
    await coordinator.tell(ROLLOUT, policy_version=1, unfinished=1, hints=[make_hint()])
    response = await busy.poll(progress(items, 4, returned=True), policy_version=1)
    assert not response.halt
    assert len(response.tasks) == 2, "the other instance has its share"


async def test_a_coordinator_that_is_killed_comes_back_knowing_what_it_is_told(
    coordinate: Coordinate, redis_url: str, namespace: str
) -> None:
    coordinator = await coordinate()
    hint = make_hint()
    await coordinator.tell(hints=[hint])
    poller = Poller(coordinator, "a")
    items = (await poller.poll(room=2)).tasks
    epoch = poller.coordinator_epoch
    await coordinator.kill()
    await coordinator.start()
    # The instance goes on with what it has, and nobody stops it.
    response = await poller.poll(progress(items, 20), room=0)
    assert poller.coordinator_epoch > epoch
    assert (response.halt, list(response.revoked)) == (False, [])
    assert await coordinator.tell(hints=[hint]) == [hint.hint_id]
    assert await coordinator.tell(hints=[hint]) == []
    given = (await poller.poll()).tasks
    assert {(item.prompt_id, item.slot) for item in given} >= {(item.prompt_id, item.slot) for item in items}
    assert not {item.lease for item in given} & {item.lease for item in items}
    await poller.poll(progress(given, 9, finished=True), room=0)
    assert set((await coordinator.coverage()).values()) == {(9, True)}
    assert len(await registered(redis_url, namespace)) == 1


async def test_wrong_requests_are_refused_by_field(coordinate: Coordinate) -> None:
    coordinator = await coordinate()
    twice = make_hint()
    twice.groups[1].prompt_id = "p0"
    bare = make_hint()
    del bare.groups[0].seeds[:]
    calls = {
        "run_id": coordinator.stub.SetRun(pb.SetRunRequest(phase=ROLLOUT), timeout=CALL),
        "phase": coordinator.stub.SetRun(pb.SetRunRequest(run_id="run"), timeout=CALL),
        "hint_id": coordinator.stub.PutHint(pb.PutHintRequest(run_id="run"), timeout=CALL),
        "groups[1].prompt_id": coordinator.stub.PutHint(twice, timeout=CALL),
        "groups[0].seeds": coordinator.stub.PutHint(bare, timeout=CALL),
        "instance_id": coordinator.stub.PollWork(pb.PollWorkRequest(), timeout=CALL),
    }
    for field, call in calls.items():
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (error.value.details() or "")


async def test_what_happens_is_counted(coordinate: Coordinate) -> None:
    coordinator = await coordinate(clocked=True, lease_seconds=LEASE_SECONDS)
    await coordinator.tell(hints=[make_hint()])
    poller = Poller(coordinator, "a")
    items = (await poller.poll()).tasks
    await poller.poll([*progress(items[:1], 9, finished=True), *progress(items[1:], 5)], room=0)

    async def counts(leased: int) -> bool:
        metrics = await asyncio.to_thread(coordinator.metrics)
        return (
            metrics["paceline_bubbles_leased_tasks"] == leased
            and metrics['paceline_bubbles_leases_total{event="leased"}'] == 4
            and metrics['paceline_bubbles_leases_total{event="finished"}'] == 1
            and metrics.get('paceline_bubbles_leases_total{event="expired"}', 0) == 3 - leased
            and metrics["paceline_bubbles_pregenerated_tokens_total"] == 24
            and metrics["paceline_bubbles_open_tasks"] == 3
        )

    await until(lambda: counts(3), "metrics show who has what")
    coordinator.advance(LEASE_SECONDS + 1)
    await until(lambda: counts(0), "metrics show what has expired")
