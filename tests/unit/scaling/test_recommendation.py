"""Recommended numbers of instances."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.policy.config import PoolConfig, ScalingConfig
from services.policy.scaling.recommendation import Demand, Due, PoolCapacity, recommend


def pool(name: str, minimum: int, maximum: int) -> PoolConfig:
    return PoolConfig(name=name, minimum=minimum, maximum=maximum)


ONE = ScalingConfig(pools=[pool("a", 1, 10)], queue_seconds=100, deadline_margin=0.5, bubble_share=0.25)
TWO = ONE.model_copy(update={"pools": [pool("a", 1, 4), pool("b", 0, 6)]})


def capacity(replicas: int, rate: float | None = 100.0, samples: float = 10.0) -> PoolCapacity:
    return PoolCapacity(replicas, rate, samples)


def waiting(tokens: float, samples: int = 1, **rest: Any) -> Demand:
    return Demand(waiting_samples=samples, waiting_tokens=tokens, **rest)


def one(demand: Demand, current: int = 2, bubbles: float | None = None, **rest: Any) -> tuple[int, str]:
    found = recommend(ONE, demand, [capacity(current)], bubbles, **rest)
    return found.replicas["a"], found.reason


def test_nothing_to_do_changes_nothing_until_it_is_so_for_long() -> None:
    assert one(Demand(), 5) == (5, "enough")
    assert one(Demand(), 5, idle=True) == (1, "idle")


def test_a_queue_is_done_within_its_time() -> None:
    assert one(waiting(tokens=30_000)) == (3, "queue")
    assert one(waiting(tokens=30_001)) == (4, "queue")
    assert one(waiting(tokens=20_000)) == (2, "enough")


def test_running_samples_alone_are_no_queue() -> None:
    assert one(Demand(running_samples=5, running_tokens=1e6)) == (2, "enough")


def test_deadlines_are_met_in_their_order() -> None:
    # 5000 tokens in 10 s of which half may be used: 1000 tokens/s.
    assert one(Demand(running_samples=1, dues=(Due(10, 5000),))) == (10, "deadline")
    assert one(Demand(running_samples=1, dues=(Due(100, 5000),)), 1) == (1, "enough")
    # The second is due late, but both have to be done by then.
    assert one(Demand(running_samples=1, dues=(Due(200, 40_000), Due(100, 5000)))) == (5, "deadline")
    assert one(Demand(running_samples=1, dues=(Due(-1, 1),))) == (10, "deadline")
    assert one(Demand(running_samples=1, dues=(Due(-1, 0),))) == (2, "enough")


def test_bubbles_beyond_what_is_allowed_give_instances_up() -> None:
    busy = Demand(running_samples=1)
    assert one(busy, 8, 0.25) == (8, "enough")
    assert one(busy, 8, 0.625) == (4, "bubbles")
    assert one(busy, 8, 1.0) == (1, "bubbles")
    assert one(replace(busy, dues=(Due(100, 30_000),)), 8, 1.0) == (6, "bubbles")


def test_before_anything_is_measured_samples_are_counted() -> None:
    found = recommend(ONE, waiting(1.0, samples=45), [capacity(2, None)], None)
    assert (found.replicas, found.reason, found.unit) == ({"a": 5}, "queue", "samples")


def test_the_first_pool_grows_first_and_shrinks_last() -> None:
    def replicas(tokens: float, *current: int, bubbles: float | None = None) -> dict[str, int]:
        return recommend(TWO, waiting(tokens), [capacity(each) for each in current], bubbles).replicas

    assert replicas(60_000, 2, 1) == {"a": 4, "b": 2}
    assert replicas(30_000, 1, 2) == {"a": 1, "b": 2}, "enough is left as it is"
    assert replicas(20_000, 3, 3, bubbles=0.9) == {"a": 2, "b": 0}
    assert replicas(inf, 1, 0) == {"a": 4, "b": 6}


def test_pools_of_different_speed() -> None:
    found = recommend(TWO, waiting(90_000), [capacity(1, 100.0), capacity(1, 300.0)], None)
    assert found.replicas == {"a": 4, "b": 2}


tokens = st.floats(0, 1e7)
demands = st.builds(
    Demand,
    waiting_samples=st.integers(0, 1000),
    waiting_tokens=tokens,
    running_samples=st.integers(0, 1000),
    running_tokens=tokens,
    dues=st.lists(st.builds(Due, st.floats(-10, 1e4), tokens), max_size=4).map(tuple),
)
pools = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=4).map(
    lambda bounds: [pool(f"p{n}", low, low + more) for n, (low, more) in enumerate(bounds)]
)
rates = st.one_of(st.none(), st.floats(1, 1e5))
shares = st.one_of(st.none(), st.floats(0, 1))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ScalingConfig, list[PoolCapacity]]:
    chosen = draw(pools)
    capacities = [
        PoolCapacity(draw(st.integers(0, 30)), draw(rates), draw(st.floats(1, 500))) for _ in chosen
    ]
    return ScalingConfig(pools=chosen), capacities


@given(cases(), demands, shares, st.booleans())
def test_bounds_are_kept(
    case: tuple[ScalingConfig, list[PoolCapacity]], demand: Demand, share: Any, idle: bool
) -> None:
    config, capacities = case
    replicas = recommend(config, demand, capacities, share, idle).replicas
    for pool in config.pools:
        assert pool.minimum <= replicas[pool.name] <= pool.maximum


@example(
    (
        ScalingConfig(pools=[pool("p0", 0, 5), pool("p1", 0, 3)]),
        [PoolCapacity(5, None, 94.0), PoolCapacity(3, None, 98.0)],
    ),
    Demand(waiting_samples=1, running_samples=664),
    1.0,
    0.0,
    2,
)
@given(cases(), demands, shares, tokens, st.integers(0, 100))
def test_more_work_never_takes_fewer(
    case: tuple[ScalingConfig, list[PoolCapacity]], demand: Demand, share: Any, tokens: float, samples: int
) -> None:
    config, capacities = case
    harder = replace(
        demand,
        waiting_samples=demand.waiting_samples + samples,
        waiting_tokens=demand.waiting_tokens + tokens,
        dues=tuple(Due(due.seconds - 1, due.tokens + tokens) for due in demand.dues),
    )
    less, more = (recommend(config, each, capacities, share).replicas for each in (demand, harder))
    assert all(less[name] <= more[name] for name in less)


@given(cases(), demands)
def test_the_capacity_is_enough_and_not_more_than_it_takes(
    case: tuple[ScalingConfig, list[PoolCapacity]], demand: Demand
) -> None:
    config, capacities = case
    capacities = [replace(each, rate=100.0, replicas=0) for each in capacities]
    found = recommend(config, demand, capacities, None)
    floor = sum(pool.minimum for pool in config.pools) * 100.0
    room = sum(pool.maximum for pool in config.pools) * 100.0
    got = sum(found.replicas.values()) * 100.0
    assert got >= min(found.wanted, room) * (1 - 1e-9) - 1e-6
    assert got <= max(floor, found.wanted * (1 + 1e-9) + 100.0)


@given(cases(), demands, shares)
def test_a_recommendation_that_was_followed_stands(
    case: tuple[ScalingConfig, list[PoolCapacity]], demand: Demand, share: Any
) -> None:
    config, capacities = case
    for _ in range(2):
        replicas = recommend(config, demand, capacities, None).replicas
        capacities = [
            replace(each, replicas=n) for each, n in zip(capacities, replicas.values(), strict=True)
        ]
    assert recommend(config, demand, capacities, None).replicas == replicas


def test_an_impossible_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="minimum"):
        PoolConfig(name="a", minimum=3, maximum=2)
