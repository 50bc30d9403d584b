"""Restarts of dead processes."""

from services.local.child import Restarts
from services.local.config import RestartPolicy


def test_delays_grow_up_to_the_maximum() -> None:
    restarts = Restarts(RestartPolicy(limit=5, initial=1, maximum=3, window=100))
    assert [restarts.died(now) for now in (0.0, 10.0, 20.0)] == [1.0, 12.0, 23.0]


def test_too_many_deaths_are_final() -> None:
    restarts = Restarts(RestartPolicy(limit=2, window=100))
    assert [restarts.died(now) is None for now in (0.0, 1.0, 2.0)] == [False, False, True]


def test_old_deaths_are_forgotten() -> None:
    restarts = Restarts(RestartPolicy(limit=1, window=10, initial=1))
    assert restarts.died(0.0) == 1.0
    assert restarts.died(10.0) == 11.0
    assert restarts.died(11.0) is None
