"""Samples in transit between two instances."""

from __future__ import annotations

from typing import Any

from services.gateway.scheduler.instance_events import MovesInTransit
from services.gateway.scheduler.work_link import Attempt


def moved() -> Attempt:
    batch: Any = object()
    return Attempt(batch, 0, 1, "prompt", 1.0, migration_id="m")


def test_those_who_wait_for_an_instance_arrive_there_in_order_and_once() -> None:
    transit = MovesInTransit()
    first, second, other = moved(), moved(), moved()
    for each, receiver in ((first, "a"), (second, "a"), (other, "b")):
        transit.wait(each, receiver)
    assert len(transit) == 3
    assert transit.arrivals("a") == [first, second]
    assert transit.arrivals("a") == []
    assert len(transit) == 1


def test_one_leaves_once_and_not_after_it_has_arrived() -> None:
    transit = MovesInTransit()
    first, second = moved(), moved()
    for each in (first, second):
        transit.wait(each, "a")
    assert transit.leave(first, "a")
    assert not transit.leave(first, "a")
    assert transit.arrivals("a") == [second]
    assert not transit.leave(second, "a")
    assert not transit.leave(moved(), "nowhere")
