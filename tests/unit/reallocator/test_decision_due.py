"""When a decision is due."""

from __future__ import annotations

from services.reallocator.planning.decision_scope import DecisionScope

A, B = ("a", 1), ("b", 1)


def decided(steps: int = 10) -> DecisionScope:
    scope = DecisionScope(steps, cooldown=0)
    scope.decided({A: 100, B: 100}, ())
    return scope


def test_a_decision_is_due_when_somebody_has_made_so_many_steps() -> None:
    scope = decided()
    assert not scope.is_due({A: 109, B: 100}, [9, 1])
    assert scope.is_due({A: 110, B: 100}, [9, 1])


def test_one_that_joins_is_not_kept_waiting() -> None:
    scope = decided()
    assert scope.is_due({A: 101, B: 100, ("c", 1): 0}, [9, 1, 0])
    assert scope.is_due({A: 101, ("b", 2): 0}, [9, 0]), "the process is another one"


def test_one_that_leaves_is_no_reason_to_decide() -> None:
    assert not decided().is_due({A: 101}, [9])


def test_nothing_is_due_where_nothing_could_be_evened_out() -> None:
    scope = decided()
    assert not scope.is_due({A: 500, B: 500}, [9, 8])
    assert not scope.is_due({A: 500}, [9])
    assert not scope.is_due({}, [])


def test_it_says_how_many_steps_are_left() -> None:
    scope = DecisionScope(64, cooldown=0)
    scope.decided({("a", 1): 100, ("b", 1): 10}, ())
    assert scope.steps_left({("a", 1): 120, ("b", 1): 20}) == 44
    assert scope.steps_left({("a", 1): 200, ("b", 1): 20}) == 0
    assert scope.steps_left({}) == 0
