"""Samples between two instances."""

from __future__ import annotations

from typing import Any

from services.gateway.transit import Transit, Traveller


def traveller(receiver: str, name: str = "m") -> Traveller:
    held: Any = object()
    return Traveller(held, receiver, name)


def test_those_who_wait_for_an_instance_arrive_there_in_order_and_once() -> None:
    transit = Transit()
    first, second, other = traveller("a"), traveller("a"), traveller("b")
    for each in (first, second, other):
        transit.wait(each)
    assert len(transit) == 3
    assert transit.arrivals("a") == [first, second]
    assert transit.arrivals("a") == []
    assert len(transit) == 1


def test_one_leaves_once_and_not_after_it_has_arrived() -> None:
    transit = Transit()
    first, second = traveller("a"), traveller("a")
    for each in (first, second):
        transit.wait(each)
    assert transit.leave(first)
    assert not transit.leave(first)
    assert transit.arrivals("a") == [second]
    assert not transit.leave(second)
    assert not transit.leave(traveller("nowhere"))
