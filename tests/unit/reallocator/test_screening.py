"""The choice of instances by their load alone has every pair that the plan would move samples between."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.reallocator.planning.decision_scope import worth_listing
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import (
    InstanceView,
    LoadView,
    MoveBy,
    MoveCost,
    ReallocationRules,
    Rule,
)
from services.reallocator.planning.throughput import ThroughputCurve
from tests.unit.reallocator.fleets import FIGURE_5, FLAT, STEEP, view

ALL = 1 << 30
FREE = ReallocationRules(least_gain=0.01, ways={MoveBy.KV: MoveCost(stall_steps=0.0)})


def load(name: str, samples: int, curve: ThroughputCurve = FIGURE_5, threshold: int = 19) -> LoadView:
    return LoadView(name, samples, curve, threshold)


def load_of(each: InstanceView) -> LoadView:
    return LoadView(each.instance_id, each.samples, each.curve, each.threshold, each.peers)


@given(
    st.lists(st.integers(0, 64), min_size=2, max_size=8),
    st.sampled_from((FIGURE_5, STEEP)),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_what_the_plan_moves_is_worth_listing(
    counts: Sequence[int], curve: ThroughputCurve, threshold: int, trust: float
) -> None:
    rules = ReallocationRules(least_gain=0.01, ways=FREE.ways, trust=dict.fromkeys(Rule, trust))
    fleet = [view(f"i{n}", count, curve=curve, threshold=threshold) for n, count in enumerate(counts)]
    taking_part = {name for transfer in plan(fleet, rules) for name in (transfer.donor, transfer.receiver)}
    assert taking_part <= worth_listing(map(load_of, fleet), rules, ALL)


def test_figure_5_is_worth_listing_and_its_like_without_trust_is_not() -> None:
    fleet = [load("full", 24), load("empty", 1), load("middle", 19)]
    assert worth_listing(fleet, FREE, ALL) == {"full", "empty"}
    distrusted = ReallocationRules(trust=dict.fromkeys(Rule, 0.01))
    assert worth_listing(fleet, distrusted, ALL) == set()


@pytest.mark.parametrize("samples", [(8, 8), (9, 8), (0, 0)])
def test_even_loads_are_not(samples: tuple[int, int]) -> None:
    assert worth_listing([load("a", samples[0], STEEP), load("b", samples[1], STEEP)], FREE, ALL) == set()


def test_flat_step_times_leave_nothing_to_gain_from_balance() -> None:
    fleet = [load("a", 12, FLAT, threshold=64), load("b", 1, FLAT, threshold=64)]
    assert worth_listing(fleet, FREE, ALL) == set()
    steep = [load("a", 12, STEEP, threshold=64), load("b", 1, STEEP, threshold=64)]
    assert worth_listing(steep, FREE, ALL) == {"a", "b"}
    assert worth_listing(steep, ReallocationRules(balance=False), ALL) == set()


def test_only_instances_of_one_policy_are_compared() -> None:
    full, empty = load("full", 24), load("empty", 1)
    other = LoadView("empty", 1, empty.curve, empty.threshold, peers="another version")
    assert worth_listing([full, other], FREE, ALL) == set()


def test_of_too_many_pairs_those_that_gain_most_are_listed_and_those_in_vain_come_last() -> None:
    fleet = [load("a", 40), load("b", 30), load("c", 4), load("d", 2)]
    # The fullest with the emptiest.
    assert worth_listing(fleet, FREE, ALL) == {"a", "b", "c", "d"}
    assert worth_listing(fleet, FREE, 3) == worth_listing(fleet, FREE, 2) == {"a", "d"}
    assert worth_listing(fleet, FREE, 1) == set()
    assert worth_listing(fleet, FREE, 2, {"d": 1}) == {"a", "d"}
    assert worth_listing(fleet, FREE, 2, {"a": 1, "d": 1}) == {"b", "c"}
    assert worth_listing(fleet, FREE, 4, {"a": 1, "d": 1}) == {"a", "b", "c", "d"}
