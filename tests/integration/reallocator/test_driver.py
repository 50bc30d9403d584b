"""The benchmark's driver over fake instances: it follows moves, and makes the same ones by prefix."""

from __future__ import annotations

import asyncio

from bench.migration.driver import DrivenMove, Driver, Task
from paceline.v1 import sample_pb2
from tests.integration.gateway.conftest import Cluster, until
from tests.integration.reallocator.conftest import Fleet
from tests.support.fake_instance import FakeInstance, response_of

LENGTH = 60


def tasks(count: int = 6) -> list[Task]:
    sampling = sample_pb2.SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return [Task(f"p{n}/0", (1, 2, n), 100 + n, sampling, "i0") for n in range(count)]


def truth(count: int = 6) -> dict[str, list[int]]:
    return {f"p{n}/0": response_of(100 + n, 0, LENGTH, True)[0] for n in range(count)}


def addresses(*fakes: FakeInstance) -> dict[str, str]:
    found = {}
    for fake in fakes:
        assert fake.registration is not None
        found[fake.instance_id] = fake.registration.record.address
    return found


async def pair(fleet: Fleet, cluster: Cluster) -> tuple[FakeInstance, FakeInstance]:
    return await fleet.join("i0"), await fleet.join("i1")


async def test_moves_are_followed(fleet: Fleet, cluster: Cluster) -> None:
    donor, receiver = await pair(fleet, cluster)
    donor.hold_at = 20
    async with Driver(addresses(donor, receiver)) as driver:
        running = asyncio.create_task(driver.run(tasks()))
        await until(lambda: [s.length for s in donor.running()] == [20] * 6, "they are in the middle")
        for number, sample in enumerate(donor.running()[:3]):
            donor.move(sample, f"m{number}", receiver)
        donor.hold_at = None
        outcome = await running
    assert outcome.responses == truth()
    assert [(m.donor, m.receiver, m.tokens) for m in outcome.moves] == [("i0", "i1", 20)] * 3
    assert [move.by for move in outcome.moves] == ["kv"] * 3
    assert len(outcome.gaps("kv")) == 3
    assert outcome.lost_claims == 0


async def test_a_claim_that_is_refused_costs_a_prefix(fleet: Fleet, cluster: Cluster) -> None:
    donor, receiver = await pair(fleet, cluster)
    donor.hold_at = 20
    async with Driver(addresses(donor, receiver)) as driver:
        running = asyncio.create_task(driver.run(tasks()))
        await until(lambda: [s.length for s in donor.running()] == [20] * 6, "they are in the middle")
        donor.move(donor.running()[0], "m0", None, name="i1")
        donor.hold_at = None
        outcome = await running
    assert outcome.responses == truth()
    assert outcome.lost_claims == 1


async def test_moves_by_prefix_are_made_where_they_were_wanted(fleet: Fleet, cluster: Cluster) -> None:
    donor, receiver = await pair(fleet, cluster)
    wanted = [DrivenMove(f"p{n}/0", "i0", "i1", 24) for n in range(2)]
    # They are not done before they have gone.
    donor.hold_at = 40
    async with Driver(addresses(donor, receiver)) as driver:
        running = asyncio.create_task(driver.run(tasks(), wanted))
        await until(lambda: len(receiver.accepted) == 2, "they have gone")
        donor.hold_at = None
        outcome = await running
    assert outcome.responses == truth()
    assert sorted(move.key for move in outcome.moves) == ["p0/0", "p1/0"]
    assert all(move.tokens >= 24 for move in outcome.moves)
    assert len(outcome.gaps("prefix")) == 2
    assert {len(each.prefix_token_ids) > 20 for each in receiver.accepted} == {True}


async def test_what_instances_hand_on_is_resumed_where_they_say(fleet: Fleet, cluster: Cluster) -> None:
    donor, receiver = await pair(fleet, cluster)
    donor.hold_at = 20
    async with Driver(addresses(donor, receiver)) as driver:
        running = asyncio.create_task(driver.run(tasks()))
        await until(lambda: [s.length for s in donor.running()] == [20] * 6, "they are in the middle")
        for sample in donor.running()[:2]:
            donor.hand_back(sample, "i1")
        donor.hold_at = None
        outcome = await running
    assert outcome.responses == truth()
    assert [(m.by, m.receiver, m.tokens) for m in outcome.moves] == [("prefix", "i1", 20)] * 2
    assert (len(outcome.gaps("prefix")), outcome.moved_again) == (2, 0)
