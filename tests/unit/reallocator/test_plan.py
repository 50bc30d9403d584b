"""Which samples move: the paper's case, its constraints, and that a fleet comes to rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.reallocator.planning.decision_scope import DecisionScope
from services.reallocator.planning.plan import evacuate, plan
from services.reallocator.planning.records import (
    Candidate,
    InstanceView,
    Move,
    MoveBy,
    MoveCost,
    ReallocationRules,
    Rule,
    Transfer,
    lost,
    price,
)
from services.reallocator.planning.throughput import ThroughputCurve
from tests.unit.reallocator.fleets import FIGURE_5, FLAT, STEEP, candidate, fleets, moved, view

RULES = ReallocationRules()
# Whatever moves at all is wanted, and moves cost nothing.
EAGER = ReallocationRules(
    least_gain=1e-6, least_balance_gain=1e-6, payback=0.0, ways={MoveBy.KV: MoveCost(stall_steps=0.0)}
)
DEAR = {MoveBy.KV: MoveCost(stall_steps=3.0, donor=0.01, receiver=0.02)}


def counts(fleet: list[InstanceView]) -> dict[str, int]:
    return {each.instance_id: each.samples for each in fleet}


def settle(
    fleet: list[InstanceView], rules: ReallocationRules, most: int = 200
) -> tuple[list[InstanceView], list[Transfer]]:
    """Decides until nothing is left to do."""
    done: list[Transfer] = []
    for _ in range(most):
        transfers = plan(fleet, rules)
        if not transfers:
            return fleet, done
        fleet, done = moved(fleet, transfers), done + transfers
    pytest.fail("it never comes to rest")


# The paper's case ---------------------------------------------------------------------------------------


def test_figure_5_moves_five_of_24_samples_to_the_instance_that_has_one() -> None:
    fleet = [view("ins1", 24), view("ins2", 1)]
    (transfer,) = plan(fleet, RULES)
    assert (transfer.donor, transfer.receiver, len(transfer.keys)) == ("ins1", "ins2", 5)
    assert transfer.rule is Rule.THRESHOLD
    assert counts(moved(fleet, [transfer])) == {"ins1": 19, "ins2": 6}
    assert transfer.predicted_gain > 0.3


def test_the_fullest_gives_to_the_emptiest() -> None:
    fleet = [view(n, c, threshold=10) for n, c in (("a", 30), ("b", 2), ("c", 14), ("d", 8))]
    pairs = {(t.donor, t.receiver): len(t.keys) for t in plan(fleet, EAGER)}
    assert pairs == {("a", "b"): 8, ("c", "d"): 2}


def test_short_samples_of_low_acceptance_go_first() -> None:
    samples = [
        candidate("long", tokens=900),
        candidate("accepted", tokens=100, accepted=7.0),
        candidate("short", tokens=90),
        *(candidate(f"rest{n}", tokens=800, accepted=5.0) for n in range(20)),
    ]
    fleet = [view("a", samples, threshold=21), view("b", 0, threshold=21)]
    (transfer,) = plan(fleet, EAGER)
    assert transfer.keys[0] == "short"
    assert "long" not in transfer.keys or transfer.keys.index("long") > 0


def test_nothing_moves_that_is_about_to_end() -> None:
    ending = [candidate(f"a{n}", remaining=4.0) for n in range(24)]
    assert plan([view("a", ending), view("b", 1)], RULES) == []


def test_a_receiver_without_kv_takes_nothing() -> None:
    assert plan([view("a", 24), view("b", 1, free_blocks=3)], RULES) == []
    (transfer,) = plan([view("a", 24), view("b", 1, free_blocks=20)], RULES)
    assert len(transfer.keys) == 3, "five blocks and one to grow for each, a tenth stays free"


def test_instances_of_different_weights_do_not_mix() -> None:
    fleet = [replace(view("a", 24), peers=1), replace(view("b", 1), peers=2)]
    assert plan(fleet, RULES) == []


# The long tail ------------------------------------------------------------------------------------------


def test_a_tail_is_balanced_where_no_instance_is_above_its_threshold() -> None:
    curve = FIGURE_5
    fleet = [view("a", 19, curve=curve), view("b", 1, curve=curve)]
    (transfer,) = plan(fleet, RULES)
    assert (transfer.rule, len(transfer.keys)) == (Rule.BALANCE, 9)
    assert plan(fleet, replace(RULES, balance=False)) == []


def test_a_compute_bound_machine_balances_24_and_1() -> None:
    fleet = [view("a", 24, curve=STEEP, threshold=1), view("b", 1, curve=STEEP, threshold=1)]
    (transfer,) = plan(fleet, RULES)
    assert (transfer.rule, len(transfer.keys)) == (Rule.BALANCE, 11)


@pytest.mark.parametrize(("samples", "rule"), [(24, Rule.THRESHOLD), (19, Rule.BALANCE)])
def test_nothing_moves_for_less_time_than_is_asked_for(samples: int, rule: Rule) -> None:
    """Each of 1,000 tokens takes a step of 0.0078 s or more, so that some seconds are saved and not a hundred."""
    fleet = [view("a", samples), view("b", 1)]
    (transfer,) = plan(fleet, replace(RULES, least_saved_seconds=0.5))
    assert transfer.rule == rule
    assert plan(fleet, replace(RULES, least_saved_seconds=100.0)) == []


def test_nothing_moves_where_samples_cost_nothing() -> None:
    assert (
        plan([view("a", 24, curve=FLAT, threshold=64), view("b", 1, curve=FLAT, threshold=64)], EAGER) == []
    )


def test_where_moves_are_only_tried_out_a_pair_is_balanced_though_it_gains_nothing() -> None:
    """Measured step times may come out flat: whoever wants moves for their own sake gets them all the same."""
    fleet = [view("a", 24, curve=FLAT, threshold=64), view("b", 1, curve=FLAT, threshold=64)]
    (transfer,) = plan(fleet, replace(EAGER, least_balance_gain=0.0))
    assert (transfer.rule, len(transfer.keys)) == (Rule.BALANCE, 11)
    assert transfer.predicted_gain == pytest.approx(0.0, abs=1e-9)


def test_few_long_samples_are_not_slowed_by_many_short_ones() -> None:
    short = [candidate(f"a{n}", remaining=100.0) for n in range(40)]
    long = [candidate(f"b{n}", remaining=5000.0) for n in range(20)]
    fleet = [view("a", short, threshold=10), view("b", long, threshold=10)]
    assert plan(fleet, RULES) == []


# Always -------------------------------------------------------------------------------------------------


def test_nothing_can_be_moved_in_an_empty_fleet_or_a_fleet_of_one() -> None:
    assert plan([], RULES) == []
    assert plan([view("a", 50)], RULES) == []
    assert evacuate(view("a", 5), [], RULES) == []


@settings(deadline=None, max_examples=60)
@given(fleets(alike=False), st.sampled_from([RULES, EAGER]))
def test_constraints_always_hold(fleet: list[InstanceView], rules: ReallocationRules) -> None:
    transfers = plan(fleet, rules)
    by_name = {each.instance_id: each for each in fleet}
    involved = [name for each in transfers for name in (each.donor, each.receiver)]
    assert len(involved) == len(set(involved)), "an instance takes part once"
    after = {each.instance_id: each for each in moved(fleet, transfers)}
    for transfer in transfers:
        donor, receiver = by_name[transfer.donor], by_name[transfer.receiver]
        movable = {each.key for each in donor.candidates if each.movable}
        assert transfer.keys
        assert set(transfer.keys) <= movable
        assert after[transfer.receiver].room >= 0
        assert after[transfer.receiver].free_blocks >= receiver.free_blocks * rules.spare_blocks - 1
        if transfer.rule is Rule.THRESHOLD:
            assert after[transfer.donor].samples >= donor.threshold
            assert after[transfer.receiver].samples <= receiver.threshold
        else:
            assert after[transfer.donor].samples >= after[transfer.receiver].samples


@settings(deadline=None, max_examples=40)
@given(fleets(alike=False))
def test_no_sample_is_lost_or_doubled(fleet: list[InstanceView]) -> None:
    before = sorted(each.key for member in fleet for each in member.candidates)
    after = moved(fleet, plan(fleet, EAGER))
    assert sorted(each.key for member in after for each in member.candidates) == before


@settings(deadline=None, max_examples=40)
@given(fleets(alike=False))
def test_a_fleet_to_which_nothing_happens_comes_to_rest(fleet: list[InstanceView]) -> None:
    settle(fleet, EAGER)


@settings(deadline=None, max_examples=40)
@given(fleets())
def test_no_instance_of_a_fleet_of_equals_gives_and_takes_by_the_threshold(fleet: list[InstanceView]) -> None:
    _, done = settle(fleet, replace(EAGER, balance=False))
    assert not {each.donor for each in done} & {each.receiver for each in done}


@settings(deadline=None, max_examples=40)
@given(fleets(), st.integers(1, 20))
def test_a_fuller_donor_gives_no_fewer(fleet: list[InstanceView], more: int) -> None:
    """Of two instances that differ enough; each sample is alike, and the threshold is the saturation point."""
    if len(fleet) < 2:
        return
    base = replace(fleet[0], threshold=fleet[0].curve.saturation_point(0.25) or 64)
    donor = [candidate(f"a{n}") for n in range(base.samples)]

    def count(samples: list[Candidate]) -> int:
        pair = [
            view("a", samples, threshold=base.threshold, curve=base.curve, most=128),
            view("b", 0, threshold=base.threshold, curve=base.curve),
        ]
        return sum(len(each.keys) for each in plan(pair, replace(EAGER, balance=False, least_gain=-1.0)))

    assert count(donor + [candidate(f"b{n}") for n in range(more)]) >= count(donor)


@pytest.mark.parametrize(("samples", "threshold"), [(18, 10), (20, 10), (36, 10), (22, 10), (17, 4), (25, 4)])
def test_rounding_does_not_choose_how_many_move(samples: int, threshold: int) -> None:
    """Where steps take the same time with any batch, all that may move gain the same."""
    flat = ThroughputCurve((0.0013518769587305488,) * 64, 3.3)
    pair = [
        view("a", samples, threshold=threshold, curve=flat, most=128),
        view("b", 0, threshold=threshold, curve=flat),
    ]
    (found,) = plan(pair, replace(EAGER, balance=False, least_gain=-1.0))
    assert len(found.keys) == min(samples - threshold, threshold)


@settings(deadline=None, max_examples=40)
@given(fleets(alike=False), st.integers(0, 5))
def test_evacuation_takes_all_that_fits(fleet: list[InstanceView], which: int) -> None:
    if not fleet:
        return
    leaving = fleet[which % len(fleet)]
    others = [each for each in fleet if each is not leaving]
    transfers = evacuate(leaving, others, RULES)
    taken = [key for each in transfers for key in each.keys]
    assert len(taken) == len(set(taken))
    after = {each.instance_id: each for each in moved(fleet, transfers)}
    left = [each for each in after[leaving.instance_id].candidates if each.movable]
    for other in others:
        assert after[other.instance_id].room >= 0
        assert after[other.instance_id].free_blocks >= 0
        used = sum(len(each.keys) for each in transfers if each.receiver == other.instance_id)
        blocks = sum(
            c.blocks + 1
            for c in leaving.candidates
            for t in transfers
            if t.receiver == other.instance_id and c.key in t.keys
        )
        space = int(other.free_blocks * (1 - RULES.spare_blocks)) - blocks
        assert not left or other.room - used <= 0 or all(each.blocks + 1 > space for each in left)


# What moves cost ----------------------------------------------------------------------------------------


def test_moves_that_cost_more_than_they_gain_are_not_made() -> None:
    fleet = [view("ins1", 24), view("ins2", 1)]
    dear = {MoveBy.KV: MoveCost(donor=1.0, receiver=1.0)}
    assert plan(fleet, replace(RULES, ways=dear)) == []
    short = [candidate(f"a{n}", remaining=60.0) for n in range(24)]
    assert plan([view("a", short), view("b", 1)], replace(RULES, payback=0.0)) != []
    assert plan([view("a", short), view("b", 1)], replace(RULES, payback=0.0, ways=DEAR)) == []


def test_a_rule_that_brought_nothing_is_not_believed() -> None:
    fleet, rules = [view("ins1", 24), view("ins2", 1)], replace(RULES, balance=False)
    assert plan(fleet, replace(rules, trust={Rule.THRESHOLD: 0.05})) == []
    assert plan(fleet, replace(rules, trust={Rule.THRESHOLD: 0.5})) != []
    fleet = [view("a", 19), view("b", 1)]
    assert plan(fleet, replace(RULES, trust={Rule.BALANCE: 0.05})) == []
    assert plan(fleet, replace(RULES, trust={Rule.BALANCE: 0.5})) != []


def test_each_sample_goes_by_the_way_that_is_cheaper_for_it() -> None:
    curve = replace(STEEP, prefill=1e-5)
    ways = {
        MoveBy.KV: MoveCost(donor=1e-4, receiver=1e-4),
        MoveBy.PREFIX: MoveCost(stall_steps=1.0, prefill=1.0),
    }
    samples = [candidate(f"a{n}", tokens=20 if n % 2 else 4000) for n in range(24)]
    fleet = [view("a", samples, curve=curve, threshold=8), view("b", 0, curve=curve, threshold=14)]
    (found,) = plan(fleet, replace(EAGER, ways=ways))
    assert len(found.moves) == 14
    assert {move.by for move in found.moves if move.tokens == 20} == {MoveBy.PREFIX}
    assert {move.by for move in found.moves if move.tokens == 4000} == {MoveBy.KV}
    assert found.count(MoveBy.PREFIX) == 12


@settings(deadline=None, max_examples=100)
@given(fleets(), st.floats(0, 4), st.floats(0, 0.01), st.floats(0, 0.01), st.floats(0, 1))
def test_by_its_own_account_no_decision_makes_anything_later(
    fleet: list[InstanceView], stall: float, donor: float, receiver: float, trust: float
) -> None:
    """Counted anew: when each pair is done, with what its moves cost, and without them."""
    ways = {MoveBy.KV: MoveCost(stall, 0.0, donor, receiver)}
    rules = replace(EAGER, ways=ways, trust=dict.fromkeys(Rule, trust))
    by_name = {each.instance_id: each for each in fleet}
    for found in plan(fleet, rules):
        here, there = by_name[found.donor], by_name[found.receiver]
        gone = set(found.keys)
        leaving = [each for each in here.candidates if each.key in gone]
        prices = [
            price(MoveBy.KV, ways[MoveBy.KV], each.tokens, there.curve, there.samples + len(leaving))
            for each in leaving
        ]
        lost_here, lost_there = lost(prices)
        before = max(_done(here.candidates, here), _done(there.candidates, there))
        after = max(
            _done([each for each in here.candidates if each.key not in gone], here) + lost_here,
            _done([*there.candidates, *leaving], there) + lost_there,
        )
        assert found.predicted_gain >= 0
        assert after <= before * (1 + 1e-9)


def _done(samples: Any, there: InstanceView) -> float:
    return there.curve.finish_seconds([each.remaining for each in samples])


# Cooldown of the decision scope ------------------------------------------------------------------------------


def transfer(rule: Rule = Rule.BALANCE, **fields: Any) -> Transfer:
    return Transfer("a", "b", (Move("k"),), rule, 0.1, "", **fields)


def test_who_took_gives_nothing_for_a_while_and_who_gave_takes_nothing() -> None:
    scope = DecisionScope(1, cooldown=2)
    scope.decided({}, [transfer()])
    for _ in range(2):
        assert (scope.gives("a"), scope.receives("a")) == (True, False)
        assert (scope.gives("b"), scope.receives("b")) == (False, True)
        scope.decided({}, [])
    assert (scope.receives("a"), scope.gives("b")) == (True, True)


def test_evacuation_is_held_against_nobody() -> None:
    scope = DecisionScope(1, cooldown=2)
    scope.decided({}, [transfer(Rule.EVACUATE)])
    assert scope.gives("b")
    assert scope.receives("a")
