"""What is learned of moves: it follows what is measured, within bounds, and fades."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.learned_costs import LearnedCosts, MoveCosts, Trust
from services.reallocator.planning.records import Move, MoveBy, Rule

KV = [Move("a", MoveBy.KV, 100), Move("b", MoveBy.KV, 100)]
READ = [Move("a", MoveBy.PREFIX, 100, prefill=0.01), Move("b", MoveBy.PREFIX, 100, prefill=0.03)]


def test_stalls_and_sending_are_learned_and_bounded() -> None:
    costs = MoveCosts()
    for _ in range(50):
        costs.learn_stall(MoveBy.KV, 5.0, 0.1, 100)
    assert costs.ways[MoveBy.KV].stall_steps == pytest.approx(5.0, abs=0.01)
    assert costs.ways[MoveBy.KV].seconds_per_token == pytest.approx(0.001, rel=0.01)
    costs.learn_stall(MoveBy.KV, 1e9, -1.0, 0)
    assert costs.ways[MoveBy.KV].stall_steps < 20
    assert costs.ways[MoveBy.KV].seconds_per_token > 0
    assert costs.ways[MoveBy.PREFIX] == MoveCosts().ways[MoveBy.PREFIX]


def test_engine_time_is_learned_for_each_move_of_one_way() -> None:
    costs = MoveCosts()
    for _ in range(50):
        costs.learn_loss(KV, 0.004, 0.008, 0.01)
    assert costs.ways[MoveBy.KV].donor == pytest.approx(0.002, rel=0.01)
    assert costs.ways[MoveBy.KV].receiver == pytest.approx(0.004, rel=0.01)
    costs.learn_loss([*KV, *READ], 9.0, 9.0, 0.01)
    assert costs.ways[MoveBy.KV].donor == pytest.approx(0.002, rel=0.01), "of both ways nothing can be told"
    for _ in range(50):
        costs.learn_loss(KV, None, -1.0, 0.01)
    assert costs.ways[MoveBy.KV].donor == pytest.approx(0.002, rel=0.01)
    assert costs.ways[MoveBy.KV].receiver == 0.0, "a gain is no cost"


def test_prefilling_is_learned_as_times_what_was_predicted() -> None:
    costs = MoveCosts()
    for _ in range(100):
        predicted = costs.ways[MoveBy.PREFIX].prefill * 0.04
        costs.learn_loss([Move("a", MoveBy.PREFIX, 100, prefill=predicted)], 0.0, 0.24, 0.01)
    assert costs.ways[MoveBy.PREFIX].prefill == pytest.approx(6.0, rel=0.05)
    assert costs.ways[MoveBy.PREFIX].receiver == MoveCosts().ways[MoveBy.PREFIX].receiver


def test_what_is_not_tried_is_forgotten() -> None:
    costs, trust = MoveCosts(), Trust()
    for _ in range(30):
        costs.learn_stall(MoveBy.KV, 40.0, 0.0, 1)
        trust.learn(Rule.BALANCE, 0.1, -0.5)
    assert trust.shares[Rule.BALANCE] < 0.01
    for _ in range(1000):
        costs.fade()
        trust.fade()
    assert costs.ways[MoveBy.KV].stall_steps == pytest.approx(2.0, abs=0.3)
    assert trust.shares[Rule.BALANCE] > 0.95


def test_a_rule_is_trusted_as_far_as_it_keeps_its_word() -> None:
    trust = Trust()
    for _ in range(50):
        trust.learn(Rule.THRESHOLD, 0.4, 0.2)
    assert trust.shares[Rule.THRESHOLD] == pytest.approx(0.5, abs=0.01)
    assert trust.shares[Rule.BALANCE] == 1.0
    trust.learn(Rule.BALANCE, 0.0, -1.0)
    assert trust.shares[Rule.BALANCE] == 1.0, "nothing was promised"


def test_only_ways_that_may_be_taken_are_known() -> None:
    assert list(MoveCosts((MoveBy.KV,)).ways) == [MoveBy.KV]
    costs = MoveCosts((MoveBy.KV,))
    costs.learn_stall(MoveBy.PREFIX, 5.0, 0.0, 1)
    costs.learn_loss(READ, 1.0, 1.0, 0.01)
    assert list(costs.ways) == [MoveBy.KV]


def test_lifetimes_are_of_a_model() -> None:
    learned = LearnedCosts()
    assert learned.lengths_of("m") is learned.lengths_of("m")
    assert learned.lengths_of("m") is not learned.lengths_of("n")


def test_what_was_learned_rules_unless_moves_are_to_be_tried_out() -> None:
    learned = LearnedCosts()
    learned.costs.learn_stall(MoveBy.KV, 9.0, 0.0, 1)
    learned.trust.learn(Rule.BALANCE, 0.1, 0.0)
    rules = ReallocatorConfig().rules(learned)
    assert rules.ways == learned.costs.ways
    assert rules.trust[Rule.BALANCE] < 1
    trying = ReallocatorConfig(count_costs=False, by="kv").rules(learned)
    assert {by: cost.stall_steps for by, cost in trying.ways.items()} == {MoveBy.KV: 0.0}
    assert not trying.trust


NUMBERS = st.floats(-1e6, 1e6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.floats(0, 1), st.booleans()), max_size=30))
def test_nothing_that_is_measured_breaks_the_bounds(seen: list[tuple[float, float, float, bool]]) -> None:
    costs, trust = MoveCosts(), Trust()
    for donor, receiver, step, by_prefix in seen:
        moves = READ if by_prefix else KV
        costs.learn_loss(moves, donor, receiver, step)
        costs.learn_stall(moves[0].by, donor, receiver, 10)
        trust.learn(Rule.BALANCE, donor, receiver)
    for cost in costs.ways.values():
        assert 0.5 <= cost.stall_steps <= 50
        assert 0 <= cost.donor <= 8
        assert 0 <= cost.receiver <= 8
        assert cost.prefill == 0 or 0.25 <= cost.prefill <= 64
    assert 0 <= trust.shares[Rule.BALANCE] <= 1
