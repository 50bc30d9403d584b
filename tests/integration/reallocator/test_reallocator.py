"""The reallocator beside a gateway: who is crowded gives, who leaves is emptied, and no sample notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import pytest

from paceline.internal.v1 import migration_pb2
from paceline.v1 import fleet_pb2, rollout_pb2
from services.reallocator.moves import FIRST_DELAY
from services.reallocator.planning.records import MoveBy
from tests.integration.gateway.conftest import CALL, RunningGateway, check_samples, make_batch, until
from tests.integration.reallocator.conftest import Fleet
from tests.support.fake_instance import FakeInstance

HELD = 100


async def crowded(
    fleet: Fleet, samples: int = 24
) -> tuple[RunningGateway, rollout_pb2.SubmitRolloutsRequest]:
    """So many unfinished samples on the only instance."""
    gateway = await fleet.cluster.gateway()
    await fleet.join("i0", hold_at=HELD)
    await fleet.cluster.serving(gateway, 1)
    request = make_batch(groups=samples // 4, samples=4, max_tokens=400, ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(
        lambda: [s.length for s in fleet.fakes["i0"].running()] == [HELD] * samples, "all are in the middle"
    )
    return gateway, request


def resubmissions(events: Sequence[rollout_pb2.StreamRolloutsResponse]) -> int:
    return sum(event.sample.provenance.resubmissions for event in events)


async def test_an_instance_that_joins_in_mid_step_is_filled_at_once(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    # A decision by steps would take for ever.
    reallocator = fleet.reallocator(decision_steps=10**9)
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: fleet.counts() == {"i0": 13, "i1": 11}, "i1 has as many as its threshold")
    await until(
        lambda: reallocator.metric("moves_total", rule="threshold", by="kv") == 11, "the reallocator knows"
    )
    fleet.release()
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 0
    (decision,) = await reallocator.told("migration")
    assert decision.predicted_gain > 0.4, "what the moves cost is taken off"
    assert decision.details["samples"] == 11
    assert "threshold" in decision.reason
    assert reallocator.metric("saturation_point_samples", instance_id="i1") == 11


async def test_nothing_is_shown_of_an_instance_that_is_gone(fleet: Fleet) -> None:
    await crowded(fleet)
    reallocator = fleet.reallocator(decision_steps=10**9)
    await fleet.join("i1", hold_at=HELD)

    def shown() -> set[str]:
        return {
            sample.labels["instance_id"]
            for family in reallocator.prometheus.collect()
            for sample in family.samples
            if "instance_id" in sample.labels
        }

    await until(lambda: reallocator.metric("saturation_point_samples", instance_id="i1") == 11, "i1 is known")
    assert shown() == {"i0", "i1"}
    await fleet.fakes["i1"].kill()
    await until(lambda: shown() == {"i0"}, "i1 is forgotten")


async def test_samples_of_instances_that_can_gain_nothing_are_not_listed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reallocator.planning.decision_scope.WITNESSES", 1)
    gateway, request = await crowded(fleet)
    for name in ("i1", "i2", "i3"):
        await fleet.join(name, hold_at=HELD)
    await fleet.cluster.serving(gateway, 4)
    reallocator = fleet.reallocator(decision_steps=10**9)
    await until(
        lambda: reallocator.metric("moves_total", rule="threshold", by="kv") == 11, "samples have moved"
    )
    listings = {name: mover.listings for name, mover in fleet.movers.items()}
    assert listings == {"i0": 1, "i1": 1, "i2": 0, "i3": 0}
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_what_was_achieved_is_measured_and_told(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator()
    await fleet.join("i1", hold_at=HELD)
    await until(
        lambda: reallocator.metric("moves_total", rule="threshold", by="kv") == 11, "samples have moved"
    )
    (outcome,) = await reallocator.told("migration_outcome")
    assert (outcome.details["moved"], outcome.details["bytes"]) == (11, 11 * 4096)
    assert outcome.details["moved_by"] == {"kv": 11, "prefix": 0}
    assert reallocator.learned.costs.ways[MoveBy.KV].stall_steps < 2.0, "the fakes' stall is learned"
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_what_is_cheaper_to_read_again_goes_by_its_prefix(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    # 100 tokens are read in no time beside a stall of two steps.
    reallocator = fleet.reallocator(prefill=1e-9, decision_steps=10**9)
    reallocator.learned.costs.learn_stall(MoveBy.KV, 50.0, 0.0, 1)
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: fleet.counts() == {"i0": 13, "i1": 11}, "i1 has as many as its threshold")
    await until(lambda: reallocator.metric("moves_total", rule="threshold", by="prefix") == 11, "it knows")
    fleet.release()
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 11
    (decision,) = await reallocator.told("migration")
    assert decision.details["by"] == {"kv": 0, "prefix": 11}
    (outcome,) = await reallocator.told("migration_outcome")
    assert (outcome.details["moved_by"], outcome.details["bytes"]) == ({"kv": 0, "prefix": 11}, 0)


async def test_moves_that_come_too_late_are_not_begun(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator(decision_steps=10**9, moves_at_once=1, stale_seconds=2.0)
    mover = fleet.movers["i0"]
    mover.gate.clear()
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: mover.at_once == 1, "a move is under way")
    begun = asyncio.get_running_loop().time()
    await until(lambda: asyncio.get_running_loop().time() > begun + 2.0, "the others are late")
    mover.gate.set()
    (outcome,) = await reallocator.told("migration_outcome")
    assert (outcome.details["moved"], outcome.details["refused"]) == (1, {"stale": 10})
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_fleet_that_is_even_is_left_alone(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator()
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: fleet.moves() == 11, "samples have moved")
    decided = reallocator.metric("decisions_total", outcome="move")
    steps = fleet.fakes["i0"].steps
    await until(lambda: fleet.fakes["i0"].steps > steps + 200, "ten more decisions were due")
    assert fleet.moves() == 11
    assert reallocator.metric("decisions_total", outcome="move") == decided == 1
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_drained_instance_is_emptied_by_moves(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator(decision_steps=10**9, balance=False, least_gain=100.0)
    for name in ("i1", "i2"):
        await fleet.join(name, hold_at=HELD)
    await fleet.cluster.serving(gateway, 3)
    fleet.fakes["i0"].evacuation_seconds = CALL
    drained = await gateway.trainer.fleet.Drain(fleet_pb2.DrainRequest(instance_id="i0"), timeout=CALL)
    assert drained.handed_over == 0, "nothing was left to go by its prefix"
    assert fleet.counts() == {"i0": 0, "i1": 12, "i2": 12}
    fleet.release()
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 0
    await until(lambda: reallocator.metric("moves_total", rule="evacuate", by="kv") == 24, "all are counted")
    rules = {each.details["rule"] for each in await reallocator.told("migration")}
    assert rules == {"evacuate"}


async def test_what_cannot_be_moved_off_a_drained_instance_goes_by_its_prefix(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator(balance=False, least_gain=100.0)
    await fleet.join("i1", hold_at=HELD)
    await fleet.cluster.serving(gateway, 2)
    # Only the first prompt's samples can be moved.
    fleet.movers["i0"].refuse = lambda r: (
        None if r.key.startswith("p0/") else migration_pb2.MOVE_REASON_REUSING
    )
    # Those that can be moved are, in this time.
    fleet.fakes["i0"].evacuation_seconds = 4.0
    drained = await gateway.trainer.fleet.Drain(fleet_pb2.DrainRequest(instance_id="i0"), timeout=CALL)
    assert drained.handed_over == 20
    await until(lambda: reallocator.metric("moves_total", rule="evacuate", by="kv") == 4, "they are counted")
    assert reallocator.metric("refusals_total", reason="reusing") >= 20
    fleet.release()
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 20


async def test_a_receiver_that_refuses_is_not_asked_for_every_sample(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator(decision_steps=10**9, moves_at_once=2)
    mover = fleet.movers["i0"]
    mover.refuse = lambda request: migration_pb2.MOVE_REASON_FULL
    await fleet.join("i1", hold_at=HELD)
    (outcome,) = await reallocator.told("migration_outcome")
    assert outcome.details["moved"] == 0
    assert sum(outcome.details["refused"].values()) <= 2
    assert mover.most_at_once <= 2
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_receiver_that_cannot_be_reached_is_left_alone_for_a_while(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator(decision_steps=1, cooldown_decisions=0, moves_at_once=1)
    tried: list[float] = []

    def refuse(request: migration_pb2.MoveRequest) -> migration_pb2.MoveReason | None:
        tried.append(time.monotonic())
        return migration_pb2.MOVE_REASON_RECEIVER_LOST

    fleet.movers["i0"].refuse = refuse
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: len(tried) == 2, "it is tried again after the pause")
    assert tried[1] - tried[0] >= FIRST_DELAY, "every step is due for a decision"
    fleet.movers["i0"].refuse = lambda request: None
    failures = partial(reallocator.metric, "failures_total", reason="receiver_lost")
    await until(lambda: failures() == len(tried), "each is counted")
    await until(lambda: fleet.counts()["i1"] >= 5, "it can be reached")
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_donor_that_dies_in_the_middle_of_its_moves_costs_prefixes_only(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator(decision_steps=10**9)
    mover = fleet.movers["i0"]
    mover.gate.clear()
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: mover.at_once > 0, "moves are under way")
    await fleet.fakes["i0"].kill()
    await until(lambda: sum(reallocator.metric("failures_total", reason=r) for r in _ENDS), "it is noticed")
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


_ENDS = ("unavailable", "cancelled", "closed", "unknown")


async def test_without_a_reallocator_everything_goes_on(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    reallocator = fleet.reallocator()
    fleet.movers["i0"].gate.clear()
    await fleet.join("i1", hold_at=HELD)
    await until(lambda: fleet.movers["i0"].at_once > 0, "moves are under way")
    await reallocator.stop()
    # The moves that were begun are the donor's to finish.
    fleet.movers["i0"].gate.set()
    fleet.release()
    check_samples(request, await gateway.trainer.collect(request))


async def test_an_instance_that_does_not_speak_of_migration_is_left_alone(fleet: Fleet) -> None:
    gateway, request = await crowded(fleet)
    old = FakeInstance(fleet.cluster.redis_url, fleet.cluster.namespace, "old")
    async with old:
        reallocator = fleet.reallocator(decision_steps=1)
        await until(lambda: reallocator.metric("decisions_total", outcome="keep") > 2, "it has looked")
        await fleet.cluster.serving(gateway, 2)
        fleet.release()
        events = await asyncio.wait_for(gateway.trainer.collect(request), CALL)
    check_samples(request, events)
    assert fleet.moves() == 0
