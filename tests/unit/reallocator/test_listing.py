"""Instances that list their samples for a decision are few of a large fleet, and none is left out for ever."""

from __future__ import annotations

from services.reallocator.planning.decision_scope import MOST_LISTED, WITNESSES, DecisionScope
from services.reallocator.planning.records import LoadView, Move, ReallocationRules, Rule, Transfer
from tests.unit.reallocator.fleets import FIGURE_5

_RULES = ReallocationRules(least_gain=0.01)


def _fleet(count: int, samples: int | None = None, peers: object = "model") -> list[LoadView]:
    """Return instances that are full and empty in turns, or all have the same samples."""
    counts = [samples if samples is not None else 60 * (n % 2) for n in range(count)]
    return [LoadView(f"i{n:04d}", each, FIGURE_5, 19, peers) for n, each in enumerate(counts)]


def test_a_decision_lists_few_of_a_large_fleet_and_comes_to_all_that_could_gain() -> None:
    scope, fleet, seen = DecisionScope(1, 0), _fleet(400), set[str]()
    # Two rules pair an instance with two others.
    for decision in range(2 * 400 // MOST_LISTED + 1):
        chosen = scope.choose(fleet, _RULES)
        assert len(chosen) <= MOST_LISTED + (WITNESSES if decision == 0 else 0)
        assert len(chosen) >= MOST_LISTED // 2
        seen |= chosen
        scope.decided({}, ())
    assert seen == {each.instance_id for each in fleet}, "pairs that moved nothing make way"


def test_a_pair_that_moved_samples_is_looked_at_again() -> None:
    scope, fleet = DecisionScope(1, 0), _fleet(400)
    first = scope.choose(fleet, _RULES)
    donor, receiver = (next(n for n in sorted(first) if int(n[1:]) % 2 == odd) for odd in (1, 0))
    scope.decided({}, [Transfer(donor, receiver, (Move("s"),), Rule.THRESHOLD, 0.5, "")])
    again = scope.choose(fleet, _RULES)
    assert donor in again
    assert len(again & first) < len(first) / 2


def test_the_same_witnesses_of_each_kind_are_listed_in_every_eighth_decision() -> None:
    scope = DecisionScope(1, 0)
    fleet = [*_fleet(20, 8), *(LoadView(f"other-{n}", 8, FIGURE_5, 19, "other") for n in range(3))]
    expected = {f"i{n:04d}" for n in range(WITNESSES)} | {f"other-{n}" for n in range(3)}
    found = []
    for _ in range(17):
        found.append(scope.choose(fleet, _RULES))
        # A decision that comes too late is due again.
        assert scope.choose(fleet, _RULES) == found[-1]
        scope.decided({}, ())
    assert [n for n, chosen in enumerate(found) if chosen] == [0, 8, 16]
    assert found[0] == found[8] == found[16] == expected
