"""Which samples move: the paper's case, its constraints, and that a fleet comes to rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.reallocator.plan import evacuate, plan
from services.reallocator.price import By, WayCost, lost, price
from services.reallocator.records import Candidate, Move, Rule, Rules, Standing, Transfer
from services.reallocator.rest import Rest
from tests.unit.reallocator.fleets import (
    FIGURE_5,
    FLAT,
    STEEP,
    candidate,
    fleets,
    moved,
    standing,
)

RULES = Rules()
# Whatever moves at all is wanted, and moves cost nothing.
EAGER = Rules(least_gain=1e-6, least_level_gain=1e-6, payback=0.0, ways={By.KV: WayCost(stall_steps=0.0)})
DEAR = {By.KV: WayCost(stall_steps=3.0, donor=0.01, receiver=0.02)}


def counts(fleet: list[Standing]) -> dict[str, int]:
    return {each.instance_id: each.samples for each in fleet}


def settle(fleet: list[Standing], rules: Rules, most: int = 200) -> tuple[list[Standing], list[Transfer]]:
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
    fleet = [standing("ins1", 24), standing("ins2", 1)]
    (transfer,) = plan(fleet, RULES)
    assert (transfer.donor, transfer.receiver, len(transfer.keys)) == ("ins1", "ins2", 5)
    assert transfer.rule is Rule.THRESHOLD
    assert counts(moved(fleet, [transfer])) == {"ins1": 19, "ins2": 6}
    assert transfer.predicted_gain > 0.3


def test_the_fullest_gives_to_the_emptiest() -> None:
    fleet = [standing(n, c, threshold=10) for n, c in (("a", 30), ("b", 2), ("c", 14), ("d", 8))]
    pairs = {(t.donor, t.receiver): len(t.keys) for t in plan(fleet, EAGER)}
    assert pairs == {("a", "b"): 8, ("c", "d"): 2}


def test_short_samples_of_low_acceptance_go_first() -> None:
    samples = [
        candidate("long", tokens=900),
        candidate("accepted", tokens=100, accepted=7.0),
        candidate("short", tokens=90),
        *(candidate(f"rest{n}", tokens=800, accepted=5.0) for n in range(20)),
    ]
    fleet = [standing("a", samples, threshold=21), standing("b", 0, threshold=21)]
    (transfer,) = plan(fleet, EAGER)
    assert transfer.keys[0] == "short"
    assert "long" not in transfer.keys or transfer.keys.index("long") > 0


def test_nothing_moves_that_is_about_to_end() -> None:
    ending = [candidate(f"a{n}", remaining=4.0) for n in range(24)]
    assert plan([standing("a", ending), standing("b", 1)], RULES) == []


def test_a_receiver_without_kv_takes_nothing() -> None:
    assert plan([standing("a", 24), standing("b", 1, free_blocks=3)], RULES) == []
    (transfer,) = plan([standing("a", 24), standing("b", 1, free_blocks=20)], RULES)
    assert len(transfer.keys) == 3, "five blocks and one to grow for each, a tenth stays free"


def test_instances_of_different_weights_do_not_mix() -> None:
    fleet = [replace(standing("a", 24), peers=1), replace(standing("b", 1), peers=2)]
    assert plan(fleet, RULES) == []


# The long tail ------------------------------------------------------------------------------------------


def test_a_tail_is_levelled_where_no_instance_is_above_its_threshold() -> None:
    curve = FIGURE_5
    fleet = [standing("a", 19, curve=curve), standing("b", 1, curve=curve)]
    (transfer,) = plan(fleet, RULES)
    assert (transfer.rule, len(transfer.keys)) == (Rule.LEVEL, 9)
    assert plan(fleet, replace(RULES, level=False)) == []


def test_a_compute_bound_machine_levels_24_and_1() -> None:
    fleet = [standing("a", 24, curve=STEEP, threshold=1), standing("b", 1, curve=STEEP, threshold=1)]
    (transfer,) = plan(fleet, RULES)
    assert (transfer.rule, len(transfer.keys)) == (Rule.LEVEL, 11)


def test_nothing_moves_where_samples_cost_nothing() -> None:
    assert (
        plan([standing("a", 24, curve=FLAT, threshold=64), standing("b", 1, curve=FLAT, threshold=64)], EAGER)
        == []
    )


def test_where_moves_are_only_tried_out_a_pair_is_levelled_though_it_gains_nothing() -> None:
    """Measured step times may come out flat: whoever wants moves for their own sake gets them all the same."""
    fleet = [standing("a", 24, curve=FLAT, threshold=64), standing("b", 1, curve=FLAT, threshold=64)]
    (transfer,) = plan(fleet, replace(EAGER, least_level_gain=0.0))
    assert (transfer.rule, len(transfer.keys)) == (Rule.LEVEL, 11)
    assert transfer.predicted_gain == pytest.approx(0.0, abs=1e-9)


def test_few_long_samples_are_not_slowed_by_many_short_ones() -> None:
    short = [candidate(f"a{n}", remaining=100.0) for n in range(40)]
    long = [candidate(f"b{n}", remaining=5000.0) for n in range(20)]
    fleet = [standing("a", short, threshold=10), standing("b", long, threshold=10)]
    assert plan(fleet, RULES) == []


# Always -------------------------------------------------------------------------------------------------


def test_nothing_can_be_moved_in_an_empty_fleet_or_a_fleet_of_one() -> None:
    assert plan([], RULES) == []
    assert plan([standing("a", 50)], RULES) == []
    assert evacuate(standing("a", 5), [], RULES) == []


@settings(deadline=None, max_examples=60)
@given(fleets(alike=False), st.sampled_from([RULES, EAGER]))
def test_constraints_always_hold(fleet: list[Standing], rules: Rules) -> None:
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
def test_no_sample_is_lost_or_doubled(fleet: list[Standing]) -> None:
    before = sorted(each.key for member in fleet for each in member.candidates)
    after = moved(fleet, plan(fleet, EAGER))
    assert sorted(each.key for member in after for each in member.candidates) == before


@settings(deadline=None, max_examples=40)
@given(fleets(alike=False))
def test_a_fleet_to_which_nothing_happens_comes_to_rest(fleet: list[Standing]) -> None:
    settle(fleet, EAGER)


@settings(deadline=None, max_examples=40)
@given(fleets())
def test_no_instance_of_a_fleet_of_equals_gives_and_takes_by_the_threshold(fleet: list[Standing]) -> None:
    _, done = settle(fleet, replace(EAGER, level=False))
    assert not {each.donor for each in done} & {each.receiver for each in done}


@settings(deadline=None, max_examples=40)
@given(fleets(), st.integers(1, 20))
def test_a_fuller_donor_gives_no_fewer(fleet: list[Standing], more: int) -> None:
    """Of two instances that differ enough; each sample is alike."""
    if len(fleet) < 2:
        return
    base = fleet[0]
    donor = [candidate(f"a{n}") for n in range(base.samples)]

    def count(samples: list[Candidate]) -> int:
        pair = [
            standing("a", samples, threshold=base.threshold, curve=base.curve, most=128),
            standing("b", 0, threshold=base.threshold, curve=base.curve),
        ]
        return sum(len(each.keys) for each in plan(pair, replace(EAGER, level=False, least_gain=-1.0)))

    assert count(donor + [candidate(f"b{n}") for n in range(more)]) >= count(donor)


@settings(deadline=None, max_examples=40)
@given(fleets(alike=False), st.integers(0, 5))
def test_evacuation_takes_all_that_fits(fleet: list[Standing], which: int) -> None:
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
    fleet = [standing("ins1", 24), standing("ins2", 1)]
    dear = {By.KV: WayCost(donor=1.0, receiver=1.0)}
    assert plan(fleet, replace(RULES, ways=dear)) == []
    short = [candidate(f"a{n}", remaining=60.0) for n in range(24)]
    assert plan([standing("a", short), standing("b", 1)], replace(RULES, payback=0.0)) != []
    assert plan([standing("a", short), standing("b", 1)], replace(RULES, payback=0.0, ways=DEAR)) == []


def test_a_rule_that_brought_nothing_is_not_believed() -> None:
    fleet, rules = [standing("ins1", 24), standing("ins2", 1)], replace(RULES, level=False)
    assert plan(fleet, replace(rules, trust={Rule.THRESHOLD: 0.05})) == []
    assert plan(fleet, replace(rules, trust={Rule.THRESHOLD: 0.5})) != []
    fleet = [standing("a", 19), standing("b", 1)]
    assert plan(fleet, replace(RULES, trust={Rule.LEVEL: 0.05})) == []
    assert plan(fleet, replace(RULES, trust={Rule.LEVEL: 0.5})) != []


def test_each_sample_goes_by_the_way_that_is_cheaper_for_it() -> None:
    curve = replace(STEEP, reading=1e-5)
    ways = {By.KV: WayCost(donor=1e-4, receiver=1e-4), By.PREFIX: WayCost(stall_steps=1.0, reading=1.0)}
    samples = [candidate(f"a{n}", tokens=20 if n % 2 else 4000) for n in range(24)]
    fleet = [standing("a", samples, curve=curve, threshold=8), standing("b", 0, curve=curve, threshold=14)]
    (found,) = plan(fleet, replace(EAGER, ways=ways))
    assert len(found.moves) == 14
    assert {move.by for move in found.moves if move.tokens == 20} == {By.PREFIX}
    assert {move.by for move in found.moves if move.tokens == 4000} == {By.KV}
    assert found.count(By.PREFIX) == 12


@settings(deadline=None, max_examples=100)
@given(fleets(), st.floats(0, 4), st.floats(0, 0.01), st.floats(0, 0.01), st.floats(0, 1))
def test_by_its_own_account_no_decision_makes_anything_later(
    fleet: list[Standing], stall: float, donor: float, receiver: float, trust: float
) -> None:
    """Counted anew: when each pair is done, with what its moves cost, and without them."""
    ways = {By.KV: WayCost(stall, 0.0, donor, receiver)}
    rules = replace(EAGER, ways=ways, trust=dict.fromkeys(Rule, trust))
    by_name = {each.instance_id: each for each in fleet}
    for found in plan(fleet, rules):
        here, there = by_name[found.donor], by_name[found.receiver]
        gone = set(found.keys)
        leaving = [each for each in here.candidates if each.key in gone]
        prices = [
            price(By.KV, ways[By.KV], each.tokens, there.curve, there.samples + len(leaving))
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


def _done(samples: Any, there: Standing) -> float:
    return there.curve.finish_seconds([each.remaining for each in samples])


# Rest ---------------------------------------------------------------------------------------------------


def transfer(rule: Rule = Rule.LEVEL, **fields: Any) -> Transfer:
    return Transfer("a", "b", (Move("k"),), rule, 0.1, "", **fields)


def test_who_took_gives_nothing_for_a_while_and_who_gave_takes_nothing() -> None:
    rest = Rest(2)
    rest.decided([transfer()])
    for _ in range(2):
        assert (rest.gives("a"), rest.receives("a")) == (True, False)
        assert (rest.gives("b"), rest.receives("b")) == (False, True)
        rest.decided([])
    assert (rest.receives("a"), rest.gives("b")) == (True, True)


def test_evacuation_is_held_against_nobody() -> None:
    rest = Rest(2)
    rest.decided([transfer(Rule.EVACUATE)])
    assert rest.gives("b")
    assert rest.receives("a")
