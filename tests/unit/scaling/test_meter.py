"""Averages over successive observations of the demand."""

from __future__ import annotations

import pytest

from paceline.internal.v1.demand_pb2 import InstanceDemand
from paceline.v1 import fleet_pb2
from services.policy.scaling.recommendation import Demand, Meter, ordinal

POOLS = ("a", "a-b")


def instance(name: str, running: int, tokens: int, epoch: int = 1, stale: bool = False) -> InstanceDemand:
    state = fleet_pb2.INSTANCE_STATE_STALE if stale else fleet_pb2.INSTANCE_STATE_SERVING
    return InstanceDemand(
        instance_id=name, epoch=epoch, state=state, running=running, max_running=10, generated_tokens=tokens
    )


def look(meter: Meter, now: float, *instances: InstanceDemand, samples: int = 1) -> None:
    meter.observe(Demand(running_samples=samples, instances=instances), POOLS, now)


@pytest.mark.parametrize(
    ("name", "pool", "number"),
    [("a-0", "a", 0), ("a-b-12", "a-b", 12), ("a-b-12", "a", None), ("a", "a", None), ("a--1", "a", None)],
)
def test_instances_are_assigned_to_pools_by_name(name: str, pool: str, number: int | None) -> None:
    assert ordinal(name, pool) == number


def test_the_rate_is_that_of_well_filled_instances() -> None:
    meter = Meter()
    assert meter.rate("a") is None
    look(meter, 0, instance("a-0", 10, 0), instance("a-1", 1, 0))
    look(meter, 10, instance("a-0", 9, 1000), instance("a-1", 1, 10))
    assert meter.rate("a") == pytest.approx(100)
    assert meter.rate("a-b") == pytest.approx(100), "nothing better is known"
    look(meter, 70, instance("a-0", 9, 13_000))
    assert 100 < (meter.rate("a") or 0) < 200


def test_a_process_that_started_anew_says_nothing() -> None:
    meter = Meter()
    look(meter, 0, instance("a-0", 10, 5000))
    look(meter, 10, instance("a-0", 10, 6000, epoch=2))
    look(meter, 10, instance("a-0", 10, 7000, epoch=2))
    assert meter.rate("a") is None


def test_bubbles_are_those_of_instances_that_could_have_samples() -> None:
    meter = Meter()
    stale = instance("a-2", 0, 0, stale=True)
    look(meter, 0, instance("a-0", 1, 0), instance("a-1", 0, 0), stale, instance("other-0", 0, 0))
    assert meter.bubble_share == 0.5


def test_between_steps_nobody_is_idle() -> None:
    meter = Meter()
    look(meter, 0, instance("a-0", 1, 0))
    look(meter, 100, instance("a-0", 0, 0), samples=0)
    assert meter.bubble_share == 0.0
    assert meter.idle_for(300) == 300
    look(meter, 400, instance("a-0", 1, 0))
    assert meter.idle_for(400) == 0


def test_what_never_had_work_is_idle_from_its_beginning() -> None:
    meter = Meter()
    assert meter.idle_for(50) == 0
    look(meter, 50, samples=0)
    assert meter.idle_for(80) == 30
